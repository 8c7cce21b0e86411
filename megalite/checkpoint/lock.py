"""One run, one directory: a lock that a dead holder cannot keep.

`run.lock` holds host, process, start time and a token. The holder touches it every few seconds. It is stale, and taken
over, when its process is gone (same host) or its heartbeat is (another host): a requeue on another machine needs
no help. Ages are measured by the file server's clock only, so the hosts' clocks may differ. That clock may jump:
a holder whose last heartbeat is too old, or in the future, is watched for some heartbeats before it is called dead.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megalite.errors import CheckpointError
from megalite.files import clock_of, take_lock
from megalite.stores import REREADS, Place, place

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
WATCHED_BEATS = 3  # heartbeats that a holder which seems dead is waited for
_ENDED = "ZXx"  # states of a process that is over


@dataclass(frozen=True)
class LockHolder:
    """The holder of a lock, from its file. processes: names the set of process numbers (a container has its own)."""

    token: str
    host: str
    pid: int
    process_start: str
    since: str
    processes: str = ""

    @classmethod
    def myself(cls) -> LockHolder:
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        pid = os.getpid()
        return cls(uuid.uuid4().hex, socket.gethostname(), pid, process_start(pid) or "", now, process_space())

    @classmethod
    def read(cls, path: Path) -> LockHolder | None:
        """None where there is no lock or it is not legible (a write that was cut off)."""
        try:
            return cls.parse(path.read_bytes()[:4096])
        except OSError:
            return None

    @classmethod
    def parse(cls, text: bytes) -> LockHolder | None:
        """The holder from the content of a lock; None where that is not legible."""
        try:
            value: Any = json.loads(text)
            texts = {key: str(value[key]) for key in ("token", "host", "process_start", "since", "processes")}
            return cls(pid=int(value["pid"]), **texts)
        except (ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}, since {self.since}"


def process_start(pid: int) -> str | None:
    """Start time of a process, which distinguishes it from a later one of the same number; None where there is none (a
    zombie has ended, though its parent has not asked how). Empty if the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        pass
    else:
        return None if fields[0] in _ENDED else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return None if Path("/proc/self/stat").exists() else ""


