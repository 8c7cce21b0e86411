"""`Store`: what a bucket can do, with retries that are ours. fsspec's clients make one attempt each."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from megalite.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds: an attempt waits a random part of what doubles from one to the other
DEADLINE = 600.0  # seconds for all attempts at one request
ATTEMPT = 120.0  # seconds for one
END_SECONDS, LAST_SECONDS = 20.0, 5.0  # both, of a process that is to end
PART_BYTES = 16 * 2**20
NO_OBJECT = ""
PASSING_SECONDS, TOLD_SECONDS = 5.0, 60.0  # an outage is told once it has lasted so long, and so often
REREADS = 3  # a bit can flip on the way: what is not as expected is asked for again


class StoreError(CheckpointError):
    """A request that a store has refused, or has not answered in all the attempts made."""


class Missing(StoreError):
    """There is no such object."""


class Refused(Exception):
    """A condition did not hold: the object is there already, or has changed."""


class Again(Exception):
    """An attempt failed in a way that may pass: transport, a server's error, too many requests."""


class Tagged(NamedTuple):
    """An object's content and the tag of this version of it."""

    data: bytes
    etag: str


class Store:
    """A bucket. Names are keys in it. Methods raise StoreError; one that reads a missing object, Missing.

    root: scheme and bucket, for messages. retries: attempts that had to be repeated so far. deadline: seconds after
    which a request is given up. attempt: for one attempt. A subclass gives the attempts, methods with an underscore,
    which raise `Missing`, `Refused`, `Again` (worth a repetition) or StoreError.
    """

    conditional = True
    deadline, attempt = DEADLINE, ATTEMPT
    retries, _ends, _told = 0, False, -TOLD_SECONDS

    def __init__(self, root: str) -> None:
        self.root = root

    def names(self, prefix: str) -> list[str]:
        """Objects and folders, these with a slash, directly under `prefix` (a folder's name without its slash, or "");
        relative to it."""
        return self._retrying(lambda: self._names(f"{prefix}/" if prefix else ""), f"list {prefix}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start:stop` of an object."""
        if stop is not None and stop <= start:
            return b""
        data = self._retrying(lambda: self._read(name, start, stop), f"read {name}").data
        if stop is not None and len(data) != stop - start:
            raise StoreError(f"{self.root}/{name}: {len(data)} bytes at {start}, expected {stop - start}")
        return data

    def read_tagged(self, name: str) -> Tagged:
        """A whole object, with the tag that `swap` wants."""
        return self._retrying(lambda: self._read(name, 0, None), f"read {name}")

    def size(self, name: str) -> int:
        """Bytes of an object."""
        return self.tag(name)[0]

    def tag(self, name: str) -> tuple[int, str]:
        """Bytes and tag of an object."""
        return self._retrying(lambda: self._head(name), f"look at {name}")

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except Missing:
            return False
        return True

    def put(self, name: str, content: Path | bytes) -> None:
        """Writes a whole object, replacing what is there."""
        if isinstance(content, bytes):
            self._retrying(lambda: self._write(name, content, None), f"write {name}")
        else:
            self._put_file(name, content)

    def create(self, name: str, data: bytes) -> str | None:
        """Writes an object unless there is one. Its tag if it is now there with exactly this content, else None: what
        differs from writer to writer in it tells them apart, also where an answer was lost and its repetition was
        refused."""
        return self._write_if(name, data, NO_OBJECT, "create")

    def swap(self, name: str, data: bytes, etag: str) -> str | None:
        """Replaces the version `etag` of an object; returns the new tag, None where another version is there."""
        return self._write_if(name, data, etag, "replace")

    def _write_if(self, name: str, data: bytes, etag: str, what: str) -> str | None:
        try:
            return self._retrying(lambda: self._write(name, data, etag), f"{what} {name}")
        except (Refused, Missing):
            return self._holds(name, data)

    def _holds(self, name: str, data: bytes) -> str | None:
        """The tag of an object if its content is `data`."""
        for _ in range(REREADS):
            try:
                found = self.read_tagged(name)
            except Missing:
                return None
            if found.data == data:
                return found.etag
        return None

    def delete(self, name: str) -> None:
        """Removes an object; no error where there is none."""
        with suppress(Missing):
            self._retrying(lambda: self._delete(name), f"delete {name}")

    def delete_folder(self, prefix: str) -> None:
        """Removes all objects under a prefix."""
        for name in self.names(prefix):
            remove = self.delete_folder if name.endswith("/") else self.delete
            remove(f"{prefix}/{name}".rstrip("/"))

    def drop_uploads(self, prefix: str) -> int:
        """Removes parts of uploads under `prefix` that nobody has finished; returns of how many uploads."""
        return 0

    def is_safe_for_two(self, probe: str) -> bool:
        """Whether conditional writes hold here: tried on the object `probe`, which is removed again."""
        if not self.conditional:
            return False
        try:
            first = self.create(probe, b"one")
            second, third = self.create(probe, b"two"), self.swap(probe, b"three", '"0"')
            return first is not None and second is None and third is None
        finally:
            self.delete(probe)

    def hasten(self) -> None:
        """The process is to end: what fails now is given up soon, and after the first such request at once. A store
        that answers is not hurried. May be called by a signal's handler."""
        if not self._ends:
            self._ends, self.deadline, self.attempt = True, min(self.deadline, END_SECONDS), END_SECONDS

    def _retrying(self, attempt: Callable[[], T], what: str) -> T:
        """Repeats an attempt with full jitter: after the n-th a random part of 0.5 s times 2^n, of 30 s at most."""
        began, count = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except Again as error:
                pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count, 64)))
                count += 1
                if time.monotonic() + pause - began > self.deadline:
                    if self._ends:
                        self.deadline, self.attempt = 0.0, LAST_SECONDS
                    raise StoreError(f"{self.root}: could not {what} in {count} attempts: {error}") from None
                self.retries += 1
                logger.debug("%s: could not %s (%s), again in %.1f s", self.root, what, error, pause)
                self._tell_outage(began, what, error)
                again = time.monotonic() + pause
                while time.monotonic() < min(again, began + self.deadline):
                    time.sleep(min(pause, 1.0))

    def _tell_outage(self, began: float, what: str, error: Again) -> None:
        """Not of a fault that passes, and not of each request."""
        now = time.monotonic()
        if now - began > PASSING_SECONDS and now - self._told > TOLD_SECONDS:
            self._told = now
            left = began + self.deadline - now
            logger.warning("%s: could not %s (%s); it is asked for %.0f s more", self.root, what, error, left)

    # What a kind of store does in one attempt.

    def _names(self, prefix: str) -> list[str]:
        raise NotImplementedError

    def _read(self, name: str, start: int, stop: int | None) -> Tagged:
        raise NotImplementedError

    def _head(self, name: str) -> tuple[int, str]:
        raise NotImplementedError

    def _write(self, name: str, data: bytes, etag: str | None) -> str:
        """Returns the new tag. etag: of the version that must be there; NO_OBJECT: of none; None: of any or none."""
        raise NotImplementedError

    def _put_file(self, name: str, file: Path) -> None:
        raise NotImplementedError

    def _delete(self, name: str) -> None:
        raise NotImplementedError
