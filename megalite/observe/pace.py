"""How long a run still takes, and what it has cost: `eta_s` and `device_hours` of a `"train"` record.

The time left is that of the samples that are left, at the rate of the latest `RECENT` log intervals by the clock on the
wall, evaluations and checkpoints included. Device hours are devices times hours since the first start.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record

RECENT = 20


class PaceHook(Hook):
    """Adds both to records; comes before the hooks that write them.

    metrics: metrics.jsonl of the run, whose last record says what a run that is resumed has cost; None: there is none.
    clock: seconds, monotonic.
    """

    def __init__(self, metrics: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)
        self._began = self._hours_before = 0.0

    def on_start(self, trainer: TrainerView) -> None:
        self._began = self._clock()
        self._marks.append((self._began, trainer.consumed_samples))
        if trainer.iteration > 0 and self._metrics is not None and self._metrics.is_file():
            told = re.findall(r'"device_hours": ([\d.]+(?:e[+-]?\d+)?)', self._metrics.read_text(errors="replace"))
            self._hours_before = float(told[-1]) if told else 0.0

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        now, samples, world = self._clock(), trainer.consumed_samples, trainer.mesh.size("world")
        self._marks.append((now, samples))
        before, first = self._marks[0]
        left = max(0, trainer.config.total_train_samples(world) - samples)
        if samples > first:
            record["eta_s"] = left * (now - before) / (samples - first)
        record["device_hours"] = self._hours_before + world * (now - self._began) / 3600
