"""Folders of derived data: named by a digest of everything they depend on, written whole or not at all.

A name that is a digest of content cannot be stale: another text, tokenizer, split, seed or length is another name.
A folder is staged beside its place and renamed, so that a killed or a second writer does no harm; a lock keeps the
processes of one machine from doing the same twice.
"""

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megalite.errors import DataError, MegaliteError
from megalite.files import clock_of, take_lock

logger = logging.getLogger(__name__)

COMPLETE, PARTIAL = "COMPLETE", ".partial"
KEPT_SECONDS = 86400.0


def cache_directory(data_cache_path: str | None, save: str | None) -> Path:
    """The folder of derived data: `--data-cache-path`, else `data_cache` beside `--save`, else the user's cache folder.

    Raises DataError where there is none of them.
    """
    if data_cache_path:
        return Path(data_cache_path)
    if save:
        return Path(save).resolve().parent / "data_cache"
    try:
        return Path.home() / ".cache" / "megalite"
    except RuntimeError:
        raise DataError(
            "`data_cache_path`: not given, and this user has no home directory; name a folder, or set HOME"
        ) from None


def digest_of(*parts: object) -> str:
    """Hex digest (128 bit) of the parts, bytes as they are, everything else as its `repr`."""
    digest = xxhash.xxh3_128()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        digest.update(f"{type(part).__name__}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def cached_folder(root: Path, name: str, build: Callable[[Path], None], *, resumes: bool = False) -> Path:
    """The folder `root/name`, made by `build(folder)` where it is not there yet.

    What killed builders have left is removed first. Raises DataError where the cache cannot be written.

    resumes: `build` continues with what an earlier one has left in its folder, which is kept for that for a day.
    """
    target = root / name
    try:
        if (target / COMPLETE).is_file():
            return target
    except PermissionError:
        raise DataError(
            f"`data_cache_path`={root}: {name} is another user's and not readable; make it so, or name another folder"
        ) from None
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock") as alone:
            if (target / COMPLETE).is_file():
                return target
            _sweep(root)
            _build(root, target, build, resumes=resumes and alone)
    except OSError as error:
        why = error.strerror or f"is the disk full? {error}"  # numpy tells of a full disk in numbers only
        raise DataError(
            f"`data_cache_path`={root}: cannot be written ({why}); name another folder (unset, it is beside `save`)"
        ) from error
    return target


def cached_arrays(
    cache: Path | None,
    name: str,
    names: Sequence[str],
    build: Callable[[], Sequence[NDArray[np.integer]]],
    match: Callable[..., bool],
) -> Sequence[NDArray[np.integer]]:
    """The arrays `names` that `build` makes, mapped from a folder `name` of the cache; a damaged one is not used.

    cache: None: they are in memory. match: whether the arrays, in the order of `names`, are of one index.
    """
    if cache is None:
        return build()

    def write(folder: Path) -> None:
        for each, array in zip(names, build(), strict=True):
            np.save(folder / f"{each}.npy", array, allow_pickle=False)

    folder = cached_folder(cache / "index", name, write)
    try:
        arrays = [np.asarray(np.load(folder / f"{each}.npy", mmap_mode="r", allow_pickle=False)) for each in names]
        if not match(*arrays):
            raise ValueError("shapes do not fit")
        return arrays
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged (%s) and not used; remove it", folder, error)
        return build()


def _build(root: Path, target: Path, build: Callable[[Path], None], *, resumes: bool) -> None:
    if resumes:
        stage = root / f"{target.name}{PARTIAL}"
        stage.mkdir(exist_ok=True)
    else:
        stage = root / f"{target.name}.tmp-{uuid.uuid4().hex}"
        stage.mkdir()  # not `mkdtemp`, whose folders are for nobody else: the umask says who may use the cache
    try:
        build(stage)
        (stage / COMPLETE).touch()
        if target.exists():  # left by a version of this program that did not mark it, or damaged by hand
            shutil.rmtree(target)
        os.rename(stage, target)
    except BaseException as error:
        if not resumes or isinstance(error, MegaliteError):
            shutil.rmtree(stage, ignore_errors=True)
        # On a file system without working locks another machine may have finished first: its folder is as good.
        if not (target / COMPLETE).is_file():
            raise


def _sweep(root: Path) -> None:
    """Removes the stages of builders that are dead: their locks are free."""
    stages = [(path, path.name.partition(".tmp-")[0]) for path in root.glob("*.tmp-*")]
    now = clock_of(root)
    for path in root.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):  # another machine may be sweeping
            if now - path.stat().st_mtime > KEPT_SECONDS:
                stages.append((path, path.name.removesuffix(PARTIAL)))
    for path, name in stages:
        with contextlib.suppress(OSError), open(root / f".{name}.lock", "a") as file:
            if take_lock(file):
                shutil.rmtree(path, ignore_errors=True)
                logger.info("removed %s, left by a process that was killed", path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold an advisory lock for the block: True; without support for locks the rename alone keeps things whole."""
    with open(path, "a") as file:
        taken = take_lock(file)
        if taken is False:
            logger.info("waiting for another process that builds %s", path.with_name(path.stem[1:]))
            taken = take_lock(file, wait=True)
        yield taken is not None
