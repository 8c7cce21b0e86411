"""Ranks as hosts, each with a folder of its own or a common one: what is refused, and what is told."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import pytest

from megalite.comm import Axis, ParallelMesh, World
from megalite.config import parse
from megalite.errors import CheckpointError
from megalite.testing import run_ranks
from megalite.train import shared_disks

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --global-batch-size 12 "
    "--lr 1e-3 --train-iters 1 --device cpu"
).split()


def probe(world: World, saves: list[str], caches: list[str], per_host: int) -> tuple[str, list[str], float]:
    """What this rank is told: the refusal, and the lines."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a list will do
    shared_disks.logger.addHandler(handler)
    shared_disks.logger.setLevel(logging.INFO)
    shared_disks.LOOK_SECONDS["save"] = 0.3
    host, local = divmod(world.rank, per_host)
    flags = [*TINY, "--save", saves[host], "--data-cache-path", caches[host], "--data-path", "x"]
    config = parse(flags, world_size=world.size, check_files=False)
    world = dataclasses.replace(world, host=f"node{host}", local_rank=local, local_size=per_host)
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    began = time.monotonic()
    try:
        shared_disks.check_shared_disks(config, world, mesh.world)
    except CheckpointError as error:
        return str(error), lines, time.monotonic() - began
    return "", lines, time.monotonic() - began


def test_all_hosts_share(tmp_path: Path) -> None:
    save, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    answers = run_ranks(probe, 4, [save] * 2, [cache] * 2, 2)
    assert [refusal for refusal, _, _ in answers] == [""] * 4
    assert answers[0][1] == [
        f"`save`={save}: shared by all 2 hosts",
        f"`data_cache_path`={cache}: shared by all 2 hosts",
    ]
    assert not any(lines for _, lines, _ in answers[1:])
    assert max(seconds for *_, seconds in answers) < 1
    assert not [*(tmp_path / "run").iterdir(), *(tmp_path / "cache").iterdir()]


def test_a_cache_of_each_hosts_own_is_told(tmp_path: Path) -> None:
    save = str(tmp_path / "run")
    answers = run_ranks(probe, 3, [save] * 3, [str(tmp_path / each) for each in "abb"], 1)
    assert [refusal for refusal, _, _ in answers] == [""] * 3
    told = "2 of 3 hosts do not see that of node0 (rank 0) and make their own"
    assert answers[0][1][1] == f"`data_cache_path`={tmp_path / 'a'}: {told}"


def test_a_save_that_hosts_do_not_share_is_refused_everywhere(tmp_path: Path) -> None:
    saves = [str(tmp_path / each) for each in ("run", "own", "run")]
    answers = run_ranks(probe, 6, saves, [str(tmp_path / "cache")] * 3, 2)
    why = (
        "1 of 3 hosts, node1 (rank 2), do not share it with node0 (rank 0) (what that has written is not there); every "
        "rank writes its part of a checkpoint: name a folder that all hosts can write"
    )
    assert [refusal for refusal, _, _ in answers] == [f"--save={saves[rank // 2]}: {why}" for rank in range(6)]
    assert not (tmp_path / "own").exists()


def test_one_host_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse([*TINY, "--save", "run", "--mock-data", "--vocab-size", "9"])
    shared_disks.check_shared_disks(config, World(), Axis.single("world"))
    assert not list(tmp_path.iterdir())
