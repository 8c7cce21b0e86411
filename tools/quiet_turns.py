"""The clock of `profile_layers.py`: the same work again and again, in all processes at once, while others are quiet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from disturbance import BusyClock
from megalite.comm import Axis, all_gather_json, barrier
from megalite.config import Config
from megalite.progress import OnProgress, no_progress

#: Turns until enough of them were quiet, as a multiple of those that are wanted.
PATIENCE = 4

Work = Callable[[], dict[str, float]]


@dataclass
class Tally:
    """How far the measurements of a profile are.

    total: of them. disturbed: cores that other programs used, of each that found too few quiet turns.
    """

    total: int
    on_progress: OnProgress = no_progress
    done: int = 0
    disturbed: list[float] = field(default_factory=list)

    def tell(self, others: float, *, waits: bool) -> None:
        """others: cores that other programs use now. waits: turns beside them are made again."""
        note = f"other programs use {others:.1f} cores" if others >= BusyClock.QUIET else ""
        waiting = "; waiting for quiet, at most four times as long (--beside-others does not wait)"
        self.on_progress(self.done, self.total, note + waiting * (waits and bool(note)))

    def remarks(self) -> Iterator[str]:
        """What a reader of the numbers must know."""
        if self.disturbed:
            most = max(self.disturbed)
            yield (
                f"note: {len(self.disturbed)} of {self.done} measurements were made beside other programs, which used "
                f"up to {most:.1f} cores: their times are too long; measure again when the machine is quiet"
            )


@dataclass(frozen=True)
class Bench:
    """One process of those that measure together.

    axis: all of them. beside_others: turns count whatever other programs use.
    """

    config: Config
    axis: Axis
    device: torch.device
    repeats: int
    tally: Tally
    beside_others: bool = False

    def medians(self, work: Work) -> dict[str, float]:
        """Name -> seconds: the median over quiet turns, of the slowest process. Collective."""
        turns: list[dict[str, float]] = []
        for attempt in range(1 if self.beside_others else PATIENCE):
            turns += list(self._turns(work, waits=attempt > 0))
            everybody = all_gather_json(turns, self.axis)
            others = [
                max(0.0, (everybody[0][turn]["busy"] - sum(one[turn]["own"] for one in everybody)))
                / everybody[0][turn]["wall"]
                for turn in range(len(turns))
            ]
            quiet = [turn for turn, share in enumerate(others) if share < BusyClock.QUIET]
            self.tally.tell(statistics.median(others[-self.repeats :]), waits=not self.beside_others)
            if len(quiet) >= (self.repeats + 1) // 2:
                break
        if len(quiet) < (self.repeats + 1) // 2:
            self.tally.disturbed.append(statistics.median(others))
        self.tally.done += 1
        kept = range(len(turns)) if self.beside_others or len(quiet) < 3 else quiet
        names = [name for name in turns[0] if name not in ("busy", "own", "wall")]
        return {name: max(statistics.median(one[turn][name] for turn in kept) for one in everybody) for name in names}

    def _turns(self, work: Work, *, waits: bool) -> Iterator[dict[str, float]]:
        """As many as are wanted, after one that only warms up."""
        for number in range(self.repeats + 1):
            turn = self._turn(work)
            if number > 0:
                yield turn
            self.tally.tell(max(0.0, turn["busy"] - self.axis.size * turn["own"]) / turn["wall"], waits=waits)

    def _turn(self, work: Work) -> dict[str, float]:
        barrier(self.axis)
        busy, own, begin = BusyClock.busy_seconds(), time.process_time(), time.perf_counter()
        found = work()
        barrier(self.axis)
        return found | {
            "busy": BusyClock.busy_seconds() - busy,
            "own": time.process_time() - own,
            "wall": time.perf_counter() - begin,
        }

    def clock(self, run: Callable[[], object]) -> float:
        """Seconds until the device has done it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin
