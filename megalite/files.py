"""Files that users name: is there one, and can it be read more than once?"""

from __future__ import annotations

import os
import re
import stat

_URL = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*::)*([a-z][a-z0-9+.-]+):(/.*)", re.IGNORECASE | re.DOTALL)


def url_problem(path: str) -> str | None:
    """What stands after `--flag=path: ` where `path` is a URL (`s3://bucket/run`), which no store serves; None where it
    is a path of a file system. A folder whose name looks like a URL is still named by `./s3:/folder`."""
    found = _URL.fullmatch(path)
    if found is None:
        return None
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        place = "/" + rest.removeprefix("//localhost/").lstrip("/")
        return f"is a URL; give the path, {place}"
    return f"is a URL, and no store of megalite serves {scheme}; give a folder of a file system that all hosts share"


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
