"""The training loop.

    until --train-iters:
        decide    is this the last iteration, is it evaluated, saved? (before the step: some pipelines never drain)
        step      the executor runs this rank's forwards, backwards and messages; the updater REDUCE, NORM and STEP
        report    hooks see the step; then evaluation and checkpoint, if they are due

The trainer knows no schedule, ZeRO stage or hook by name: `run.py` puts them together.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite.comm import Done, Handle, ParallelMesh, all_reduce_
from megalite.engine import Updater
from megalite.errors import RuntimeFailure
from megalite.faults import fault_point
from megalite.observe import ExpertStats, Hooks, Record, StepStats
from megalite.parallel.pipeline import Executor, PipelineTracer
from megalite.schedule import BatchRange, Program
from megalite.train.batch_reader import BatchReader
from megalite.train.exits import COMPLETED, FAILED, ExitPolicy, ExitReason
from megalite.train.rollback import Rollback, SampleRange

if TYPE_CHECKING:
    from megalite.train.run_state import RunState

logger = logging.getLogger(__name__)

# Iterations between two full garbage collections; generations 0 and 1 are collected after every iteration.
FULL_COLLECTION = 1000


@dataclass
class TrainingProgress:
    """How far a run has got: all of it is in every checkpoint."""

    iteration: int = 0  # iterations done, including skipped ones
    consumed_samples: int = 0  # samples read, over all replicas
    updates: int = 0  # batches that went through the pipeline; each makes one weight version, even if it is skipped
    microbatches: int = 0  # that this replica has run since the beginning, of all those that take turns
    skipped_iterations: int = 0  # that changed no weights
    schedule_samples: int = 0  # that count for the learning-rate schedule: those of skipped updates do not

    def count_iteration(self, samples: int, skipped: bool) -> None:
        """Counts an iteration of `samples` samples. skipped: whether any of its updates was."""
        self.skipped_iterations += skipped
        self.schedule_samples += 0 if skipped else samples


@dataclass(eq=False)
class Trainer:
    """Runs training from `progress` to completion; `run.py` puts it together."""

    state: RunState
    progress: TrainingProgress
    mesh: ParallelMesh
    device: torch.device
    executor: Executor
    updater: Updater
    batch_reader: BatchReader
    program: Callable[[int, int], Program]  # (micro-batches per replica, iteration) -> its schedule
    hooks: Hooks
    exits: ExitPolicy
    # (Iteration, whether it is the last) -> records; None: a signal has cut it short.
    evaluate: Callable[[int, bool], list[Record] | None]
    report_phase: Callable[[str], None]  # tells a supervisor
    # Ids of a batch's micro-batches -> what the routers did with them; None: there are no routers.
    experts: Callable[[range], Callable[[], ExpertStats]] | None
    sample: Callable[[int], list[Record]] | None  # iteration -> texts of the model
    measure: Callable[[int], list[Record]] | None  # iteration -> records of `--eval-tasks`
    tracer: PipelineTracer | None
    roll_back: Rollback | None
    unsaved: bool = False  # the beginning has not been saved

    def __post_init__(self) -> None:
        self.config, world = self.state.config, self.mesh.size("world")
        self.batch_sizes, self.lengths = self.config.batch_size_schedule(world), self.config.length_schedule
        self.train_iters = self.config.train_iterations(world)
        self._saves = self.config.checkpoint.save is not None
        self._passed = self.state.model.passed
        self._drained = True
        self._losses: dict[int, Tensor] = {}
        self._loss_handle: Handle = Done()
        self._last_saved = self._began_after = self.progress.iteration

    # read by hooks

    @property
    def iteration(self) -> int:
        return self.progress.iteration

    @property
    def consumed_samples(self) -> int:
        return self.progress.consumed_samples

    @property
    def consumed_tokens(self) -> int:
        return self.progress.consumed_samples * self.config.model.seq_length

    # the loop

    def train(self) -> str:
        """Trains to the end or to an agreed exit; returns the status that the summary line carries."""
        hooks, status = self.hooks, FAILED
        hooks.on_start(self)
        try:
            with quiet_collector():
                status = self._loop(self.exits)
                if status == COMPLETED:  # where nothing was left to train
                    self._save()
            if status == COMPLETED and not self._evaluate(final=True):
                status = str(ExitReason.SIGNAL.value)
            status, ended = FAILED, status  # unless the last save is where it should be
            self.state.checkpointer.wait()
            status = ended
        finally:
            hooks.on_end(self, status)
        return status

    def only_evaluate(self) -> int:
        """`--skip-train`: evaluates the loaded weights; returns the exit status."""
        self.hooks.on_start(self)
        self._evaluate(final=True)
        self.hooks.on_end(self, COMPLETED)
        return 0

    def _loop(self, exits: ExitPolicy) -> str:
        training = self.config.training
        while self.iteration < self.train_iters:
            number = self.iteration + 1
            self.report_phase(f"iteration {number}")
            evaluates = training.evaluates and _is_due(number, training.eval_interval)
            reason = exits.decide(number, evaluates=evaluates, last=number == self.train_iters)
            if reason is ExitReason.SAVE_FAILED:
                self.state.checkpointer.wait()  # raises on all ranks, with the reason
            stops = reason is not None or number == self.train_iters
            saves = stops or (self._saves and _is_due(number, self.config.checkpoint.save_interval))
            local = _is_due(number, self.config.checkpoint.local.non_persistent_save_interval) and not saves
            samples = self.sample is not None and _is_due(number, self.config.logging.samples.sample_interval)
            due = reason is None and _is_due(number, self.config.logging.eval_tasks.eval_tasks_interval)
            measures = self.measure if due or number == self.train_iters else None
            back = self.roll_back is not None and self.roll_back.guard.rolls_back is not None
            drains = any((stops, evaluates, saves, local, samples, measures, back))
            reads = drains or number % self.config.logging.log_interval == 0
            stats = self.train_step(drain=drains, reads=reads)
            if reads:
                self.updater.resolve_pending()
            self.hooks.after_step(self, stats)
            gc.collect(2 if number % FULL_COLLECTION == 0 else 1)
            if self._rolled_back():
                continue
            if evaluates and number < self.train_iters and (not self._evaluate(final=False) or exits.evaluation_over()):
                reason, stops = ExitReason.SIGNAL, True
            if samples and self.sample is not None:
                self.report_phase(f"samples after iteration {number}")
                self.hooks.on_samples(self, self.sample(number))
            stuck = self.updater.stuck
            if number == self.train_iters and 1 < stuck == number - self._began_after:  # every update was skipped
                raise RuntimeFailure(f"iteration {number}: {self.updater.describe_skips()}")
            if stops or (saves and not self._is_stuck()):
                self._save()
            elif local and not self._is_stuck() and (record := self.state.save_locally(self.progress)) is not None:
                self.hooks.on_record(self, record)
            if measures is not None:  # what goes wrong in them costs no checkpoint
                self.report_phase(f"tasks after iteration {number}")
                for record in measures(number):
                    self.hooks.on_evaluation(self, record)
            if reason is not None and number < self.train_iters:
                return str(reason.value)
        return COMPLETED

    def train_step(self, *, drain: bool, reads: bool = True) -> StepStats:
        """One iteration; with `drain` nothing of the next batch is begun. reads: its loss is read before the next."""
        self.mesh.waits.take()  # waiting between two iterations belongs to neither
        began = time.perf_counter()
        number, progress = self.iteration + 1, self.progress
        fault_point("iteration", rank=self.mesh.rank, step=number)
        samples, length = (schedule.at(progress.consumed_samples) for schedule in (self.batch_sizes, self.lengths))
        if self._passed.holds(number, progress.consumed_samples):
            return self._pass_over(samples, length, began)
        batch = self._plan(samples, drain=drain)
        program = self.program(batch.size, number)
        actions = program.actions_for_batch(self.mesh.coordinate("pp"), batch)
        self.updater.begin_batch(program, self.mesh.coordinate("pp"), actions)
        if self.tracer is not None:
            self.tracer.before(number, program, batch)
        for action in self.executor.run(actions, self.batch_reader):  # those that concern weights: REDUCE, STEP ...
            self.updater.execute(action)
        if self.tracer is not None:
            self.tracer.after(number, program)
        self._add_losses(self.executor.take_losses())
        self._drained = batch.next_size == 0 or not program.asynchronous
        if self._drained:
            self.executor.finish()
        losses = self._batch_loss(batch.iteration, reads=reads)
        self.batch_reader.forget(batch.iteration)
        progress.iteration, progress.updates = number, progress.updates + 1
        progress.consumed_samples += samples
        progress.microbatches += batch.size
        results = self.updater.take_results()
        skipped = [flag for result in results if isinstance(flag := result.skipped, Tensor)]  # nothing is read here
        return self._stats(
            samples,
            length,
            began,
            **losses,
            grad_norm=results[-1].grad_norm,
            learning_rate=results[-1].numbers.learning_rate,
            loss_scale=results[-1].numbers.loss_scale,
            skipped=torch.stack(skipped).amax() if skipped else any(result.skipped for result in results),
            experts=self.experts(range(batch.start, batch.start + batch.size)) if self.experts is not None else None,
            wait_time_s=self.mesh.waits.take(),
            data_time_s=self.batch_reader.take_seconds(),
        )

    def _plan(self, samples: int, *, drain: bool) -> BatchRange:
        """Announces this batch and, if the pipeline continues, the next one."""
        progress = self.progress
        size = samples // (self.config.training.micro_batch_size * self.mesh.size("stream"))
        following = self.batch_sizes.at(progress.consumed_samples + samples)
        # A batch of another size has another program: the pipeline drains between the two.
        skips = self._passed.holds(self.iteration + 2, progress.consumed_samples + samples)
        next_size = 0 if drain or skips or following != samples else size
        self.batch_reader.plan(progress.updates, first=progress.microbatches, samples=samples)
        self.batch_reader.plan(progress.updates + 1, first=progress.microbatches + size, samples=following)
        return BatchRange(progress.updates, progress.microbatches, size, next_size, first=self._drained)

    def _pass_over(self, samples: int, length: int, began: float) -> StepStats:
        """The data of this iteration is consumed, nothing is computed."""
        progress, first = self.progress, self.progress.consumed_samples
        self._passed.add(SampleRange(first, first + samples, progress.iteration, progress.iteration + 1))
        progress.iteration += 1
        progress.consumed_samples += samples
        progress.skipped_iterations += 1
        self.batch_reader.pass_over(samples)
        return self._stats(samples, length, began, skipped=True)

    def _stats(self, samples: int, length: int, began: float, **measured: Any) -> StepStats:
        return StepStats(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            global_batch_size=samples,
            seq_length=length,
            iteration_time_s=time.perf_counter() - began,
            **measured,
        )

    def _rolled_back(self) -> bool:
        """Goes back to a checkpoint if a spike asks for it and nothing is in flight; whether that was done."""
        if self.roll_back is None or (spike := self.roll_back.guard.rolls_back) is None or not self._drained:
            return False
        self.hooks.log(self)
        self.report_phase(f"rollback after a spike in iteration {spike}")
        if (record := self.roll_back(spike)) is None:
            return False
        self._last_saved = self._began_after = self.iteration
        self.hooks.on_record(self, record)
        return True

    # the loss of a batch

    def _add_losses(self, losses: dict[int, Tensor]) -> None:
        for microbatch, loss in losses.items():
            batch, share = self.batch_reader.share_of_loss(microbatch)
            # in fp32 a thousand micro-batches, one by one, would lose 1e-5
            mine = loss.to(torch.float64) * share
            if self.batch_reader.more:
                mine = torch.cat((mine[None], self.batch_reader.more_sums(microbatch, share)))
            self._losses[batch] = self._losses.get(batch, 0.0) + mine

    def _batch_loss(self, number: int, *, reads: bool) -> dict[str, Any]:
        """The batch's losses, by their names in `StepStats`, 0 where no token counted; the same on all ranks."""
        self._loss_handle.wait()
        mine = self._losses.pop(number, None)
        total = torch.zeros(2 + self.batch_reader.more, dtype=torch.float64, device=self.device)
        if mine is not None:
            total = torch.cat((mine.view(-1), self.batch_reader.batch(number).counted.view(1)))
        if self.mesh.coordinate("tp") > 0:  # tensor-parallel ranks hold the same loss
            total = torch.zeros_like(total)
        self._loss_handle = all_reduce_(total, self.mesh.world, async_op=True)
        if reads or self.device.type == "cpu":
            self._loss_handle.wait()
        return {"lm_loss": total[0], "counted_tokens": total[-1], **self.batch_reader.named(total[1:-1])}

    # evaluation and checkpoints

    def _is_stuck(self) -> bool:
        """Whether to postpone a save: the weights have not changed since the last one, and may have diverged."""
        stuck = self.updater.stuck
        if stuck == 2 and self._saves and self.mesh.world.is_first:
            logger.warning("update skipped again at the smallest loss scale: no checkpoint until one succeeds")
        return stuck >= 2

    def _evaluate(self, *, final: bool) -> bool:
        """Whether the evaluation has come to its end: a signal cuts it short, the time that is left is for a save."""
        self.report_phase(f"evaluation after iteration {self.iteration}")
        records = self.evaluate(self.iteration, final)
        for record in records or ():
            self.hooks.on_evaluation(self, record)
        if records is None and self.mesh.world.is_first:
            logger.warning("received a signal: the evaluation after iteration %d is cut short", self.iteration)
        return records is not None

    def _save(self) -> None:
        if not self._saves or (self._last_saved == self.iteration and not self.unsaved):
            return
        self.report_phase(f"checkpoint of iteration {self.iteration}")
        began = time.perf_counter()
        path = self.state.save(self.progress)
        self._last_saved, self.unsaved = self.iteration, False
        self.hooks.on_save(self, iteration=self.iteration, path=path, seconds=time.perf_counter() - began)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Turns off automatic garbage collection. `Trainer._loop` collects on all ranks at the same iterations: ranks that
    paused one after the other would each make the rest wait. Objects that exist when the run begins are frozen, so that
    no later collection examines them; a caller who has frozen his own keeps them so."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    if not frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
