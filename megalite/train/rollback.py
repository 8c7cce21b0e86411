"""Samples that a run passes over, and the way back to a checkpoint where a spike asks for it (`--spikes
action=rollback`; PaLM, arXiv 2204.02311, section 5.1).

    iterations   ... c ........ b ............. s ............ e ...
                     checkpoint | passed over   spike          | training continues
                                |<----- back -->|              |
                                |<-------- pass_over --------->|

The run loads the newest checkpoint c up to b = s - `back`, puts newer ones aside, trains again from c to b and passes
over the samples of b+1 .. e: a run that was told `--iterations-to-skip` b+1 .. e has the same weights. One that is
killed on the way comes to the same spike by the same window of norms, and decides the same. A spike less than `back`
iterations behind the range of an earlier one is no progress: the range grows. Samples do not move with the batch size.
"""

import logging
from collections.abc import Callable, Container
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from megalite.checkpoint import Meta
from megalite.config import BatchSizeSchedule
from megalite.engine import SpikeGuard
from megalite.errors import RuntimeFailure
from megalite.faults import fault_point
from megalite.observe import Record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleRange:
    """Samples `first` to `last` (exclusive), of iterations `after` + 1 to `until`."""

    first: int
    last: int
    after: int
    until: int
    rollbacks: int = 0  # of how many spikes; 0: a flag's


@dataclass
class PassedOver(Container[int]):
    """Iterations that are passed over: those of `--iterations-to-skip`, and those that begin in a range."""

    flags: Container[int] = ()
    ranges: list[SampleRange] = field(default_factory=list)

    def __contains__(self, iteration: object) -> bool:
        return iteration in self.flags or any(iteration in range(e.after + 1, e.until + 1) for e in self.ranges)

    def holds(self, iteration: int, sample: int) -> bool:
        """Whether the iteration that begins with this sample is passed over."""
        return iteration in self.flags or any(each.first <= sample < each.last for each in self.ranges)

    def add(self, new: SampleRange) -> None:
        """Joins it with those that it overlaps, and a flag's with a flag's that it touches."""
        for other in [*self.ranges]:
            overlap = min(new.last, other.last) - max(new.first, other.first)
            if overlap > 0 or (overlap == 0 and not new.rollbacks and not other.rollbacks):
                self.ranges.remove(other)
                pairs = zip((min, max, min, max, max), astuple(new), astuple(other), strict=True)
                new = SampleRange(*(of(mine, theirs) for of, mine, theirs in pairs))
        self.ranges = sorted([*self.ranges, new], key=lambda each: each.first)

    def take_up(self, meta: Meta, key: str) -> None:
        """Adds what a checkpoint holds. Raises CheckpointError."""
        rows = meta.raw.get(key, [])
        if not isinstance(rows, list):
            raise meta.wrong(key, "a list of ranges of samples")
        for row in rows:
            self.add(Meta(row, f"{meta.where}: {key}").build(SampleRange))


@dataclass(frozen=True)
class Rollback:
    """Goes back. Collective."""

    guard: SpikeGuard  # finds the spikes
    sizes: BatchSizeSchedule
    passed: PassedOver
    find: Callable[[int], Any]  # `Checkpointer.go_back`
    load: Callable[[Any], tuple[int, int]]  # takes up what that has found: its (iteration, samples consumed)

    def __call__(self, spike: int) -> Record | None:
        """After a spike in this iteration: a record of what was done; None where no checkpoint is that old. Raises
        RuntimeFailure after too many rollbacks without progress."""
        self.guard.rolls_back, settings = None, self.guard.settings
        begin, rollbacks = max(0, spike - settings.rollback_iters), 1
        until = begin + settings.rollback_skip_iters
        if behind := [each for each in self.passed.ranges if each.rollbacks and each.until > begin]:
            earlier = behind[0]
            begin, rollbacks = min(begin, earlier.after), earlier.rollbacks + 1
            if rollbacks > settings.rollback_limit:
                raise RuntimeFailure(
                    f"iteration {spike}: another spike, after {earlier.rollbacks} rollbacks (`rollback_limit`) that "
                    f"passed over the samples {earlier.first:,} to {earlier.last:,}: these samples are not the cause; "
                    f"checkpoints up to iteration {begin} stay; continue from one with a lower `lr`, or look further "
                    "back in the data"
                )
        path = self.find(begin)
        if path is None:
            if self.guard.speaks:
                logger.warning("no checkpoint up to iteration %d to go back to: the update is skipped", begin)
            return None
        fault_point("rollback.load", step=spike)
        iteration, consumed = self.load(path)
        first = self.sizes.samples_after(begin - iteration, consumed)
        new = SampleRange(first, self.sizes.samples_after(until - begin, first), begin, until, rollbacks)
        self.passed.add(new)
        if self.guard.speaks:
            logger.warning(
                f"rolled back from iteration {spike} to {path}; iterations {begin + 1} to {until} are passed over "
                f"(samples {first:,} to {new.last:,}, rollback {rollbacks} of them)"
            )
        record = {"kind": "rollback", "iteration": spike, "checkpoint_iteration": iteration}
        return record | {f"passed_over_{name}": value for name, value in asdict(new).items()}
