"""`StoreUrl`: a place in a store, with the methods of a path that readers use; `place` tells URLs from paths."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import CheckpointError
from megalite.files import served_url, url_problem
from megalite.stores.s3 import S3Store
from megalite.stores.store import Missing, Store


@functools.cache
def _opened(scheme: str, bucket: str, process: int) -> Store:
    """The store of a bucket, opened once a process: a client does not survive a fork."""
    return S3Store(bucket) if scheme == "s3" else Store(scheme, bucket)


@dataclass(frozen=True, order=True)
class StoreUrl:
    """`s3://bucket/run/iter_0000100`. key: the name inside the bucket."""

    scheme: str
    bucket: str
    key: str

    @property
    def store(self) -> Store:
        return _opened(self.scheme, self.bucket, os.getpid())

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StoreUrl:
        return StoreUrl(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> StoreUrl:
        return StoreUrl(self.scheme, self.bucket, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + f"/{self.key}" * bool(self.key)

    def resolve(self) -> StoreUrl:
        return self

    def is_file(self) -> bool:
        try:
            self.store.size(self.key)
        except Missing:
            return False
        return True

    def read_bytes(self) -> bytes:
        return self.store.read(self.key)

    def read_if_there(self) -> bytes | None:
        """None where there is no such object."""
        try:
            return self.read_bytes()
        except Missing:
            return None

    def iterdir(self) -> list[StoreUrl]:
        """What lies directly under it."""
        return [self / name.rstrip("/") for name in self.store.names(self.key)]

    def unlink(self, missing_ok: bool = True) -> None:
        """Removes the object; a store does not say whether there was one."""
        self.store.delete(self.key)

    def write_bytes(self, data: bytes) -> None:
        self.store.put(self.key, data)


Place = Path | StoreUrl
"""A path of a file system, or a URL of a store."""


def place(text: Place | str) -> Place:
    """Where a flag points: a URL that a store serves, or a path."""
    if not isinstance(text, str):
        return text
    found = served_url(text)
    return Path(text) if found is None else StoreUrl(*found)


def run_place(text: Place | str) -> Place:
    """`place` of a run directory. Raises CheckpointError for a URL that no store serves."""
    problem = url_problem(text, stores=True) if isinstance(text, str) and served_url(text) is None else None
    if problem is not None:
        raise CheckpointError(f"{text} {problem}")
    return place(text)


def close_stores() -> None:
    """Ends what clients run in the background of this process, which will fork; a store is opened anew when it is
    used."""
    _opened.cache_clear()
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is not None and asyn.loop[0] is not None:
        asyn.loop[0].call_soon_threadsafe(asyn.loop[0].stop)
        asyn.iothread[0].join()
        asyn.reset_lock()
