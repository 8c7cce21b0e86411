"""Do all hosts see the same folders? Asked at the start, where a save would else be lost hours later.

Rank 0 writes a file with a new name (what was never asked for is in no host's attribute cache), one rank of every other
host looks for it, and writes one itself. The proof is `tests/distributed/train/test_shared_disks.py`.
"""

import logging
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from megalite.comm import Axis, World, all_gather_json
from megalite.config import Config
from megalite.data import cache_directory
from megalite.errors import CheckpointError
from megalite.files import served_url

logger = logging.getLogger(__name__)

LOOK_SECONDS = {"save": 5.0, "data_cache_path": 1.0}
MOST_NAMES = 4


def check_shared_disks(config: Config, world: World, ranks: Axis) -> None:
    """Logs which folders all hosts share. Raises CheckpointError where they do not share `--save`. Collective; free on
    one host. A data cache of each host's own is legal: each then makes its own."""
    if world.local_size == world.size:
        return
    save = config.checkpoint.save if not config.training.skip_train else None
    folders = {} if save is None or served_url(save) is not None else {"save": save}
    if not config.data.mock_data:
        folders["data_cache_path"] = str(cache_directory(config.data.data_cache_path, config.checkpoint.run_folder))
    token = str(all_gather_json(uuid.uuid4().hex if world.is_first else None, ranks)[0])
    probes = {name: Path(folder) / f".probe-{token}" for name, folder in folders.items()}
    found = {name: _write(probe) for name, probe in probes.items() if world.is_first}
    all_gather_json(None, ranks)  # rank 0 has written
    if world.local_rank == 0 and not world.is_first:
        found = {name: _look(probe, world.rank, LOOK_SECONDS[name]) for name, probe in probes.items()}
    answers = all_gather_json({"host": world.host, "found": found} if world.local_rank == 0 else None, ranks)
    if world.is_first:
        for probe in probes.values():
            _remove(probe)
    hosts = [(f"{answer['host']} (rank {rank})", answer["found"]) for rank, answer in enumerate(answers) if answer]
    first = hosts[0][0]
    for name, folder in folders.items():
        lacking = [(host, found[name]) for host, found in hosts if found[name]]
        if name == "save" and lacking:
            some = ", ".join(host for host, _ in lacking[:MOST_NAMES])
            more = f" and {len(lacking) - MOST_NAMES} more" if len(lacking) > MOST_NAMES else ""
            raise CheckpointError(
                f"`save`={save}: {len(lacking)} of {len(hosts)} hosts, {some}{more}, do not share it with {first} "
                f"({lacking[0][1]}); every rank writes its part of a checkpoint: name a folder that all hosts can write"
            )
        own = f"{len(lacking)} of {len(hosts)} hosts do not see that of {first} and make their own"
        if world.is_first:
            logger.info("`%s`=%s: %s", name, folder, own if lacking else f"shared by all {len(hosts)} hosts")


def _write(path: Path) -> str | None:
    """Makes an empty file, and its folder; what is wrong where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return f"cannot write ({error.strerror})"
    return None


def _look(probe: Path, rank: int, seconds: float) -> str | None:
    """Whether this host sees rank 0's file within `seconds`, and can write one beside it; else what is wrong."""
    deadline = time.monotonic() + seconds
    while not os.path.isfile(probe):
        if time.monotonic() > deadline:
            return "what that has written is not there"
        time.sleep(0.05)
    mine = probe.with_name(f"{probe.name}-{rank}")
    problem = _write(mine)
    _remove(mine)
    return problem


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
