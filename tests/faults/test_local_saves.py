"""Saves on the hosts themselves: hosts are lost, files damaged, saves torn; a whole save is loaded, to the bit.

Ranks play hosts, each with a folder and a name of its own.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import Checkpointer, LocalSaves, LocalSettings, replicas
from megalite.checkpoint.replicas import Transfer, buddies_of, rounds_of
from megalite.comm import Axis, ParallelMesh, TensorShard, World
from megalite.errors import CheckpointError
from megalite.testing import run_ranks, try_ranks

sys.path.append(str(Path(__file__).parents[1] / "unit" / "checkpoint"))
from checkpoint_layouts import holds, make_model, random_layout  # noqa: E402

BLOCK = 4096


def shards_of(seed: int, layout: int, world: int, rank: int, *, fill: bool) -> list[TensorShard]:
    return random_layout(make_model(seed), world, random.Random(layout), fill=fill)[rank]


def saver_of(world: World, folder: str, per_host: int, *, factor: int = 2, lost: tuple[int, ...] = ()) -> Checkpointer:
    """Rank r is on host r // per_host of those that are left; hosts keep their names and folders."""
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world if world.size > 1 else Axis.single("world")
    left = [host for host in range(9) if host not in lost]
    host = left[world.rank // per_host]
    settings = LocalSettings(Path(folder) / f"disk{host}", factor=factor, fewer=True, block_bytes=BLOCK)
    local = LocalSaves(settings, axis, f"host{host}")
    local.token = "token"
    return Checkpointer(Path(folder) / "run", world=axis, block_bytes=BLOCK, local=local)


def save(world: World, folder: str, per_host: int, steps: list[int], factor: int = 2) -> list[bool]:
    saver = saver_of(world, folder, per_host, factor=factor)
    return [
        saver.save_locally(
            step, shards_of(step, step, world.size, world.rank, fill=True), {"step": step}, {"a.json": b"{}"}
        )
        for step in steps
    ]


def load(world: World, folder: str, per_host: int, lost: tuple[int, ...], at_least: int = 0) -> int:
    """The newest save, loaded at another layout and compared to the bit; 0: there is none."""
    saver = saver_of(world, folder, per_host, lost=lost)
    assert saver.local is not None
    path = saver.local.newest(at_least)
    if path is None:
        return 0
    step = int(path.name[5:])
    mine = shards_of(step, 77 + step, world.size, world.rank, fill=False)
    assert saver.load(path, mine) == {"step": step}
    holds(make_model(step), [mine])
    assert saver.local._held() if saver.local._leads else True, "the host has it now"
    return step


def lose(folder: Path, *hosts: int) -> None:
    for host in hosts:
        shutil.rmtree(folder / f"disk{host}")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_host_is_lost_and_another_takes_its_place(tmp_path: Path) -> None:
    """Whole saves alone are kept, and load at other layouts: with an empty host, with one host fewer."""
    assert run_ranks(save, 3, str(tmp_path), 1, [10, 20]) == [[True, True]] * 3
    names = {host: sorted(path.name for path in (tmp_path / f"disk{host}/token").iterdir()) for host in range(3)}
    assert names == dict.fromkeys(range(3), ["iter_0000020", "latest_checkpointed_iteration.txt"])
    lose(tmp_path, 1)
    assert run_ranks(load, 3, str(tmp_path), 1, ()) == [20] * 3
    lose(tmp_path, 2)
    assert run_ranks(load, 2, str(tmp_path), 1, (2,)) == [20] * 2, "with two hosts of three"
    assert run_ranks(load, 2, str(tmp_path), 1, (2,), 21) == [0] * 2, "`save` has a newer one"


def test_files_that_are_damaged_come_from_another_host(tmp_path: Path) -> None:
    run_ranks(save, 3, str(tmp_path), 1, [10])
    folder = "token/iter_0000010"
    flip(tmp_path / f"disk0/{folder}/rank_00000.safetensors", 4400)
    flip(tmp_path / f"disk2/{folder}/rank_00002.safetensors", -9)
    assert run_ranks(load, 3, str(tmp_path), 1, ()) == [10] * 3
    both = sorted(tmp_path.glob(f"disk*/{folder}/rank_00001.safetensors"))
    for path in both[:2]:
        flip(path, 4400)
    assert run_ranks(load, 3, str(tmp_path), 1, ()) == ([10] * 3 if both[2:] else [0] * 3)


def save_over_a_bad_wire(world: World, folder: str) -> list[bool]:
    """The first message that this rank receives in the second save has a flipped bit."""
    received, swap = [0], replicas.start_swap

    def flipping(sending: list[Any], receiving: list[Any], axis: Axis) -> Any:
        work = swap(sending, receiving, axis)
        received[0] += len(receiving)
        if world.rank == 1 and received[0] == 1 and receiving:
            work.wait()
            receiving[0][1][-1] ^= 1
            return Arrived()
        return work

    replicas.start_swap = flipping  # type: ignore[assignment]
    saver = saver_of(world, folder, 1)
    done = []
    for step in (10, 20):
        received[0] = 0 if step == 20 else -1000
        shards = shards_of(step, step, world.size, world.rank, fill=True)
        done.append(saver.save_locally(step, shards, {"step": step}, {}))
    return done


class Arrived:
    def wait(self) -> None:
        pass


def test_what_is_damaged_on_its_way_is_no_save(tmp_path: Path) -> None:
    """Seen when it arrives: the older save stays, on all hosts."""
    answers = run_ranks(save_over_a_bad_wire, 3, str(tmp_path))
    assert answers == [[True, False]] * 3
    assert run_ranks(load, 3, str(tmp_path), 1, ()) == [10] * 3
    assert not [*tmp_path.glob("disk*/token/*.tmp-*")]


POINTS = {
    "save.begin": False,
    "save.half_shard": False,
    "save.shard_written": False,
    "replica.half_sent": False,
    "replica.arrived": False,
    "save.before_manifest": None,  # newer on the other hosts, if they have committed by then
    "save.before_rename": None,
    "save.after_rename": None,
    "local.committed": True,
    "local.gc": True,
}


def phases() -> list[object]:
    """Two of them by default; with --full all, by each rank, both ways on."""
    some = [("replica.half_sent", 0, "fewer"), ("local.gc", 1, "same")]
    every = [(point, rank, again) for point in POINTS for rank in range(3) for again in ("same", "fewer")]
    return [*some, *(pytest.param(*case, marks=pytest.mark.full) for case in every if case not in some)]


@pytest.mark.parametrize(("point", "rank", "again"), phases())
def test_a_host_is_lost_in_any_phase_of_a_save(tmp_path: Path, point: str, rank: int, again: str) -> None:
    """With its disk: the newest save that all others have committed is whole."""
    run_ranks(save, 3, str(tmp_path), 1, [10])
    fault = f"kill@{point}:rank={rank}" + ("" if point.startswith("replica") or point == "local.gc" else ":step=20")
    case = try_ranks(save, 3, str(tmp_path), 1, [20], faults=[fault], peer_timeout=60)
    assert case.outcome.culprit is not None and case.outcome.culprit.rank == rank, case.describe()
    lose(tmp_path, rank)
    size, without = (3, ()) if again == "same" else (2, (rank,))
    found = run_ranks(load, size, str(tmp_path), 1, without)
    assert set(found) in ([{10}, {20}] if POINTS[point] is None else [{20 if POINTS[point] else 10}])
    assert run_ranks(save, 3, str(tmp_path), 1, [30]) == [[True]] * 3
    assert run_ranks(load, 3, str(tmp_path), 1, ()) == [30] * 3


def refusal(world: World, folder: str, hosts: list[str], factor: int, jump: int | None) -> str:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    settings = LocalSettings(Path(folder) / hosts[world.rank], factor=factor, jump=jump)
    try:
        LocalSaves(settings, axis, hosts[world.rank])
    except CheckpointError as error:
        return error.text
    return ""


def shared(world: World, folder: str) -> str:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    try:
        LocalSaves(LocalSettings(Path(folder)), axis, f"h{world.rank}")
    except CheckpointError as error:
        return error.text
    return ""


def test_what_is_refused(tmp_path: Path) -> None:
    one, two = ["a", "a", "b", "b"], ["a", "b", "a", "b"]
    assert run_ranks(refusal, 4, str(tmp_path), one, 2, 1)[3].startswith("`replication_jump`=1: ranks 0 and 1 keep")
    assert run_ranks(refusal, 4, str(tmp_path), two, 2, 1) == [""] * 4
    assert (
        "`replication_factor`=3: 2 hosts, and each copy is on another one"
        in run_ranks(refusal, 4, str(tmp_path), one, 3, None)[0]
    )
    assert "h0 and other hosts share it" in run_ranks(shared, 2, str(tmp_path))[1]


def test_copies_are_on_other_hosts_and_rounds_are_fair() -> None:
    assert buddies_of([0, 0, 2, 2, 4, 4], None, 2) == [[2], [3], [4], [5], [0], [1]]
    assert buddies_of([0, 0, 2, 2, 4, 4], None, 3)[1] == [3, 5]
    assert buddies_of([0, 0, 2, 2], 2, 2) == [[2], [3], [0], [1]]
    assert buddies_of([0, 0, 2], None, 2) == [[2], [2], [0]], "hosts of unequal size"
    assert buddies_of([0], None, 2) == [[]]
    ring = [Transfer("x", rank, (rank + 1) % 5) for rank in range(5)]
    assert rounds_of(ring) == [ring]
    assert [len(some) for some in rounds_of([*ring, ring[0]])] == [5, 1]
