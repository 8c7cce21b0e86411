"""Files that users name: is there one, and can it be read more than once?"""

from __future__ import annotations

import os
import stat


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
