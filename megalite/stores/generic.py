"""What fsspec serves beside S3, in whole objects: Google's store, and memory (for tests and examples)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megalite.extras import optional_package
from megalite.stores.store import NO_OBJECT, Again, Missing, Refused, Store, StoreError, Tagged

T = TypeVar("T")


class GenericStore(Store):
    """A bucket behind an fsspec file system. It can create, but a swap reads and then writes: two writers are told
    apart at the commit, and not before. Memory is one process's alone, so its swap is safe."""

    def __init__(self, scheme: str, bucket: str) -> None:
        super().__init__(f"{scheme}://{bucket}")
        fsspec = optional_package(self.root, "fsspec")
        self.conditional = scheme == "memory"
        if scheme == "gs":
            optional_package(self.root, "gcsfs")
        self._fs = fsspec.filesystem(scheme, use_listings_cache=False)
        self._bucket = bucket

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
        if etag and self._read(name, 0, None).etag != etag:
            raise Refused("another version")
        self._ask(name, self._fs.pipe_file, data, mode="create" if etag == NO_OBJECT else "overwrite")
        return hashlib.sha256(data).hexdigest()

    def _put_file(self, name: str, file: Path) -> None:
        self._retrying(lambda: self._ask(name, lambda key: self._fs.put_file(str(file), key)), f"write {name}")

    def _delete(self, name: str) -> None:
        self._ask(name, self._fs.rm_file)
