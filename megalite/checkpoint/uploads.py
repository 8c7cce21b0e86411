"""Saves on their way to a store: staged on this host's disk, sent in the background, tried again after a failure.

    main thread   stage (or, with async_save, copy) --- train ---- train ---- train ------ drain()
    this thread                   \\--- send, read back, report ---- again? ---/
    rank 0's                                                 \\--- all have reported: commit, delete old ones

No collective: a rank's report is an object beside its file. A save that fails keeps its local copy and is tried again
until MOST_FAILED of them wait; then `failure` says so, and the ranks end the run by their vote.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint.format import checksum, parse_json
from megalite.checkpoint.local import LocalSaves
from megalite.checkpoint.remote import LeaseLost, attempt_place, send_file
from megalite.checkpoint.saving import SaveJob, SaveReport, UnusableSave, first_problem
from megalite.comm import Axis, all_gather_json
from megalite.errors import CheckpointError
from megalite.events import tell_event
from megalite.progress import amount
from megalite.stores import REREADS, StoreUrl

logger = logging.getLogger(__name__)

MOST_FAILED, MOST_WAITING = 3, 2
FIRST_POLL, LONGEST_POLL, AGAIN_SECONDS = 0.02, 1.0, 5.0


class Upload:
    """One save of this rank. sent: its part is in the store; the staged one stays until all is committed. failed:
    attempts that have failed. written: the staged file is there (or could not be written: `final`)."""

    def __init__(self, job: SaveJob, done: Callable[[], None]) -> None:
        self.job, self.done = job, done
        self.report: SaveReport | None = None
        self.sent = False
        self.failed = 0
        self.problem: str | None = None
        self.final = False
        self.again = 0.0
        self.written = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do for this rank: rank 0 commits."""
        return self.sent and self.job.rank > 0

    @property
    def attempt(self) -> StoreUrl:
        assert isinstance(self.job.final, StoreUrl)
        return attempt_place(self.job.final, self.job.save_id)

    def write(self) -> None:
        """Stages this rank's part."""
        self.report = self.job.write_part()
        if "error" in self.report:
            self.problem, self.final = self.report["error"], True
        self.written.set()

    def send(self) -> None:
        """Sends what is staged, then the report. Raises CheckpointError, OSError."""
        assert self.report is not None
        rank, step = self.job.rank, self.job.step
        if "file" in self.report:
            name = self.report["file"]
            send_file(self.attempt / name, self.job.staging / name, rank=rank, step=step)
        if rank:
            told = json.dumps(self.report).encode()
            (self.attempt / f"report_{rank:05d}.json").write_bytes(f"{checksum(told)}\n".encode() + told)
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
        """Rank 0: commits if all ranks have reported. Raises CheckpointError."""
        names = [f"report_{rank:05d}.json" for rank in range(1, world_size)]
        if set(names) - set(self.attempt.store.list(self.attempt.key).objects):
            return False
        others = [self._reported(name) for name in names]
        assert self.report is not None
        self.job.commit_upload([self.report, *others])
        for name in names:
            self.attempt.store.delete((self.attempt / name).key)
        return True


