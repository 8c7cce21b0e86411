"""Which ranks share a host's folder, and who keeps copies for whom: for `local.py`.

The folder itself is asked: ranks that see each other's files in it are on one host, whatever it is called.
"""

import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from megalite.checkpoint.format import BLOCK_BYTES
from megalite.checkpoint.replicas import buddies_of
from megalite.checkpoint.saving import raise_first
from megalite.comm import Axis, all_gather_json
from megalite.errors import CheckpointError

logger = logging.getLogger(__name__)

DIRECTORY = "`non_persistent_local_ckpt_dir`"


@dataclass(frozen=True)
class LocalSettings:
    """How a run saves on its hosts."""

    folder: Path  # on each of them
    in_memory: bool = False  # whether that must be a file system in memory
    factor: int = 1  # hosts that hold each file
    jump: int | None = None  # ranks between two that hold the same
    fewer: bool = False  # whether it continues with fewer hosts than `factor`
    kept: bool = False  # only what a store has not taken is kept: hosts may share the folder, no room is asked for
    block_bytes: int = BLOCK_BYTES


def find_hosts(folder: Path, world: Axis) -> list[int]:
    """rank -> the first rank of its host. Collective. Raises CheckpointError."""
    token = all_gather_json(uuid.uuid4().hex[:12], world)[0]
    mine = folder / f".probe-{token}-{world.rank}"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mine.touch()

    together(world, write)
    seen = [int(path.name.rpartition("-")[2]) for path in folder.glob(f".probe-{token}-*")]
    numbers = [int(first) for first in all_gather_json(min(seen), world)]
    together(world, lambda: mine.unlink(missing_ok=True))
    return numbers


def find_buddies(settings: LocalSettings, names: list[str], numbers: list[int], *, speaks: bool) -> list[list[int]]:
    """rank -> the ranks that keep a copy of its file. names: rank -> name of its host. numbers: from `find_hosts`.
    speaks: whether this rank warns. Raises CheckpointError as `LocalSaves` does."""
    count = len(set(numbers))
    if len({*zip(numbers, names, strict=True)}) > count and not settings.kept:
        raise CheckpointError(
            f"{DIRECTORY}={settings.folder}: {names[0]} and other hosts share it; name a folder of each host's own"
        )
    if settings.factor > count:
        known = f"{count} host{'s' * (count > 1)}"
        if not settings.fewer:
            raise CheckpointError(
                f"`replication_factor`={settings.factor}: {known}, and each copy is on another one; start more "
                "hosts, or drop `replication`"
            )
        if speaks:
            logger.warning("`replication_factor`=%d: %s, so fewer copies", settings.factor, known)
    buddies = buddies_of(numbers, settings.jump, settings.factor)
    for rank, others in enumerate(buddies):
        for one, other in combinations([rank, *others], 2):
            if names[one] == names[other] or numbers[one] == numbers[other]:
                raise CheckpointError(
                    f"`replication_jump`={settings.jump}: ranks {one} and {other} keep copies of one file, and are "
                    f"both on host {names[one]}; drop it, or give a multiple of the ranks of a host"
                )
    return buddies


def together(world: Axis, call: Callable[[], object]) -> None:
    """Calls on every rank. Raises CheckpointError, on all alike, where one has failed."""
    problem = None
    try:
        call()
    except CheckpointError as error:
        problem = error.text
    except OSError as error:
        problem = f"{DIRECTORY}: cannot write {error.filename} ({error.strerror})"
    raise_first(all_gather_json(problem, world))


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, by the system's table; empty where there is none."""
    kind, longest = "", -1
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            at, name = line.split()[1:3]
            if folder.resolve().is_relative_to(at) and len(at) >= longest:
                kind, longest = name, len(at)
    return kind
