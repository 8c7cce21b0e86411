"""The clock that stamps the files of a folder: a file server's may differ from ours, and ours may be set anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def clock_of(folder: Path) -> float:
    """Now, in seconds, as a file that is touched in `folder` says. Raises OSError where none can be."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
