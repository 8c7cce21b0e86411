"""Update: what REDUCE, NORM and STEP mean for the weights.

    REDUCE   starts the sums: gradients over data-parallel ranks, tied copies over the pipeline
    NORM     waits for them and starts the sum for the global norm
    STEP     waits for the norm; if it is finite: clips, and steps the sharded optimizer
             if it is not: every rank decides alike, and the weights stay as they are

Norm, clip coefficient and the decision to skip stay on the device, so that the host can launch the next batch
meanwhile. The host reads the outcome of an update just before it makes the next one (`resolve_pending`).

The sums overlap the computation that follows in the program. In a program without NORM, STEP does its work, too.
Between REDUCE and STEP an asynchronous schedule computes backwards of the next update, whose gradients go to another
buffer (`update % gradient buffers`). Synchronous schedules, 2BW and PipeDream differ only in where their program says
REDUCE, NORM and STEP, and in how many weight versions they keep.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from megalite.comm import Handle
from megalite.engine.spikes import SpikeGuard
from megalite.engine.weights import Weights
from megalite.errors import RuntimeFailure
from megalite.faults import fault_point
from megalite.gradient import GradSink
from megalite.late_reading import LateReading
from megalite.optim import LossScaler
from megalite.parallel.pipeline import Events
from megalite.parallel.zero import PendingNorm, where_not_finite
from megalite.schedule import NORM, REDUCE, RESHARD, STEP, UNSHARD, Action, ChunkUse, Program, StageKey, plan_chunks


@dataclass(frozen=True)
class Hyperparameters:
    """What one update uses."""

    learning_rate: float
    weight_decay: float  # of the parameters that decay
    clip_grad: float  # the largest global norm of the gradient; 0: it is not clipped
    loss_scale: float | Tensor
    iteration: int  # counted from 1
    samples: int  # of the iteration that this completes; 0 for all but the last of PipeDream's updates in an iteration
    decoupled_lr: float | None = None  # of the parameters that have a learning rate of their own; None: the same


@dataclass(frozen=True)
class UpdateResult:
    """One update. On a GPU `grad_norm` and `skipped` (0 or 1) are still on the device."""

    numbers: Hyperparameters
    # Before clipping, without the loss scale; None if there is no global norm, or the update is known to be skipped.
    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    norm: Tensor  # 0-dim: what the update was decided by, finite or not


@dataclass(frozen=True)
class _PendingUpdate:
    """An update whose outcome the host has not read yet."""

    update: int
    numbers: Hyperparameters
    overflow: Tensor  # 0-dim, 1 where its norm is not finite
    reading: LateReading  # of its norm, and of the limit above which that is a spike, if spikes are looked for


@dataclass(eq=False)
class Updater(Events):
    """Carries out the actions that concern weights: reductions and optimizer steps of this rank's stages."""

    weights: Weights
    _: KW_ONLY
    policy: Callable[[int], Hyperparameters]  # update -> learning rate, weight decay, loss scale of that batch
    # (Samples of an iteration, whether any of its updates was skipped): called once that is known.
    count_iteration: Callable[[int, bool], None]
    scaler: LossScaler
    nonfinite: str  # 'stop' or 'skip'
    max_skipped: int  # number of consecutive skips at the smallest loss scale that ends the run; `stuck` counts them
    version: int  # number of updates that the newest weights have seen
    update_of: Callable[[int], int]  # global id of a micro-batch -> the update that its gradient belongs to
    late: bool  # read the outcome of an update just before the next one, not at once (on a GPU)
    spikes: SpikeGuard | None = None  # looks for gradient norms that are out of proportion; None: nobody does

    def __post_init__(self) -> None:
        self._buffers_of, self._all_buffers = self.weights.buffers, self.weights.families
        self.stuck = 0
        self._pending: _PendingUpdate | None = None
        self._skipped_here = False  # whether an update of the iteration so far was skipped
        self._arrived: dict[str, set[StageKey]] = {REDUCE: set(), NORM: set(), STEP: set()}
        self._tied: dict[int, list[Handle]] = {}
        self._norm: PendingNorm | None = None
        self._plan: tuple[Program, list[ChunkUse]] | None = None
        self.results: list[UpdateResult] = []

    # called by the executor and the trainer

    def begin_batch(self, program: Program, rank: int, actions: Sequence[Action]) -> None:
        """The actions of a batch follow: which layers' weights are on the device when is planned, where they live on
        the host."""
        if program.chunks is not None:
            if self._plan is None or self._plan[0] is not program:
                self._plan = program, plan_chunks(program, rank, actions)
            self.weights.follow(self._plan[1])

    def newest_version(self) -> int:
        return self.version

    def restart(self, version: int) -> None:
        """Continues with the loaded weights of this version. The pipeline must be empty; what the host has not read yet
        of the updates so far is dropped."""
        self.version, self._pending, self._skipped_here, self.stuck = version, None, False, 0

    def before_backward(self, stage: StageKey, microbatch: int, *, last: Mapping[GradSink, int] | bool) -> None:
        for buffers in self._buffers_of[stage]:
            buffers.gradients.select(self.update_of(microbatch))
            if last is not False:
                buffers.gradients.arm(None if last is True else last)

    def execute(self, action: Action) -> None:
        """Carries out an action that the executor has yielded. Raises RuntimeFailure for an unknown action kind."""
        stage, update = action.stage_key, action.microbatch
        if action.kind == REDUCE:
            self._reduce(stage, update)
        elif action.kind in (NORM, STEP):
            if self._is_last(action.kind, stage):
                self._select(update)
                norm = self._norm or self._start_norm(update)
                self._norm = norm if action.kind == NORM else None
                if action.kind == STEP:
                    self._step(update, norm)
        elif action.kind in (UNSHARD, RESHARD):
            for buffers in self._buffers_of[stage]:
                move = buffers.weights.unshard if action.kind == UNSHARD else buffers.weights.reshard
                move()
        else:
            raise RuntimeFailure(f"{action}: unknown action kind {action.kind!r}")

    def _reduce(self, stage: StageKey, update: int) -> None:
        fault_point("grad_reduce", update=update)
        for buffers in self._buffers_of[stage]:
            buffers.gradients.select(update)
            buffers.gradients.start_reduce()
        if self._is_last(REDUCE, stage):
            self._select(update)
            self._tied[update] = self.weights.start_tied_sums()

    def _step(self, update: int, pending_norm: PendingNorm) -> None:
        """Steps the optimizer."""
        self.resolve_pending()
        numbers = self.policy(update)
        norm = pending_norm.wait() / numbers.loss_scale
        overflow = found_inf = 1.0 - norm.isfinite().float()
        read = norm[None]
        if self.spikes is not None:
            limit = self.spikes.limit(norm)
            read = torch.stack([norm, limit])
            if self.spikes.withholds:
                found_inf = torch.maximum(found_inf, (norm > limit).float())
        reading = LateReading(read)
        self._pending = _PendingUpdate(update, numbers, overflow, reading)
        self.weights.optimizer.finish_step()  # it may still read what comes now
        self.weights.follow(None)
        delay = self.weights.delay
        delay.begin(numbers.iteration)
        delay.learning_rate, delay.weight_decay = numbers.learning_rate, numbers.weight_decay
        delay.decoupled_lr = numbers.decoupled_lr
        fault_point("opt_step", update=update)
        self.weights.optimizer.step(
            lr=numbers.learning_rate,
            weight_decay=numbers.weight_decay,
            decoupled_lr=numbers.decoupled_lr,
            grad_scale=_grad_scale(norm, found_inf, numbers),
            found_inf=found_inf,
            version=self.version + 1,
        )
        if not delay.of_weights:  # the next batch runs on them
            self.weights.optimizer.finish_step()
        for state in self.weights.states:
            state.step(lambda number: self.update_of(number) == update, found_inf, self.version + 1)
        self.version += 1
        shown: Tensor | float | None = norm
        skipped: Tensor | bool = found_inf
        if not self.late:
            skipped = self.resolve_pending()
            shown = None if skipped else reading.read()[0]
        shown = shown if self.weights.together is None else None
        self.results.append(UpdateResult(numbers, shown, skipped, norm))
        for buffers in self._all_buffers:
            buffers.gradients.begin_batch()

    # the update

    def _is_last(self, event: str, stage: StageKey) -> bool:
        """Whether all of this rank's stages have now reached the event."""
        arrived = self._arrived[event]
        arrived.add(stage)
        if len(arrived) < len(self._buffers_of):
            return False
        arrived.clear()
        return True

    def _select(self, update: int) -> None:
        for buffers in self._all_buffers:
            buffers.gradients.select(update)

    def _start_norm(self, update: int) -> PendingNorm:
        # The sum of the tied gradients of update t + 1 may be in flight before update t steps: in 2BW with m = p - 1
        # micro-batches the last rank reaches REDUCE t + 1 first.
        for handle in self._tied.pop(update):
            handle.wait()
        for buffers in self._all_buffers:
            buffers.gradients.start_tied_reduce()
        for buffers in self._all_buffers:
            buffers.gradients.finish_reduce()
        return self.weights.optimizer.start_grad_norm()

    def resolve_pending(self) -> bool:
        """Reads the outcome of the pending update, if there is one, counts it, and returns whether it was skipped.

        Raises RuntimeFailure if gradients were not finite and the run must end.
        """
        if self._pending is None:
            return False
        latest, self._pending = self._pending, None
        norm, *limit = latest.reading.read()
        overflow = not math.isfinite(norm)
        spikes = self.spikes
        skipped = overflow
        if spikes is not None and spikes.resolve(latest.update, norm, *limit, iteration=latest.numbers.iteration):
            skipped |= spikes.withholds
        self.weights.optimizer.count_step(skipped=skipped)
        self._skipped_here |= skipped
        if latest.numbers.samples:
            self.count_iteration(latest.numbers.samples, self._skipped_here)
            self._skipped_here = False
        self.stuck = self.stuck + self.scaler.at_minimum if overflow else 0
        self.scaler.update(found_non_finite=overflow)
        if overflow and not self.scaler.skips_non_finite and self.nonfinite == "stop":
            where = where_not_finite(self._all_buffers, overwritten=self.late)
            raise RuntimeFailure(
                f"update {latest.update + 1}: the gradient norm is {norm} ({where}); stopped before "
                "the update, the weights are as they were; look at the data and `lr`, or continue with `nonfinite`=skip"
            )
        if self.stuck >= self.max_skipped:
            raise RuntimeFailure(f"update {latest.update + 1}: {self.describe_skips()}")
        return skipped

    def loss_scale(self, *, previous: bool) -> float | Tensor:
        """The loss scale of a batch that begins now. previous: the scale before the latest update instead."""
        scaler, latest = self.scaler, self._pending
        if latest is None:
            return scaler.previous if previous else scaler.scale
        taken, skipped = scaler.foresee()
        if previous or taken == skipped:
            return scaler.scale if previous else taken
        low, high = (latest.overflow.new_full((), scale, dtype=torch.float64) for scale in (skipped, taken))
        return torch.where(latest.overflow > 0, low, high)

    def describe_skips(self) -> str:
        """Why the latest updates were skipped, as text."""
        return (
            f"the last {self.stuck} were skipped, the gradient norm is not finite and the loss scale of "
            f"{self.scaler.scale:g} cannot fall (`max_skipped_updates`={self.max_skipped}); nothing is saved over "
            "the checkpoints before; continue from one of them with a lower `lr` or `bf16`, and look at the data"
        )

    def take_results(self) -> list[UpdateResult]:
        results, self.results = self.results, []
        return results


def _grad_scale(norm: Tensor, found_inf: Tensor, numbers: Hyperparameters) -> float | Tensor:
    """The factor that clips the gradients and removes the loss scale."""
    if numbers.clip_grad <= 0:
        return 1.0 / numbers.loss_scale
    clip = (numbers.clip_grad / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(found_inf > 0, 1.0, clip / numbers.loss_scale)
