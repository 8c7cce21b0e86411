"""One run, one URL: `run.lock` in a store, a lease that its holder renews by swaps.

It is created by one writer, replaced every few seconds by whoever saw its newest version, and taken over, by a swap
too, from a holder whose process is gone (same host) or whose version has not changed for two minutes of our own clock.
No clock of a store or of another host is read. Who finds another token in it has lost it, and commits nothing more.
"""

import json
import logging
import time
from pathlib import Path
from typing import Self

from megalite.checkpoint.lock import LockHolder, RunLock, process_lives
from megalite.stores import Missing, StoreError, StoreUrl, Tagged, place

logger = logging.getLogger(__name__)


class RunLease(RunLock):
    """`RunLock` for a URL."""

    path: StoreUrl  # type: ignore[assignment]  # an object in place of a file
    _etag, _beats, _lost = "", 0, False

    def acquire(self) -> Self:
        store, me = self.path.store, LockHolder.myself()
        if not store.is_safe_for_two(f"{self.path.parent.key}/.probe-{me.token}"):
            logger.warning("%s: this store does not hold conditions of writes: unsafe for two writers", self._flag)
        while (etag := store.create(self.path.key, self._text(me))) is None:
            found = self._read()
            if found is None:
                continue
            holder = LockHolder.parse(found.data)
            lives = process_lives(holder)
            if lives is None:
                host = holder.host if holder is not None else "another host"
                logger.warning("%s: held by a run on %s; watching it for %.0f s", self.path, host, self.stale_after)
                lives = self._changes(found.data, lambda: (now := self._read()) and now.data, self.stale_after)
            if lives:
                raise self._in_use(holder)
            etag = store.swap(self.path.key, self._text(me), found.etag)
            if etag is not None:
                logger.warning("took over %s from a run that was killed or interrupted", self.path)
                break
        self._etag, self._lost = etag, False
        return self._hold(me)

    def check(self) -> None:
        if process_lives(holder := self._holder()):
            raise self._in_use(holder)

    @property
    def held(self) -> bool:
        return not self._lost and super().held

    def _holder(self) -> LockHolder | None:
        found = self._read()
        return None if found is None else LockHolder.parse(found.data)

    def _read(self) -> Tagged | None:
        try:
            return self.path.store.read_tagged(self.path.key)
        except Missing:
            return None

    def _text(self, me: LockHolder) -> bytes:
        self._beats += 1
        return json.dumps({**me.__dict__, "beats": self._beats}).encode()

    def _beat(self) -> None:
        assert self._me is not None
        renewed = time.monotonic()
        while not self._stop.wait(self.heartbeat):
            try:
                etag = self.path.store.swap(self.path.key, self._text(self._me), self._etag)
                if etag is None:
                    self._lost = True
                    logger.error("%s was taken over by another run; this one saves no more", self.path)
                    return
                self._etag, renewed = etag, time.monotonic()
            except StoreError as error:
                logger.warning("could not renew %s: %s", self.path, error)
                if time.monotonic() - renewed > self.stale_after:
                    self._lost = True
                    logger.error("%s: not renewed for %.0f s; this run saves no more", self.path, self.stale_after)
                    return


def lock_of(directory: Path | str, *, waits: bool = False) -> RunLock:
    """The lock of a run directory, wherever that is. waits: as `RunLock` does; a lease is always waited for."""
    where = place(directory)
    return RunLease(where) if isinstance(where, StoreUrl) else RunLock(where, waits=waits)
