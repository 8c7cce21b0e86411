"""Asynchronous saving: copy, return, write in the background of training.

    main thread     plan, copy -------- train ---- train ---- train ------ wait()
    writer thread              \\------ write, sync, report
    rank 0's writer                                        \\-- commit, delete old ones

The writers use no collective, which would have to be ordered against training's: each leaves its report as a file
in the staging directory, and rank 0's writer commits when all have come. A rank has at most one save in flight and one
copy of its own part, in memory that is kept from save to save (pinned where the values live on a GPU). What is written
is the state at the moment of the call.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megalite.checkpoint.saving import SaveJob, SaveReport
from megalite.checkpoint.storage import TensorPart
from megalite.page_locked import host_bytes

_ALIGN = 64


class StagingMemory:
    """Host memory that holds a copy of what a rank writes; it grows to the largest save and is then reused."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, parts: Sequence[TensorPart]) -> list[TensorPart]:
        """The parts with their values as they are now; later changes of the originals have no effect."""
        starts, at = [], 0
        for part in parts:
            starts.append(at)
            at += -(-part.nbytes // _ALIGN) * _ALIGN
        cuda = any(part.values.is_cuda for part in parts)
        if self._bytes.numel() < at or (cuda and not self._bytes.is_pinned()):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # give the old memory back before asking for more
            self._bytes = host_bytes(at, pinned=cuda)
        copies = []
        for part, start in zip(parts, starts, strict=True):
            space = self._bytes[start : start + part.nbytes].view(part.values.dtype).view(part.values.shape)
            space.copy_(part.values, non_blocking=cuda)
            copies.append(TensorPart(part.name, part.global_shape, part.box, space))
        if cuda:
            torch.cuda.current_stream().synchronize()
        return copies


class BackgroundSave:
    """One save in flight on this rank. problem: why it has failed, as far as this rank knows by now.

    after_commit: rank 0, once the checkpoint is committed (it deletes old checkpoints).
    """

    def __init__(self, job: SaveJob, world_size: int, after_commit: Callable[[], None]) -> None:
        self.job = job
        self.problem: str | None = None
        self._world_size = world_size
        self._after_commit = after_commit
        self._written, self._finishing = threading.Event(), threading.Event()
        self._report: SaveReport = {}
        self._handed_over: list[SaveReport] | None = None
        self._thread = threading.Thread(target=self._run, name=f"save-{job.step}", daemon=True)
        self._thread.start()

    def wait_written(self) -> SaveReport:
        """Waits for this rank's own part only; returns its report."""
        self._written.wait()
        return self._report

    def finish(self, reports: list[SaveReport]) -> str | None:
        """Waits for the end, given all ranks' reports. Returns this rank's problem, None if it succeeded."""
        self._handed_over = reports
        self._finishing.set()
        self._thread.join()
        return self.problem

    def _run(self) -> None:
        try:
            self._report = self.job.write_part()
            self.problem = self._report.get("error")
            if self.job.rank != 0:
                _post(self.job.staging, self.job.rank, self._report)
        finally:
            self._written.set()
        if self.job.rank == 0:
            reports = self._collect()
            for rank in range(1, self._world_size):
                _report_path(self.job.staging, rank).unlink(missing_ok=True)
            self.problem = self.job.commit(reports)
            if self.problem is None:
                self._after_commit()

    def _collect(self) -> list[SaveReport]:
        """Rank 0's writer: all ranks' reports, from their files or from `finish`, whichever is first."""
        found: dict[int, SaveReport] = {0: self._report}
        pause = 0.005
        while len(found) < self._world_size:
            if self._handed_over is not None:
                return self._handed_over
            for path in self.job.staging.glob(_REPORTS):  # one listing, however many ranks: shared file systems
                if (rank := int(path.stem.rpartition("_")[2])) not in found:
                    found[rank] = json.loads(path.read_bytes())
            pause = min(1.0, 2 * pause)
            self._finishing.wait(pause)
        return [found[rank] for rank in range(self._world_size)]


_REPORTS = "report_*.json"


def _report_path(staging: Path, rank: int) -> Path:
    return staging / f"report_{rank:05d}.json"


def _post(staging: Path, rank: int, report: SaveReport) -> None:
    """Leaves a report for rank 0, whole or not at all: without it, `finish` hands it over."""
    path = _report_path(staging, rank)
    temporary = path.with_suffix(".part")
    try:
        temporary.write_text(json.dumps(report))
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
