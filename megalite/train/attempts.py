"""`attempts.json` of a run directory: how often the ranks were started in vain since the newest checkpoint.

A launcher that restarts ranks does not know whether that helps. Rank 0 counts: the fourth start from one checkpoint
ends the run, with a status that is not retried. A run that ends in good order takes the file away; one of another
launch counts anew.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from megalite.checkpoint import write_small
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
        this = [self._launch, iteration]
        same: list[object] = []
        with suppress(OSError, ValueError, TypeError):
            same = [attempt for attempt in json.loads(self._path.read_text()) if attempt == this]
        if len(same) >= MOST:
            self.end()
            raise CheckpointError(
                f"`save`={self._path.parent}: {len(same)} attempts from iteration {iteration} have failed before a new "
                "checkpoint; the cause is told above, where they failed"
            )
        with suppress(OSError):  # who cannot write here will hear of it where it matters
            write_small(self._path, json.dumps([*same, this]).encode())

    def end(self) -> None:
        """The run ends in good order, or must not be tried again."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
