"""One run, one URL: `run.lock` in a store, a lease that its holder renews by swaps.

It is created by one writer, replaced every few seconds by whoever saw its newest version, and taken over, by a swap
too, from a holder whose process is gone (same host) or whose version has not changed for two minutes of our own clock.
No clock of a store or of another host is read. Who finds another token in it has lost it, and commits nothing more.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from types import TracebackType

from megalite.checkpoint.lock import HEARTBEAT_SECONDS, LOCK_FILE, STALE_SECONDS, LockHolder, RunLock, process_lives
from megalite.errors import CheckpointError
from megalite.stores import REREADS, Missing, StoreError, StoreUrl, Tagged, place

logger = logging.getLogger(__name__)


class RunLease:
    """`RunLock` for a URL: holds it for this process from `acquire` to `release`."""

    def __init__(
        self, directory: StoreUrl, *, heartbeat: float = HEARTBEAT_SECONDS, stale_after: float = STALE_SECONDS
    ) -> None:
        self.path = directory / LOCK_FILE
        self._flag = f"`save`={directory}"
        self._heartbeat, self._stale_after = heartbeat, stale_after
        self._me: LockHolder | None = None
        self._etag, self._beats, self._renewed = "", 0, 0.0
        self._lost = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> RunLease:
        """Takes the lease, also from a dead holder. Raises CheckpointError."""
        store, me = self.path.store, LockHolder.myself()
        self._me = me
        if not store.is_safe_for_two(f"{self.path.parent.key}/.probe-{me.token}"):
            logger.warning("%s: this store does not hold conditions of writes: unsafe for two writers", self._flag)
        while not store.create(self.path.key, self._text()):
            found = self._read()
            if found is None:
                continue
            holder = LockHolder.parse(found.data)
            lives = process_lives(holder)
            if lives or (lives is None and self._changes(found, holder)):
                who = f"{holder.host}, pid {holder.pid}, since {holder.since}" if holder else "unknown"
                self._me = None
                raise CheckpointError(f"{self._flag}: in use by another run ({who}); stop it or choose another `save`")
            if store.conditional and store.swap(self.path.key, self._text(), found.etag) is None:
                continue
            if not store.conditional:
                store.put(self.path.key, self._text())
            logger.warning("took over %s from a run that was killed or interrupted", self.path)
            break
        self._etag, self._renewed, self._lost = store.read_tagged(self.path.key).etag, time.monotonic(), False
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="run-lease", daemon=True)
        self._thread.start()
        return self

    def check(self) -> None:
        """Raises CheckpointError where the store does not answer, or a process of this host holds the lease."""
        found = self._read()
        holder = None if found is None else LockHolder.parse(found.data)
        if holder is not None and process_lives(holder):
            raise CheckpointError(f"{self._flag}: in use by another run ({holder.host}, pid {holder.pid}); stop it")

    def release(self) -> None:
        """Gives the lease back. Harmless where it is not held."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            if self._me is not None and self.held:
                self.path.store.delete(self.path.key)
        except StoreError as error:
            logger.warning("could not remove %s: %s", self.path, error)
        self._me = None

    @property
    def token(self) -> str:
        """What tells this run from others that write here."""
        return self._me.token if self._me is not None else ""

    @property
    def held(self) -> bool:
        """Whether the store still says that we hold it. Raises StoreError where it does not answer."""
        return not self._lost and self._me is not None and any(self._names_us() for _ in range(REREADS))

    def _names_us(self) -> bool:
        found = self._read()
        holder = None if found is None else LockHolder.parse(found.data)
        return holder is not None and holder.token == self.token

    def _read(self) -> Tagged | None:
        try:
            return self.path.store.read_tagged(self.path.key)
        except Missing:
            return None

    def _text(self) -> bytes:
        assert self._me is not None
        self._beats += 1
        return json.dumps({**self._me.__dict__, "beats": self._beats}).encode()

    def _changes(self, found: Tagged, holder: LockHolder | None) -> bool:
        """Whether the lease is renewed or given back while we watch it."""
        host = holder.host if holder is not None else "another host"
        logger.warning("%s: held by a run on %s; watching it for %.0f s", self.path, host, self._stale_after)
        deadline = time.monotonic() + self._stale_after
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._heartbeat / 10))
            now = self._read()
            if now is None:
                return False
            if now.data != found.data:
                return True
        return False

    def _beat(self) -> None:
        store = self.path.store
        while not self._stop.wait(self._heartbeat):
            try:
                if store.conditional:
                    etag = store.swap(self.path.key, self._text(), self._etag)
                    if etag is None:
                        self._lost = True
                        logger.error("%s was taken over by another run; this one saves no more", self.path)
                        return
                    self._etag = etag
                self._renewed = time.monotonic()
            except StoreError as error:
                logger.warning("could not renew %s: %s", self.path, error)
                if time.monotonic() - self._renewed > self._stale_after:
                    self._lost = True
                    logger.error("%s: not renewed for %.0f s; this run saves no more", self.path, self._stale_after)
                    return

    def __enter__(self) -> RunLease:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def lock_of(directory: Path | str, *, waits: bool = False) -> RunLock | RunLease:
    """The lock of a run directory, wherever that is. waits: as `RunLock` does; a lease is always waited for."""
    where = place(directory)
    return RunLease(where) if isinstance(where, StoreUrl) else RunLock(where, waits=waits)
