"""Saves on their way: written to a disk, or staged and sent to a store, in the background of training.

    main thread   copy (or stage) --- train ---- train ---- train ------ wait()
    this thread         \\--- write, send, read back, report ---- again? ---/
    rank 0's                                           \\--- all have reported: commit, delete old ones

No collective, which would have to be ordered against training's: a rank's report is a file beside its part. A rank has
one copy of its own part, in memory that is kept from save to save (pinned where the values live on a GPU). What is
written is the state at the moment of the call. A save to a disk fails at once. One to a store keeps what is staged and
is tried again, until MOST_FAILED of them wait; then `failure` says so, and the ranks end the run by their vote.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.format import checksum, parse_json
from megalite.checkpoint.local import LocalSaves
from megalite.checkpoint.remote import HopelessSave, attempt_place, send
from megalite.checkpoint.run_dir import write_small
from megalite.checkpoint.saving import SaveJob, SaveReport, first_problem
from megalite.comm import Axis, TensorShard, all_gather_json
from megalite.errors import CheckpointError
from megalite.events import tell_event
from megalite.faults import fault_point
from megalite.page_locked import host_bytes
from megalite.progress import amount
from megalite.stores import REREADS, Place, StoreUrl

logger = logging.getLogger(__name__)

MOST_FAILED, MOST_WAITING = 3, 2
FIRST_POLL, LONGEST_POLL, AGAIN_SECONDS = 0.02, 1.0, 5.0
_ALIGN = 64


class StagingMemory:
    """Host memory that holds a copy of what a rank writes; it grows to the largest save and is then reused."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, parts: Sequence[TensorShard]) -> list[TensorShard]:
        """The parts with their values as they are now; later changes of the originals have no effect."""
        *starts, total = accumulate((-(-part.local.nbytes // _ALIGN) * _ALIGN for part in parts), initial=0)
        cuda = any(part.local.is_cuda for part in parts)
        if self._bytes.numel() < total or (cuda and not self._bytes.is_pinned()):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # give the old memory back before asking for more
            self._bytes = host_bytes(total, pinned=cuda)
        copies = []
        for part, start in zip(parts, starts, strict=True):
            space = self._bytes[start : start + part.local.nbytes].view(part.local.dtype).view(part.local.shape)
            space.copy_(part.local, non_blocking=cuda)
            copies.append(TensorShard(part.name, part.global_shape, part.offset, space))
        if cuda:
            torch.cuda.current_stream().synchronize()
        return copies


@dataclass(eq=False)
class PendingSave:
    """One save of this rank."""

    job: SaveJob
    done: Callable[[], None]
    report: SaveReport | None = None
    reports: list[SaveReport] = field(default_factory=list)  # all ranks', on rank 0
    sent: bool = False  # its part is where it belongs and reported; what is staged for a store stays until the commit
    failed: int = 0  # attempts
    problem: str | None = None
    final: bool = False  # whether no more attempts are made
    again: float = 0.0  # when the next one is made, by the monotonic clock

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do for this rank: rank 0 commits."""
        return self.sent and self.job.rank > 0

    @property
    def attempt(self) -> Place:
        """Where the ranks' parts and reports are."""
        final = self.job.final
        return attempt_place(final, self.job.save_id) if isinstance(final, StoreUrl) else self.job.staging

    def write(self) -> None:
        """Writes, or stages, this rank's part."""
        self.report = self.job.write_part()
        if "error" in self.report:
            self.problem, self.final = self.report["error"], True

    def send(self) -> None:
        """Sends what is staged for a store, then the report. Raises CheckpointError, OSError."""
        assert self.report is not None
        rank, attempt, name = self.job.rank, self.attempt, self.report.get("file")
        if name is not None and isinstance(attempt, StoreUrl):
            fault_point("upload.begin", rank=rank, step=self.job.step)
            send(attempt / name, self.job.staging / name)
            fault_point("upload.sent", rank=rank, step=self.job.step)
        if rank:
            told = json.dumps(self.report).encode()
            write_small(attempt / f"report_{rank:05d}.json", f"{checksum(told)}\n".encode() + told)
        self.sent = True

    def _reported(self, name: str) -> SaveReport:
        """What another rank has reported. Raises CheckpointError."""
        for _ in range(REREADS):
            proof, _, told = (self.attempt / name).read_bytes().partition(b"\n")
            if proof == checksum(told).encode():
                report: SaveReport = parse_json(told, name)
                return report
        raise CheckpointError(f"{self.attempt / name}: damaged")

    def commit(self, world_size: int) -> bool:
        """Rank 0: commits if all ranks have reported. Raises CheckpointError, OSError."""
        assert self.report is not None
        names = [f"report_{rank:05d}.json" for rank in range(1, world_size)]
        if not self.reports:
            if {*names} - {path.name for path in self.attempt.iterdir()}:
                return False
            self.reports = [self.report, *map(self._reported, names)]
        in_store = isinstance(self.attempt, StoreUrl)
        if in_store:
            self.job.commit(self.reports)
        for name in names:  # of a store when nothing waits for it, of a disk before the folder gets its name
            (self.attempt / name).unlink(missing_ok=True)
        if not in_store:
            self.job.commit(self.reports)
        return True


class PendingSaves:
    """The saves of this rank that are not committed yet, oldest first."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._waiting: list[PendingSave] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: SaveJob, done: Callable[[], None], *, background: bool) -> PendingSave:
        """Takes a save over: what is not written in the background is on return. done: called on rank 0 after the
        commit."""
        save = PendingSave(job, done)
        if not background:
            save.write()
        with self._changed:
            self._waiting.append(save)
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="saves", daemon=True)
            self._thread.start()
        return save

    @property
    def failure(self) -> str | None:
        """Why the run should end: a save that cannot succeed any more, or too many that have failed."""
        waiting = list(self._waiting)
        for save in waiting:
            if save.final:
                return save.problem
        failing = [save for save in waiting if save.failed and not save.is_over]
        if len(failing) < MOST_FAILED:
            return None
        kept = failing[0].job.staging.parent
        return f"{len(failing)} saves could not be uploaded and are kept in {kept}: {failing[-1].problem}"

    def wait_for_room(self) -> None:
        """Waits while older saves are still on their way; not for those that have failed and are tried again."""
        self._wait(lambda: self.failure or sum(not up.failed and not up.is_over for up in self._waiting) < MOST_WAITING)

    def wait_written(self) -> None:
        """Waits until no copy of values is needed any more."""
        self._wait(lambda: all(save.report is not None for save in self._waiting))

    @property
    def reports(self) -> list[tuple[int, Any]]:
        """Step and report of each."""
        return [(save.job.step, save.report) for save in self._waiting]

    def hand_over(self, reports: Iterable[Sequence[tuple[int, Any]]]) -> None:
        """Rank 0: `reports` of all ranks; a listing may be older than what lies there."""
        steps = [dict(each) for each in reports]
        for save in list(self._waiting):
            if all(save.job.step in each for each in steps):
                save.reports = [each[save.job.step] for each in steps]

    def forget(self, oldest: int | None) -> None:
        """Removes what is staged of saves before rank 0's oldest one: they are committed."""
        for save in [save for save in self._waiting if save.is_over and (oldest is None or save.job.step < oldest)]:
            self._remove(save)

    def give_up(self) -> tuple[SaveJob, SaveReport] | None:
        """No more attempts; the newest save that is staged here for a store. Nothing stays of one to a disk."""
        for save in list(self._waiting):
            save.final = True
            if not isinstance(save.attempt, StoreUrl):
                self._remove(save)
        waiting = [save for save in self._waiting if save.report is not None and "error" not in save.report]
        return (waiting[-1].job, waiting[-1].report or {}) if waiting else None

    def drop(self) -> None:
        """What is staged is of no use any more: a newer save is kept. After `give_up`."""
        for save in self._waiting:
            shutil.rmtree(save.job.staging, ignore_errors=True)

    def wait(self, *, committed: bool) -> str | None:
        """Waits until this rank's parts are where they belong, or on rank 0 until all is committed, giving each save
        that fails one more attempt. Returns what is wrong."""
        tried = {save: save.failed for save in list(self._waiting)}
        for save in tried:
            save.again = 0.0

        def is_tried(save: PendingSave) -> bool:
            over = save.final or save.failed > tried[save] or (save.sent and not committed)
            return over or save not in self._waiting

        self._wait(lambda: all(map(is_tried, tried)))
        return next((save.problem for save in self._waiting if committed or save.final or not save.sent), None)

    def _wait(self, reached: Callable[[], object]) -> None:
        with self._changed:
            self._changed.notify_all()
            while not reached():
                self._changed.wait(0.5)

    def _run(self) -> None:
        pause = FIRST_POLL
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
            moved = [self._advance(save) for save in list(self._waiting)]
            pause = FIRST_POLL if any(moved) else min(LONGEST_POLL, 2 * pause)
            with self._changed:
                self._changed.notify_all()
                self._changed.wait(0 if any(moved) else pause)

    def _advance(self, save: PendingSave) -> bool:
        """One attempt at what a save needs next; whether it came further."""
        if save.final or time.monotonic() < save.again:
            return False
        try:
            if save.report is None:
                save.write()
            elif not save.sent:
                save.send()
            elif self._rank or not save.commit(self._world_size):
                return False
            else:
                save.done()
                self._remove(save)
            return True
        except Exception as error:  # a thread must not end without a word
            save.problem = save.job.explain(error)
            passes = isinstance(error, (CheckpointError, OSError)) and not isinstance(error, HopelessSave)
            save.failed += 1
            if save.final or not passes or not isinstance(save.attempt, StoreUrl):
                save.final = True
                return False
            save.again = time.monotonic() + AGAIN_SECONDS
            logger.warning("step %d is kept in %s: %s", save.job.step, save.job.staging, save.problem)
            tell_event("upload failed", iteration=save.job.step, problem=save.problem)
        return False

    def _remove(self, save: PendingSave) -> None:
        shutil.rmtree(save.job.staging, ignore_errors=True)
        self._waiting.remove(save)


def settle(saves: PendingSaves, problem: str | None, local: LocalSaves | None, world: Axis) -> None:
    """Ranks agree on what is committed; or on what is wrong, and then keep the newest save on their hosts. Collective.
    Raises CheckpointError."""
    told = all_gather_json([problem, saves.reports[0][0] if saves.reports else None], world)
    problem = first_problem([problem for problem, _ in told])
    if problem is None:
        saves.forget(told[0][1])
        return
    staged = saves.give_up()
    steps = {*all_gather_json(None if staged is None else staged[0].step, world)}
    if local is not None and staged is not None and len(steps) == 1:
        with suppress(CheckpointError):
            local.keep(*staged)
            saves.drop()
            problem += f"; iteration {staged[0].step} is kept in {local.root}: `auto_resume` continues from it"
    raise CheckpointError(problem)


def sweep_staging(folder: Path) -> None:
    """Removes what earlier runs have staged and not sent. Only for a run that holds the lease."""
    for path in folder.glob("iter_*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def staging_problem(folder: Path, needed: int) -> str | None:
    """What is wrong with the folder in which saves wait. needed: bytes of a save, of all ranks that share it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"`checkpoint_staging_path`={folder}: cannot be written ({error.strerror})"
    if MOST_WAITING * needed <= free:
        return None
    two = f"{MOST_WAITING} saves of this host's ranks need {amount(MOST_WAITING * needed, 'B')}"
    return f"`checkpoint_staging_path`={folder}: {two}, {amount(free, 'B')} are free; name a folder with more room"
