"""Faults while saving: a kill at every phase on every role, a full disk, a file-size limit, no permission, races.

Whatever happens, the newest committed checkpoint is whole and loads.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.checkpoint import Checkpointer, committed, latest, resolve_checkpoint
from megalite.checkpoint.lock import LockHolder, RunLock
from megalite.checkpoint.run_dir import interrupted
from megalite.comm.collectives import barrier
from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.rectangles import TensorShard
from megalite.comm.world import World
from megalite.errors import CheckpointError
from megalite.testing import run_ranks, run_single, try_ranks

sys.path.append(str(Path(__file__).parents[1] / "unit" / "checkpoint"))
from checkpoint_layouts import holds, make_model, random_layout  # noqa: E402

WORLD = 3  # rank 0 coordinates, rank 1 writes; rank 2 holds nothing and writes nothing


def shards_of(step: int, rank: int, *, fill: bool = True) -> list[TensorShard]:
    layout = random_layout(make_model(step), WORLD - 1, random.Random(step), fill=fill)
    return [*layout, []][rank]


def save_steps(world: World, directory: str, steps: list[int], asynchronous: bool, keep_last: int | None) -> None:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    saver = Checkpointer(directory, world=axis, keep_last=keep_last)
    for step in steps:
        shards, files = shards_of(step, world.rank), {"tokenizer.json": b"{}"}
        saver.save(step, shards, {"step": step}, files, background=asynchronous)
    saver.wait()


def load_newest(world: World, directory: str) -> int:
    """Loads everything of the newest checkpoint in one process and compares."""
    saver = Checkpointer(directory, world=Axis.single("world"))
    path = resolve_checkpoint(directory)
    step = int(path.name[5:])
    model = make_model(step)
    shards = [TensorShard(n, tuple(t.shape), (0,) * t.dim(), torch.zeros_like(t)) for n, t in model.items()]
    assert saver.load(path, shards) == {"step": step}
    holds(model, [shards])
    return step


PHASES = {
    "save.begin": (0, 1, 2),
    "save.half_shard": (0, 1),
    "save.shard_written": (0, 1),
    "save.before_manifest": (0,),
    "save.before_rename": (0,),
    "save.after_rename": (0,),
    "save.gc": (0,),
}
ROLES = [(point, rank, mode) for point, ranks in PHASES.items() for rank in ranks for mode in (False, True)]
SAMPLE = {  # every point, every role and both ways of saving; the rest runs with --full
    ("save.begin", 2, False), ("save.half_shard", 0, True), ("save.half_shard", 1, False),
    ("save.shard_written", 1, True), ("save.before_manifest", 0, True), ("save.before_rename", 0, False),
    ("save.after_rename", 0, True), ("save.gc", 0, False),
}  # fmt: skip


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("point", "rank", "asynchronous"),
    [pytest.param(*role, marks=() if role in SAMPLE else pytest.mark.full) for role in ROLES],
)
def test_a_kill_while_saving_harms_no_older_checkpoint(
    tmp_path: Path, point: str, rank: int, asynchronous: bool
) -> None:
    directory = str(tmp_path)
    fault = f"kill@{point}:rank={rank}:step={10 if point == 'save.gc' else 20}"
    case = try_ranks(save_steps, WORLD, directory, [10, 20], asynchronous, 1, faults=[fault], peer_timeout=3.0)
    assert case.outcome.culprit is not None and case.outcome.culprit.rank == rank, case.describe()
    committed_late = point in ("save.after_rename", "save.gc")
    assert run_single(load_newest, directory) == (20 if committed_late else 10)
    # a fresh start sweeps what was left and continues
    run_ranks(save_steps, WORLD, directory, [30], asynchronous, 1)
    assert [path.name for path in committed(tmp_path)] == ["iter_0000030"]
    assert not interrupted(tmp_path)
    assert run_single(load_newest, directory) == 30


def big(value: float) -> list[TensorShard]:
    return [TensorShard("w", (300, 512), (0, 0), torch.full((300, 512), value))]  # 614 kB


def small_disk_saves(world: World, directory: str, asynchronous: bool) -> list[str]:
    saver = Checkpointer(directory, world=Axis.single("world"), keep_last=1)
    first = saver.save(1, big(1.0), {})
    before = {p.name: p.read_bytes() for p in first.iterdir()}
    said = []
    for hide_size in (False, True):
        if hide_size:  # the check of free space beforehand is blinded: the disk fills while writing
            import megalite.checkpoint.checkpointer as module

            module.check_space = lambda directory, needed: None
        try:
            if asynchronous:
                saver.save(2, big(2.0), {}, background=True)
                saver.wait()
            else:
                saver.save(2, big(2.0), {})
            said.append("no error")
        except CheckpointError as error:
            said.append(str(error))
    assert {p.name: p.read_bytes() for p in first.iterdir()} == before
    out = torch.zeros(300, 512)
    saver.load(latest(directory) or "", [TensorShard("w", (300, 512), (0, 0), out)])
    assert (out == 1.0).all()
    return said


@pytest.fixture
def one_megabyte(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a 1 MB tmpfs needs root")
    yield place
    subprocess.run(["umount", str(place)], check=False)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_older_checkpoint_whole(one_megabyte: Path, asynchronous: bool) -> None:
    before, during = run_single(small_disk_saves, str(one_megabyte), asynchronous)
    assert f"--save={one_megabyte}: a checkpoint needs ~614 kB, " in before and "free on" in before
    assert "No space left on device" in during and "rank_00000.safetensors" in during and "needs ~614 kB" in during
    assert [p.name for p in committed(one_megabyte)] == ["iter_0000001"]
    assert not interrupted(one_megabyte), "the half-written save must give its space back"


def limited_save(world: World, directory: str) -> str:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    saver = Checkpointer(directory, world=axis)
    half = [TensorShard("w", (600, 512), (300 * world.rank, 0), big(1.0)[0].local)]
    saver.save(1, half, {})
    if world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        saver.save(2, half, {})
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_write_error_of_one_rank_is_everybodys(tmp_path: Path) -> None:
    first, second = run_ranks(limited_save, 2, str(tmp_path))
    assert first == second
    assert "rank_00001.safetensors: File too large" in first and "[rank 1]" in first
    assert [p.name for p in committed(tmp_path)] == ["iter_0000001"] and not interrupted(tmp_path)


def forbidden_save(world: World, directory: str) -> str:
    os.seteuid(65534)
    try:
        Checkpointer(directory, world=Axis.single("world")).save(1, big(1.0), {})
    except CheckpointError as error:
        return str(error)
    finally:
        os.seteuid(0)
    return "no error"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_no_permission_is_one_clear_line(tmp_path: Path) -> None:
    said = run_single(forbidden_save, str(tmp_path / "closed"))
    assert said == f"--save={tmp_path / 'closed'}: cannot write there (Permission denied); choose another --save"


def race_for_the_lock(world: World, directory: str, rounds: int) -> list[bool]:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    won = []
    for number in range(rounds):
        place = Path(directory) / str(number)
        if world.is_first:
            place.mkdir()
            (place / "run.lock").write_text(json.dumps({**LockHolder.myself().__dict__, "process_start": "1"}))  # dead
        barrier(axis)
        lock = RunLock(place)
        try:
            won.append(lock.acquire().held)
        except CheckpointError:
            won.append(False)
        barrier(axis)
        lock.release()
    return won


def test_of_several_runs_that_take_over_one_wins(tmp_path: Path) -> None:
    results = run_ranks(race_for_the_lock, 4, str(tmp_path), 12)
    assert [sum(row) for row in zip(*results, strict=True)] == [1] * 12