class Uploads:
    """The saves of this rank that are not in the store yet, oldest first."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._waiting: list[Upload] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: SaveJob, done: Callable[[], None], *, background: bool) -> Upload:
        """Takes a save over: what is not written in the background is staged on return."""
        upload = Upload(job, done)
        if not background:
            upload.write()
        with self._changed:
            self._waiting.append(upload)
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()
        return upload

    @property
    def failure(self) -> str | None:
        """Why the run should end: a save that cannot succeed any more, or too many that have failed."""
        waiting = list(self._waiting)
        for upload in waiting:
            if upload.final:
                return upload.problem
        failing = [upload for upload in waiting if upload.failed and not upload.is_over]
        if len(failing) < MOST_FAILED:
            return None
        kept = failing[0].job.staging.parent
        return f"{len(failing)} saves could not be uploaded and are kept in {kept}: {failing[-1].problem}"

    def wait_for_room(self) -> None:
        """Waits while older saves are still on their way; not for those that have failed and are tried again."""
        self._wait(lambda: self.failure or sum(not up.failed and not up.is_over for up in self._waiting) < MOST_WAITING)

    @property
    def oldest(self) -> int | None:
        """The step of the first save that is not committed, on rank 0."""
        return self._waiting[0].job.step if self._waiting else None

    def forget(self, oldest: int | None) -> None:
        """Removes what is staged of saves before rank 0's oldest one: they are committed."""
        for upload in [up for up in self._waiting if up.is_over and (oldest is None or up.job.step < oldest)]:
            self._remove(upload)

    def give_up(self) -> tuple[SaveJob, SaveReport] | None:
        """No more attempts; the newest save that is staged here."""
        waiting = [upload for upload in self._waiting if upload.report is not None and "error" not in upload.report]
        for upload in self._waiting:
            upload.final = True
        return (waiting[-1].job, waiting[-1].report or {}) if waiting else None

    def drop(self) -> None:
        """What is staged is of no use any more: a newer save is kept. After `give_up`."""
        for upload in self._waiting:
            shutil.rmtree(upload.job.staging, ignore_errors=True)

    def wait_sent(self) -> str | None:
        """Waits until this rank's parts are in the store, giving each that fails one more attempt. Returns what is
        wrong."""
        tried = {upload: upload.failed for upload in self._waiting}
        for upload in tried:
            upload.again = 0.0
        self._wait(lambda: all(up.sent or up.final or up.failed > tried[up] for up in tried if up in self._waiting))
        return next((up.problem for up in self._waiting if not up.sent or up.final), None)

    def wait_committed(self) -> str | None:
        """Rank 0, when all parts are there: waits for the commits. Returns what is wrong."""
        tried = {upload: upload.failed for upload in self._waiting}
        self._wait(lambda: not self._waiting or any(up.final or up.failed > tried[up] for up in self._waiting))
        return self._waiting[0].problem if self._waiting else None

    def _wait(self, reached: Callable[[], object]) -> None:
        with self._changed:
            while not reached():
                self._changed.wait(0.5)

    def _run(self) -> None:
        pause = FIRST_POLL
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
            moved = [self._advance(upload) for upload in list(self._waiting)]
            pause = FIRST_POLL if any(moved) else min(LONGEST_POLL, 2 * pause)
            with self._changed:
                self._changed.notify_all()
                self._changed.wait(0 if any(moved) else pause)

    def _advance(self, upload: Upload) -> bool:
        """One attempt at what a save needs next; whether it came further."""
        if upload.final or time.monotonic() < upload.again:
            return False
        try:
            if upload.report is None:
                upload.write()
            elif not upload.sent:
                upload.send()
            elif self._rank or not upload.commit(self._world_size):
                return False
            else:
                upload.done()
                self._remove(upload)
            return True
        except (LeaseLost, UnusableSave) as error:
            upload.problem, upload.final = error.text, True
        except (CheckpointError, OSError) as error:
            upload.problem = error.text if isinstance(error, CheckpointError) else upload.job.explain(error)
            upload.failed += 1
            if upload.final:
                return False  # it was given up meanwhile
            upload.again = time.monotonic() + AGAIN_SECONDS
            logger.warning("step %d is kept in %s: %s", upload.job.step, upload.job.staging, upload.problem)
            tell_event("upload failed", iteration=upload.job.step, problem=upload.problem)
        except Exception as error:  # a thread must not end without a word
            upload.problem, upload.final = upload.job.explain(error), True
        return False

    def _remove(self, upload: Upload) -> None:
        shutil.rmtree(upload.job.staging, ignore_errors=True)
        self._waiting.remove(upload)


def settle(uploads: Uploads, problem: str | None, local: LocalSaves | None, world: Axis) -> None:
    """Ranks agree on what is committed; or on what is wrong, and then keep the newest save on their hosts. Collective.
    Raises CheckpointError."""
    told = all_gather_json([problem, uploads.oldest], world)
    problem = first_problem([problem for problem, _ in told])
    if problem is None:
        uploads.forget(told[0][1])
        return
    staged = uploads.give_up()
    steps = {*all_gather_json(None if staged is None else staged[0].step, world)}
    if local is not None and staged is not None and len(steps) == 1 and local.keep(*staged):
        uploads.drop()
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
