"""Hooks: how a run is watched without the trainer knowing who watches.

    Trainer.after_step ----> Hooks ---- every step -----------> hook.after_step(trainer, stats)
                               |------- every log interval ----> hook.on_log(trainer, record)
    Trainer evaluates/saves -> Hooks ---------------------------> hook.on_evaluation / on_save
    any of these three ---------------------------------------> hook.on_record
    Trainer ends ------------> Hooks (closes the interval) -----> hook.on_end(trainer, summary)

All ranks run the same `Hooks`, so that a hook may communicate in `on_start` and `on_log`; which hooks write something
on which rank is decided where they are made (`observers.make_hooks`). A hook sees the trainer through `TrainerView`
and never changes it.
"""

import logging
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from megalite.comm import ParallelMesh
from megalite.config import Config
from megalite.errors import MegaliteError
from megalite.observe.stats import IntervalStats, Record, StepStats

logger = logging.getLogger(__name__)


class TrainerView(Protocol):
    """The trainer as hooks see it, read only.

    iteration, consumed_samples, consumed_tokens: totals after the last finished iteration.
    train_iters: total iterations of the training, also where its length was given in samples or tokens.
    """

    config: Config
    mesh: ParallelMesh
    device: torch.device
    train_iters: int

    @property
    def iteration(self) -> int: ...

    @property
    def consumed_samples(self) -> int: ...

    @property
    def consumed_tokens(self) -> int: ...


class Hook:
    """Base of all hooks: every method does nothing until it is overridden."""

    fails_alone_as: str | None = None  # see `guarded`

    def on_start(self, trainer: TrainerView) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        """After every iteration. Reading a tensor of `stats` here makes the host wait for the device."""

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        """After every log interval, with the `"train"` record; hooks that come later see what this one adds to it."""
        self.on_losses(trainer, record)

    def on_evaluation(self, trainer: TrainerView, record: Record) -> None:
        """After every evaluation, with a `"valid"` or `"test"` record (`stats.evaluation_record`)."""
        self.on_losses(trainer, record)

    def on_samples(self, trainer: TrainerView, records: list[Record]) -> None:
        """After every `--sample-interval`: a `"sample"` record for each prompt, with iteration, prompt and text."""

    def on_losses(self, trainer: TrainerView, record: Record) -> None:
        """After every log interval and every evaluation, for hooks that treat them alike."""
        self.on_record(trainer, record)

    def on_save(self, trainer: TrainerView, record: Record) -> None:
        """After a checkpoint was written, with a `"save"` record: iteration, path, save_time_ms."""
        self.on_record(trainer, record)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """After any of these; and with a `"rollback"` record, after the run went back to a checkpoint: the iteration of
        the spike, that of the checkpoint, and the samples and iterations that will be passed over."""

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        """Once, at the end, also after a failure; ranks must not communicate here."""


class Hooks:
    """The hooks of a run, in the order in which they are called, and the trainer's events for them (see `Hook`).

    It adds what several of them need: steps become a record a log interval, the run a summary.
    flops_per_sample: as in `IntervalStats`.
    """

    def __init__(self, hooks: Sequence[Hook], *, flops_per_sample: float | None = None) -> None:
        self._flops_per_sample = flops_per_sample
        self._hooks = list(hooks)
        self._interval: IntervalStats | None = None
        self._began = time.perf_counter()
        self._useful_s = 0.0
        self._last: dict[str, Record] = {}

    def on_start(self, trainer: TrainerView) -> None:
        """Opens the first log interval."""
        self._began = time.perf_counter()
        self._interval = IntervalStats(
            trainer.config,
            world_size=trainer.mesh.size("world"),
            device=trainer.device,
            flops_per_sample=self._flops_per_sample,
        )
        self._call("on_start", trainer)

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        """Closes the log interval at multiples of `--log-interval` and at the last iteration."""
        assert self._interval is not None, "on_start comes first"
        self._interval.add(stats)
        self._call("after_step", trainer, stats)
        last = stats.iteration >= trainer.train_iters
        if last or stats.iteration % trainer.config.logging.log_interval == 0:
            self.log(trainer)

    def log(self, trainer: TrainerView) -> None:
        """Close the log interval now, if it holds a step. All ranks do so at the same iteration."""
        if not self._interval:
            return
        record = self._interval.record()
        self._useful_s += 1e-3 * record["iteration_time_ms"] * (record["iterations"] - record["skipped_iterations"])
        self._call("on_log", trainer, record)
        self._last["train"] = record

    def on_evaluation(self, trainer: TrainerView, record: Record) -> None:
        """The summary will have the last record of each kind."""
        self._call("on_evaluation", trainer, record)
        self._last[f"{record['kind']}_{record['set']}" if "set" in record else record["kind"]] = record

    def on_samples(self, trainer: TrainerView, records: list[Record]) -> None:
        """Passes on texts that the model has generated."""
        self._call("on_samples", trainer, records)

    def on_save(self, trainer: TrainerView, *, iteration: int, path: str, seconds: float) -> None:
        """A checkpoint of `iteration` was written to `path`, for which training waited `seconds`."""
        record: Record = {"kind": "save", "iteration": iteration, "path": path, "save_time_ms": 1e3 * seconds}
        self._call("on_save", trainer, record)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Passes on what nothing else is for: a rollback."""
        self._call("on_record", trainer, record)

    def on_end(self, trainer: TrainerView, status: str) -> None:
        """`status`: `completed`, the value of an `ExitReason`, or `failed`, which is `interrupted` where Ctrl-C did it.

        After a failure the open interval is not closed, because ranks that have failed cannot be asked.
        """
        if status != "failed":
            self.log(trainer)
        elif isinstance(sys.exception(), KeyboardInterrupt):  # in the trainer's `finally`
            status = "interrupted"
        self._call("on_end", trainer, self._summary(trainer, status))

    def _call(self, event: str, *arguments: object) -> None:
        for hook in list(self._hooks):
            try:
                getattr(hook, event)(*arguments)
            except Exception as error:
                if hook.fails_alone_as is None:
                    raise
                self._hooks.remove(hook)
                what = str(error) if isinstance(error, MegaliteError) else f"{type(error).__name__}: {error}"
                ends = "did not start" if event == "on_start" else "stopped"
                logger.warning("%s %s, training continues: %s", hook.fails_alone_as, ends, what)

    def _summary(self, trainer: TrainerView, status: str) -> Record:
        wall = time.perf_counter() - self._began
        summary: Record = {
            "kind": "summary",
            "status": status,
            "iteration": trainer.iteration,
            "consumed_samples": trainer.consumed_samples,
            "consumed_tokens": trainer.consumed_tokens,
            "wall_time_s": wall,
            "goodput": self._useful_s / wall if wall > 0 else None,
        }
        for kind, record in self._last.items():
            for key in ("lm_loss", "ppl", "bits_per_byte", "tokens_per_second", "peak_memory_bytes"):
                if key in record:
                    summary[key if kind == "train" else f"{kind}_{key}"] = record[key]
        return summary


def guarded(hook: Hook, name: str) -> Hook:
    """Logs the hook's first exception as a warning and removes the hook; training continues.

    For hooks that write on their own rank only: one that communicates must fail on all ranks or on none. name: its name
    in the warning.
    """
    hook.fails_alone_as = name
    return hook
