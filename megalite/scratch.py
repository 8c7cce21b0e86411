"""The launcher's private folder in the temporary directory, and what killed launchers have left there.

A launcher holds a lock on a file in its folder, and its ranks inherit it. The system gives the lock back however they
end, so a folder whose lock is free has no owner.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from megalite.errors import ConfigError
from megalite.files import clock_of

logger = logging.getLogger(__name__)

PREFIX, ALIVE = "megalite-", "alive"
OF_LAUNCHER = f"{PREFIX}launch-"
"""Other programs of ours have folders there too, which are theirs to remove."""
FORGOTTEN_SECONDS = 3600.0


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder (mode 0700) for the block; those of dead launchers are removed. Raises ConfigError."""
    try:
        root = Path(tempfile.gettempdir())
        _sweep(root)
        folder = Path(tempfile.mkdtemp(prefix=OF_LAUNCHER, dir=root))
        alive = open(folder / ALIVE, "x")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"env: TMPDIR: cannot be written ({error.strerror}); point it to another folder") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the folder's age decides
            fcntl.flock(alive, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        alive.close()


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{OF_LAUNCHER}*"):
        with contextlib.suppress(OSError):  # another user's, or another process is sweeping
            if _is_ours(folder, stat.S_ISDIR) and _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)
                logger.debug("removed %s, left by a launcher that was killed", folder)


def _is_dead(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / ALIVE, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:  # killed before it could lock, or locking just now
        return _is_forgotten(folder) and {*os.listdir(folder)} <= {"rendezvous"}
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_forgotten(root: Path) -> None:
    """Removes shared-memory files of makers that were killed: a live one's file has a name for an instant only."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_ours(path, stat.S_ISREG) and _is_forgotten(path):
                path.unlink()


def _is_forgotten(path: Path) -> bool:
    return clock_of(path.parent) - path.lstat().st_mtime > FORGOTTEN_SECONDS


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    found = path.lstat()
    return found.st_uid == os.getuid() and is_kind(found.st_mode)