def process_space() -> str:
    """Names the set that this process's number counts in."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class RunLock:
    """Holds `directory` for this process, from `acquire` to `release`. Only rank 0 of a run takes it. waits: watches a
    holder on another host for some heartbeats, however late the last one: it may be lost, and its run be this one."""

    heartbeat, stale_after = HEARTBEAT_SECONDS, STALE_SECONDS

    def __init__(self, directory: Place | str, *, waits: bool = False) -> None:
        self.path: Path = place(directory) / LOCK_FILE  # type: ignore[assignment]  # an object of a store: `RunLease`
        self._flag = f"`save`={place(directory)}"
        self._waits = waits
        self._me: LockHolder | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> Self:
        """Takes the lock, also from a dead holder. Raises CheckpointError."""
        self._refuse_directory()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self._flag}: cannot be created ({error.strerror}); choose another `save`"
            ) from None
        me = LockHolder.myself()
        for _ in range(5):  # each round but the last lost a race against another take-over
            if self._create(me):
                return self._hold(me)
            self._remove_stale()
        raise CheckpointError(f"{self._flag}: could not get {self.path}; several jobs start here at once")

    def _hold(self, me: LockHolder) -> Self:
        self._me = me
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()
        return self

    def check(self) -> None:
        """Raises CheckpointError where another live process holds the directory. Does not wait: whether a holder is
        dead that seems so is left to `acquire`."""
        self._refuse_directory()
        if os.path.isfile(self.path):
            self._refuse_live(self._holder(), watches=False)

    def release(self) -> None:
        """Gives the lock back. Harmless where it is not held."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            if self._me is not None and self.held:
                self.path.unlink(missing_ok=True)
        except (OSError, CheckpointError) as error:
            logger.warning("could not remove %s: %s", self.path, getattr(error, "strerror", error))
        self._me = None

    @property
    def token(self) -> str:
        """What tells this run from others that write here; empty where it holds nothing."""
        return self._me.token if self._me is not None else ""

    @property
    def held(self) -> bool:
        """Whether the lock still says that we hold it. Raises StoreError where a store does not answer."""
        holders = (self._holder() for _ in range(REREADS))
        return self._me is not None and any(holder and holder.token == self.token for holder in holders)

    def _holder(self) -> LockHolder | None:
        """Whom the lock names; None where it is gone or not legible."""
        return LockHolder.read(self.path)

    def _refuse_directory(self) -> None:
        if os.path.isdir(self.path):  # `Path.is_dir` raises where a name is too long
            raise CheckpointError(f"{self._flag}: {LOCK_FILE} is a directory, and the lock's name; move it away")

    def _create(self, me: LockHolder) -> bool:
        """Makes the lock file appear whole, unless there is one."""
        temporary = self.path.with_name(f".{LOCK_FILE}.{me.token}")
        try:
            with open(temporary, "x") as file:
                json.dump(me.__dict__, file)
            try:
                os.link(temporary, self.path)
            except FileExistsError:
                return False
            return True
        except OSError as error:
            raise self._not_writable(error) from None
        finally:
            with suppress(OSError):  # on a directory that has become read-only, and no matter
                temporary.unlink()

    def _not_writable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._flag}: cannot write there ({error.strerror}); choose another `save`")

    def _remove_stale(self) -> None:
        """Removes the lock of a dead holder. Raises CheckpointError for a live one."""
        holder = self._holder()
        if not self._refuse_live(holder):
            return
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            if take_lock(file) is False:  # another process is at it
                time.sleep(0.05)
            elif self._holder() == holder:
                self._bury(holder)

    def _bury(self, holder: LockHolder | None) -> None:
        grave = self.path.with_name(f".{LOCK_FILE}.stale-{uuid.uuid4().hex}")
        try:
            os.rename(self.path, grave)
        except FileNotFoundError:
            return
        except OSError as error:  # another user's, in a folder where everybody keeps his own
            raise CheckpointError(
                f"{self._flag}: {LOCK_FILE}, left by a dead run, cannot be removed ({error.strerror}); remove it as "
                "the user whose file it is, or choose another `save`"
            ) from None
        buried = LockHolder.read(grave)
        if buried != holder:  # on a file system without `flock` another process may have taken over: give it back
            with suppress(FileExistsError):
                os.link(grave, self.path)
        elif holder:
            who = f"a run that was killed or interrupted ({holder.host}, pid {holder.pid})"
            logger.warning("took over %s from %s: it no longer runs", self.path.parent, who)
        grave.unlink(missing_ok=True)

    def _refuse_live(self, holder: LockHolder | None, *, watches: bool = True) -> bool:
        """False where the lock is gone. Raises CheckpointError where its holder lives. watches: one that seems dead."""
        last = self._last_beat()
        if last is None:
            return False
        try:
            age = clock_of(self.path.parent) - last
        except OSError as error:
            raise self._not_writable(error) from None
        lives = process_lives(holder)
        if lives is None:
            lives = 0.0 <= age <= self.stale_after and not (self._waits and watches)
            if not lives and watches:
                logger.warning(
                    "%s: last sign of life of another run %.0f s ago; waiting %.0f s for the next one",
                    self.path, age, WATCHED_BEATS * self.heartbeat,
                )  # fmt: skip
                lives, age = self._changes(last, self._last_beat, WATCHED_BEATS * self.heartbeat), 0.0
        if lives:
            raise self._in_use(holder, f", last sign of life {max(age, 0.0):.0f} s ago")
        return True

    def _in_use(self, holder: LockHolder | None, more: str = "") -> CheckpointError:
        who = f"{holder or 'unknown'}{more}"
        return CheckpointError(f"{self._flag}: in use by another run ({who}); stop it or choose another `save`")

    def _last_beat(self) -> float | None:
        """When the lock was touched, by the clock of the file server; None where it is gone."""
        try:
            # A network file system asks its server when a file is opened; a mere `stat` may be answered from memory.
            with open(self.path, "rb") as file:
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(
                f"{self._flag}: {LOCK_FILE} cannot be read ({error.strerror}); choose another `save`"
            ) from None

    def _changes(self, seen: object, look: Callable[[], object], seconds: float) -> bool:
        """Whether the holder makes `look` see something new within some time; not where the lock is given back."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.heartbeat / 10))
            if (now := look()) != seen:
                return now is not None
        return False

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat):
            if not self.held:
                logger.error("%s was taken over by another run while this one lives", self.path)
                return
            try:
                os.utime(self.path)
            except OSError as error:
                logger.warning("could not renew %s: %s", self.path, error.strerror)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def process_lives(holder: LockHolder | None) -> bool | None:
    """None where this process cannot see the holder's: another host's, another container's."""
    if holder is None or (holder.host, holder.processes) != (socket.gethostname(), process_space()):
        return None
    started = process_start(holder.pid)
    return None if started == "" else started == holder.process_start
