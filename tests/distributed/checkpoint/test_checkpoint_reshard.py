"""`Checkpointer` on real ranks: save at one world size, load at another; errors reach every rank; async equals sync."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalite.checkpoint import Checkpointer, background, latest, loading, resolve_checkpoint
from megalite.comm.collectives import barrier
from megalite.comm.mesh import ParallelMesh
from megalite.comm.rectangles import TensorShard
from megalite.comm.world import World
from megalite.errors import CheckpointError
from megalite.testing import run_ranks, run_single
from tests.unit.checkpoint.checkpoint_layouts import holds, make_model, random_layout


def checkpointer(world: World, directory: str, **options: object) -> Checkpointer:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    return Checkpointer(directory, world=axis, **options)  # type: ignore[arg-type]


def save_random(world: World, directory: str, seed: int) -> str:
    model = make_model(seed)
    layout = random_layout(model, world.size, random.Random(seed), fill=True)
    return str(checkpointer(world, directory).save(seed, layout[world.rank], {"seed": seed}, {"t.json": b"{}"}))


def load_random(world: World, directory: str, seed: int) -> dict[str, object]:
    model = make_model(seed)
    layout = random_layout(model, world.size, random.Random(seed + 1000), fill=False)
    saver = checkpointer(world, directory)
    meta = saver.load(resolve_checkpoint(directory), layout[world.rank])
    holds(model, [layout[world.rank]])
    return meta


@pytest.mark.in_turn
@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (4, 3), (2, 4)])
def test_any_world_size_loads_any_other(tmp_path: Path, source: int, target: int) -> None:
    for seed in range(3):
        directory = str(tmp_path / str(seed))
        paths = run_ranks(save_random, source, directory, seed)
        assert set(paths) == {str(tmp_path / str(seed) / f"iter_{seed:07d}")}
        for meta in run_ranks(load_random, target, directory, seed):
            assert meta == {"seed": seed}


def copies(world: World, directory: str) -> list[str]:
    shards = [TensorShard(f"w{i}", (512, 512), (0, 0), torch.full((512, 512), float(i)), world.rank) for i in range(3)]
    path = checkpointer(world, directory).save(1, shards, {})
    return sorted(p.name for p in path.glob("*.safetensors"))


def test_copies_are_written_once_and_by_all_ranks(tmp_path: Path) -> None:
    names = run_ranks(copies, 4, str(tmp_path))[0]
    assert names == [f"rank_{r:05d}.safetensors" for r in range(4)]
    sizes = [(tmp_path / "iter_0000001" / name).stat().st_size for name in names]
    assert sum(sizes) <= 3 * 2**20 + 4 * 4096 and max(sizes) - min(sizes) < 2000


def one_rank_has_a_problem(world: World, directory: str, what: str) -> str:
    values = torch.ones(4, dtype=torch.complex64) if what == "dtype" and world.rank == 1 else torch.ones(4)
    shards = [TensorShard("w", (8,), (4 * world.rank,), values)]
    saver = checkpointer(world, directory)
    try:
        path = saver.save(1, shards, {"nan": float("nan")} if what == "meta" else {})
        if what == "missing" and world.rank == 1:
            (path / "rank_00001.safetensors").unlink()
        name = "v" if what == "name" and world.rank == 1 else "w"
        saver.load(path, [TensorShard(name, (8,), (4 * world.rank,), torch.zeros(4))])
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "complex64 cannot be stored [rank 1]"),
        ("name", "v: not in the checkpoint [rank 1]"),
        ("missing", "rank_00001.safetensors: missing"),
        ("meta", "not JSON"),
    ],
)
def test_a_problem_of_one_rank_is_raised_by_all(tmp_path: Path, what: str, message: str) -> None:
    first, second = run_ranks(one_rank_has_a_problem, 2, str(tmp_path), what)
    assert first == second
    assert message in first
    assert not list(tmp_path.glob("*.tmp-*"))


ROWS = 8192


def memory_of_loading(world: World, directory: str) -> list[float]:
    saver = checkpointer(world, directory)
    first = ROWS // world.size * world.rank
    rows = torch.ones(ROWS // world.size, 8192)  # 128 MiB a rank
    path = saver.save(1, [TensorShard("w", (ROWS, 8192), (first, 0), rows)], {})
    rows.zero_()
    columns = torch.zeros(8192 // world.size, ROWS).t()  # strided: no block goes straight into its place
    first = 8192 // world.size * world.rank
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for local, offset in ((columns, (0, first)), (rows, (ROWS // world.size * world.rank, 0))):
        saver.load(path, [TensorShard("w", (ROWS, 8192), offset, local)])
    saver.save(2, [TensorShard("w", (ROWS, 8192), (0, first), columns)], {})
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [columns.mean().item(), rows.mean().item(), (after - before) / 1024]


@pytest.mark.landing
def test_saving_and_loading_need_the_memory_of_a_block_each(tmp_path: Path) -> None:
    for columns, rows, grown in run_ranks(memory_of_loading, 2, str(tmp_path)):
        assert columns == rows == 1.0
        assert grown < 40, f"{grown:.0f} MiB more for 128 MiB of state; blocks have 16 MiB"


def unused_weights(world: World, directory: str) -> list[str]:
    saver = checkpointer(world, directory)
    names = ["w", "bias", "optimizer/exp_avg/w"]
    path = saver.save(1, [TensorShard(n, (4,), (0,), torch.ones(4)) for n in names], {})
    said = []
    for wanted in (names[:2], names[:1]):
        try:
            saver.load(path, [TensorShard(n, (4,), (0,), torch.zeros(4)) for n in wanted])
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_optimizer_state_may_be_left_but_weights_may_not(tmp_path: Path) -> None:
    said = run_single(unused_weights, str(tmp_path))
    assert said[0] == "loaded"
    assert "holds weights that this model lacks: bias" in said[1]
    assert latest(tmp_path) == tmp_path / "iter_0000001"


def outcome(call: Callable[[], object]) -> str:
    """What a rank was told."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "no error"


