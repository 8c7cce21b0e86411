"""A cache that several users share: what the umask lets them read is used, all else is one line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.comm.world import World
from megalite.data.cache import cached_folder
from megalite.errors import DataError
from megalite.testing import run_single

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")


def write(folder: Path) -> None:
    (folder / "index.txt").write_text("written")


def body_uses(world: World, root: str, umask: int) -> str:
    """What nobody finds where root has built a folder under this umask."""
    os.umask(umask)
    cached_folder(Path(root), "data", write)
    os.seteuid(NOBODY)
    try:
        return (cached_folder(Path(root), "data", write) / "index.txt").read_text()
    except DataError as error:
        return str(error)
    finally:
        os.seteuid(0)


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that everybody reaches, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="megalite-shared-", dir="/tmp") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


def test_what_one_user_has_indexed_another_one_reads(root: Path) -> None:
    assert run_single(body_uses, str(root), 0o022) == "written"


def test_what_is_private_is_one_line(root: Path) -> None:
    line = f"--data-cache-path={root}: data is another user's and not readable; make it so, or name another folder"
    assert run_single(body_uses, str(root), 0o077) == line
