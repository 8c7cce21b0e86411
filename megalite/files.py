"""Files that users name: is there one, and can it be read more than once? The clock that stamps them, and locks."""

import fcntl
import logging
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_URL = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*::)*([a-z][a-z0-9+.-]+):(/.*)", re.IGNORECASE | re.DOTALL)
SERVED = ("s3", "gs", "memory")  # schemes of the stores that `megalite.stores` opens
_SERVED = re.compile(r"(s3|gs|memory)://([\w][\w.-]*)((?:/[^/\s?#*\\]+)*)/?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FILE = re.compile(r".*\.(json|jsonl|model|txt|yaml)")


def hub_advice(path: str) -> str:
    """What stands after `--flag=path: no such file; ` where the path looks like the name of a model on the Hub
    (ORG/NAME, and no folder ORG here); empty for any other."""
    if not _HUB_NAME.fullmatch(path) or _FILE.fullmatch(path) or os.path.lexists(path.partition("/")[0]):
        return ""
    command = "hf download ORG/NAME --local-dir DIR".replace("ORG/NAME", path)
    return f"looks like a name on the Hub; nothing is downloaded here: run {command}, and give DIR"


def served_url(text: str) -> tuple[str, str, str] | None:
    """Scheme, bucket and key of a URL that a store serves; None for any other text."""
    found = _SERVED.fullmatch(text)
    return None if found is None else (found[1], found[2], found[3][1:])


def staging_folder(url: str) -> str:
    """Where what goes to a URL waits on this host, if no other folder is named: in the user's cache."""
    return os.path.expanduser(f"~/.cache/megalite/staging/{re.sub(r'[^A-Za-z0-9.-]+', '_', url)}")


def url_problem(path: str, *, stores: bool = False) -> str | None:
    """What stands after `--flag=path: ` where `path` is a URL (`s3://bucket/run`) that is not served here; None where
    it is a path of a file system. A folder whose name looks like a URL is still named by `./s3:/folder`.

    stores: whether a URL of a store is served here.
    """
    found = _URL.fullmatch(path)
    if found is None:
        return None
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        place = "/" + rest.removeprefix("//localhost/").lstrip("/")
        return f"is a URL; give the path, {place}"
    if stores:
        served = served_url(path)
        if served is not None and served[0] == "memory":
            return "is this process's memory, and every rank has its own; give s3://BUCKET/NAME or a folder"
        if served is not None and served[2]:
            return None
        if scheme in SERVED:
            return f"is no place in a store; write {scheme}://BUCKET/NAME"
        return f"is a URL, and no store of megalite serves {scheme} (it serves s3, gs); give one of those, or a folder"
    stores_take = " (stores take checkpoints and tokens: `save`, `load`, `data_path`)" * (scheme in SERVED)
    return f"is a URL, and this takes a path; give a folder of a file system{stores_take}"


def input_problem(path: str, most_bytes: int | None = None) -> str | None:
    """What stands after `--flag=path: ` where `path` is no file for every rank to read; None where it is. A pipe gives
    its content to one reader, a device may never end.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    if stat.S_ISDIR(found.st_mode):
        return "is a directory; give a file"
    if not stat.S_ISREG(found.st_mode):
        return "is a pipe or a device, which not every rank can read; write it to a file"
    if not os.access(path, os.R_OK):
        return "cannot be read (Permission denied)"
    if most_bytes is not None and found.st_size > most_bytes:
        return f"{found.st_size:,} bytes, at most {most_bytes:,}; split the file"
    return None


def clock_of(folder: Path) -> float:
    """Now, in seconds, as a file that is touched in `folder` says: a file server's clock may differ from ours, and ours
    may be set anew. Raises OSError where none can be."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def take_lock(file: IO[bytes] | IO[str], *, wait: bool = False) -> bool | None:
    """Takes the advisory lock of a file until that is closed, or this process dies: whether nobody else has it. None
    where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("no lock on %s (%s)", file.name, error.strerror)
        return None
    return True
