"""How long a run still takes, and what it has cost: `eta_s` and `device_hours` of a `"train"` record.

The time left is that of the samples that are left, at the rate of the latest `RECENT` log intervals by the clock on the
wall, evaluations and checkpoints included. Device hours are devices times hours since the first start: what a resumed
run begins with stands in the last record of its metrics.jsonl.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record

RECENT = 20


class PaceHook(Hook):
    """Adds both to records; comes before the hooks that write them.

    metrics: the file of the run that may be continued; None: nothing is kept. clock: seconds, monotonic.
    """

    def __init__(self, metrics: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)
        self._began = self._hours_before = 0.0

    def on_start(self, trainer: TrainerView) -> None:
        self._began = self._clock()
        self._marks.append((self._began, trainer.consumed_samples))
        if trainer.iteration > 0 and self._metrics is not None:
            self._hours_before = last_device_hours(self._metrics)

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        now, world = self._clock(), trainer.mesh.size("world")
        self._marks.append((now, trainer.consumed_samples))
        (before, first), samples = self._marks[0], trainer.consumed_samples
        left = trainer.config.total_train_samples(world) - samples
        if samples > first:
            record["eta_s"] = max(0, left) * (now - before) / (samples - first)
        record["device_hours"] = self._hours_before + world * (now - self._began) / 3600


def last_device_hours(metrics: Path) -> float:
    """The last `device_hours` in a metrics.jsonl; 0 where there is none."""
    found: list[str] = []
    with suppress(OSError):
        found = re.findall(r'"device_hours": ([\d.]+(?:e[+-]?\d+)?)', metrics.read_text(errors="replace"))
    return float(found[-1]) if found else 0.0
