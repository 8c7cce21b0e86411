"""`Store`: what a bucket can do, with retries that are ours. fsspec's clients make one attempt each."""

import hashlib
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megalite.errors import CheckpointError
from megalite.extras import optional_package

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds: an attempt waits a random part of what doubles from one to the other
DEADLINE = 600.0  # seconds for all attempts at one request
ATTEMPT = 120.0  # seconds for one
END_SECONDS, LAST_SECONDS = 20.0, 5.0  # both, of a process that is to end
PART_BYTES = 16 * 2**20
NO_OBJECT = ""
CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}
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
    which a request is given up. attempt: for one attempt. Attempts, the last methods here, raise `Missing`, `Refused`,
    `Again` (worth a repetition) or StoreError. They are fsspec's own calls, on whole objects: these can create, but a
    swap reads and then writes, so two writers are told apart at the commit, and not before. Memory is one process's
    alone, so its swap is safe.
    """

    deadline, attempt = DEADLINE, ATTEMPT
    retries, _ends, _told = 0, False, -TOLD_SECONDS

    def __init__(self, scheme: str, bucket: str, **options: Any) -> None:
        self.root, self._bucket, self.conditional = f"{scheme}://{bucket}", bucket, scheme != "gs"
        optional_package(self.root, CLIENTS[scheme])
        fsspec = optional_package(self.root, "fsspec")
        self._fs = fsspec.filesystem(scheme, use_listings_cache=False, **options)

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
            with suppress(Missing):
                found = (self.read_tagged(name) for _ in range(REREADS))
                return next((etag for there, etag in found if there == data), None)
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
                now = time.monotonic()
                if now - began > PASSING_SECONDS and now - self._told > TOLD_SECONDS:  # no fault that passes
                    self._told, left = now, began + self.deadline - now
                    logger.warning("%s: could not %s (%s); it is asked for %.0f s more", self.root, what, error, left)
                while time.monotonic() < min(now + pause, began + self.deadline):
                    time.sleep(min(pause, 1.0))

    # What is done in one attempt.

    def _ask(self, name: str, call: Callable[..., T], *arguments: Any, **more: Any) -> T:
        try:
            return call(f"{self._bucket}/{name}", *arguments, **more)
        except FileNotFoundError:
            raise Missing(f"{self.root}/{name}: no such object") from None
        except FileExistsError as error:
            raise Refused(str(error)) from None
        except PermissionError as error:
            raise StoreError(f"{self.root}/{name}: refused ({error}); check the credentials and their rights") from None
        except Exception as error:
            raise Again(f"{type(error).__name__}: {str(error)[:200]}") from None

    def _names(self, prefix: str) -> list[str]:
        try:
            entries = self._ask(prefix, self._fs.ls, detail=True, refresh=True)
        except Missing:
            return []
        kinds = {entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] for entry in entries}
        return [name + "/" * (kinds[name] == "directory") for name in sorted(kinds)]

    def _read(self, name: str, start: int, stop: int | None) -> Tagged:
        data = bytes(self._ask(name, self._fs.cat_file, start=start or None, end=stop))
        return Tagged(data, hashlib.sha256(data).hexdigest())

    def _head(self, name: str) -> tuple[int, str]:
        found = self._ask(name, self._fs.info)
        if found["type"] != "file":
            raise Missing(f"{self.root}/{name}: no such object")
        return int(found["size"]), str(found.get("etag") or found.get("generation") or found.get("created") or "")

    def _write(self, name: str, data: bytes, etag: str | None) -> str:
        """Returns the new tag. etag: of the version that must be there; NO_OBJECT: of none; None: of any or none."""
        if etag and self._read(name, 0, None).etag != etag:
            raise Refused("another version")
        self._ask(name, self._fs.pipe_file, data, mode="create" if etag == NO_OBJECT else "overwrite")
        return hashlib.sha256(data).hexdigest()

    def _put_file(self, name: str, file: Path) -> None:
        self._retrying(lambda: self._ask(name, lambda key: self._fs.put_file(str(file), key)), f"write {name}")

    def _delete(self, name: str) -> None:
        self._ask(name, self._fs.rm_file)