def each_rank_its_own(world: World, directory: str, common: list[str]) -> str:
    saver = checkpointer(world, directory)
    every = [TensorShard(name, (4,), (0,), torch.ones(4), replica=world.rank) for name in "abc"]
    path = saver.save(1, every, {})
    wanted = [TensorShard(name, (4,), (0,), torch.zeros(4)) for name in ["ab"[world.rank], *common]]
    said = outcome(lambda: saver.load(path, wanted))
    assert said != "no error" or all(shard.local.eq(1).all().item() for shard in wanted)
    return said


def test_what_one_rank_does_not_ask_for_another_may(tmp_path: Path) -> None:
    assert run_ranks(each_rank_its_own, 2, str(tmp_path / "all"), ["c"]) == ["no error"] * 2
    first, second = run_ranks(each_rank_its_own, 2, str(tmp_path / "some"), [])
    assert first == second
    assert first.endswith("holds weights that this model lacks: c")


def other_directories(world: World, directory: str) -> str:
    own = checkpointer(world, directory)
    shards = [TensorShard("w", (8,), (4 * world.rank,), torch.ones(4))]
    paths = [own.save(1, shards, {}), own.save(2, shards, {})]
    return outcome(lambda: own.load(paths[world.rank], shards))


def test_ranks_that_see_different_checkpoints_do_not_load(tmp_path: Path) -> None:
    for said in run_ranks(other_directories, 2, str(tmp_path)):
        assert "the ranks see different checkpoints; is the directory shared by all hosts?" in said


def late_damage(world: World, directory: str) -> str:
    saver = checkpointer(world, directory)
    shards = [TensorShard(name, (8,), (4 * world.rank,), torch.ones(4)) for name in "abc"]
    path = saver.save(1, shards, {})
    if world.rank == 1:
        with (path / "rank_00001.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x55")
    return outcome(lambda: saver.load(path, shards))


def test_damage_that_one_rank_finds_late_is_everybodys(tmp_path: Path) -> None:
    first, second = run_ranks(late_damage, 2, str(tmp_path))
    assert first == second
    assert "rank_00001.safetensors: damaged at c" in first and first.endswith("[rank 1]")


def unreadable_on_one(world: World, directory: str) -> str:
    saver = checkpointer(world, directory)
    shards = [TensorShard("w", (8,), (4 * world.rank,), torch.ones(4))]
    path = saver.save(1, shards, {})

    def fails(path: Path) -> None:
        raise OSError(5, "Input/output error")

    if world.rank == 1:
        loading.read_manifest = fails  # type: ignore[assignment]
    return outcome(lambda: saver.load(path, shards))


def test_a_manifest_that_one_rank_can_not_read_stops_all(tmp_path: Path) -> None:
    first, second = run_ranks(unreadable_on_one, 2, str(tmp_path))
    assert first == second
    assert "cannot be read (Input/output error)" in first and first.endswith("[rank 1]")


def one_rank_grows(world: World, directory: str) -> float:
    """The second save holds something new on rank 1 only: the plan of the first must not be used again."""
    saver = checkpointer(world, directory)
    shards = [TensorShard("w", (8,), (4 * world.rank,), torch.ones(4))]
    saver.save(1, shards, {})
    if world.rank == 1:
        shards.append(TensorShard("v", (4,), (0,), torch.full((4,), 3.0)))
    path = saver.save(2, shards, {})
    found = torch.zeros(4)
    saver.load(path, [*shards[:1], TensorShard("v", (4,), (0,), found)])
    return found.sum().item()


def test_a_change_on_any_rank_makes_a_new_plan(tmp_path: Path) -> None:
    assert run_ranks(one_rank_grows, 2, str(tmp_path)) == [12.0, 12.0]


def no_memory_on_one(world: World, directory: str) -> str:
    saver = checkpointer(world, directory)

    def fails(self: object, parts: object) -> None:
        raise MemoryError("no room")

    if world.rank == 1:
        background.StagingMemory.copy = fails  # type: ignore[method-assign, assignment]
    shards = [TensorShard("w", (8,), (4 * world.rank,), torch.ones(4))]
    return outcome(lambda: saver.save(1, shards, {}, background=True))


def test_a_rank_without_memory_for_its_copy_stops_the_save_of_all(tmp_path: Path) -> None:
    first, second = run_ranks(no_memory_on_one, 2, str(tmp_path))
    assert first == second
    assert "--async-save: no host memory" in first and first.endswith("[rank 1]")


def state_in_a_file_of_its_own(world: World, directory: str) -> str:
    """Rank 1 writes state only; whoever loads weights reads nothing of its file."""
    saver = checkpointer(world, directory)
    name = "optimizer/exp_avg/w" if world.rank else "w"
    path = saver.save(1, [TensorShard(name, (4,), (0,), torch.ones(4))], {})
    if world.rank == 1:
        with (path / "rank_00001.safetensors").open("r+b") as file:
            file.truncate(10)
    barrier(saver.world)
    return outcome(lambda: saver.load(path, [TensorShard("w", (4,), (0,), torch.zeros(4))]))


def test_a_torn_file_is_refused_though_nobody_reads_it(tmp_path: Path) -> None:
    first, second = run_ranks(state_in_a_file_of_its_own, 2, str(tmp_path))
    assert first == second
    assert "rank_00001.safetensors: 10 bytes, expected" in first
