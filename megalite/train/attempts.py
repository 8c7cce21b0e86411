"""`attempts.json` of a run directory: how often the ranks were started in vain since the newest checkpoint.

A launcher that restarts ranks does not know whether that helps. Rank 0 counts: the fourth start from one checkpoint
ends the run, with a status that is not retried. A run that ends in good order takes the file away; one of another
launch counts anew.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.errors import CheckpointError

ATTEMPTS_FILE = "attempts.json"
MOST = 3


class Attempts:
    """Of one launch ("": nobody restarts these ranks, and nothing is counted). For rank 0."""

    def __init__(self, save: str | None, launch: str) -> None:
        self._path = Path(save) / ATTEMPTS_FILE if save is not None and launch else None
        self._launch = launch

    def begin(self, iteration: int) -> None:
        """The ranks start from `iteration`. Raises CheckpointError where that has failed too often."""
        if self._path is None:
            return
        count = self._count(iteration)
        if count >= MOST:
            self.end()
            raise CheckpointError(
                f"`save`={self._path.parent}: {count} attempts from iteration {iteration} have failed before a new "
                "checkpoint; the cause is told above, where they failed"
            )
        staged = self._path.with_name(f".{ATTEMPTS_FILE}.tmp")
        with suppress(OSError):  # who cannot write here will hear of it where it matters
            staged.write_text(json.dumps({"launch": self._launch, "iteration": iteration, "count": count + 1}))
            os.replace(staged, self._path)

    def end(self) -> None:
        """The run ends in good order, or must not be tried again."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def _count(self, iteration: int) -> int:
        """Attempts from this iteration so far."""
        assert self._path is not None
        try:
            told: Any = json.loads(self._path.read_text())
            same = told["launch"] == self._launch and told["iteration"] == iteration
            return int(told["count"]) if same else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0
