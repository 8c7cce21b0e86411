"""The grid of ranks: its formula, one list of collective calls on all ranks, and no communicator that nobody uses."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalite.comm import p2p
from megalite.comm.collectives import all_reduce_
from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.p2p import Channel
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.schedule.stage_placement import loop
from megalite.testing import run_ranks
from megalite.train.run import open_run

NAMES = ["tp", "cp", "dp", "dp_shard", "dp_replicate", "pp", "etp", "ep", "edp", "world"]


@contextmanager
def recorded(world_size: int | None = None) -> Iterator[list[tuple[list[int], Any]]]:
    """(ranks, timeout) of every process group that is asked for; with a size there is no real world."""
    calls: list[tuple[list[int], Any]] = []
    real = dist.new_group

    def new_group(ranks: list[int], timeout: Any = None) -> Any:
        calls.append((ranks, timeout))
        return f"group {ranks}" if world_size is not None else real(ranks, timeout=timeout)

    with patch.object(dist, "new_group", new_group):
        if world_size is None:
            yield calls
            return
        with patch.object(dist, "get_world_size", lambda: world_size):
            yield calls


def drawn(rng: random.Random) -> dict[str, int]:
    """Sizes of a legal mesh."""
    while True:
        sizes = {name: rng.choice([1, 1, 2, 3]) for name in ("tp", "cp", "pp", "ep", "etp", "dp_replicate")}
        inside = sizes["tp"] * sizes["cp"] * rng.choice([1, 2, 4, 6])
        try:
            ParallelMesh.build(rank=0, size=inside * sizes["pp"], **sizes)
        except ConfigError:
            continue
        return {"size": inside * sizes["pp"], **sizes}


def formula(s: dict[str, int]) -> dict[int, dict[str, int]]:
    """World rank -> coordinates, by loops over the two formulas of the module."""
    inside = s["size"] // s["pp"]
    dp, edp = inside // (s["tp"] * s["cp"]), inside // (s["etp"] * s["ep"])
    places: dict[int, dict[str, int]] = {rank: {} for rank in range(s["size"])}
    for p, d, c, t in product(range(s["pp"]), range(dp), range(s["cp"]), range(s["tp"])):
        rank = t + s["tp"] * (c + s["cp"] * d) + inside * p
        shard = dp // s["dp_replicate"]
        places[rank] |= {"pp": p, "dp": d, "cp": c, "tp": t, "dp_shard": d % shard, "dp_replicate": d // shard}
    for p, d, e, t in product(range(s["pp"]), range(edp), range(s["ep"]), range(s["etp"])):
        places[t + s["etp"] * (e + s["ep"] * d) + inside * p] |= {"edp": d, "ep": e, "etp": t}
    return {rank: place | {"world": rank} for rank, place in places.items()}


DENSE_VIEW, EXPERT_VIEW = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")


def along(places: dict[int, dict[str, int]], rank: int, names: tuple[str, ...]) -> list[int]:
    """The ranks that differ from `rank` along `names` only."""
    view = EXPERT_VIEW if set(names) & {"etp", "ep", "edp"} else DENSE_VIEW
    same = [name for name in view if name not in names]
    return [r for r in places if all(places[r][name] == places[rank][name] for name in same)]


@pytest.mark.parametrize("seed", range(12))
def test_axes_follow_the_formula_and_all_ranks_ask_for_the_same_groups(seed: int) -> None:
    sizes = drawn(random.Random(seed))
    places = formula(sizes)
    wanted = [("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("tp", "pp"), ("etp",), ("ep",), ("edp",)]
    wanted += [("ep", "etp"), ("world",)]
    asked = []
    for rank in range(sizes["size"]):
        with recorded(sizes["size"]) as calls:
            mesh = ParallelMesh.build(rank=rank, **sizes)
            for name in NAMES:
                assert mesh.coordinate(name) == places[rank].get(name), (sizes, rank, name)
            for names in wanted:
                axis = mesh.over(*names)
                ranks = list(places) if names == ("world",) else along(places, rank, names)
                assert list(axis.ranks) == ranks and axis.size == mesh.size(*names) == len(ranks), (sizes, names)
                assert axis.ranks[axis.rank] == rank
            made = len(calls)
            assert [mesh.over(*names) for names in wanted] and len(calls) == made, "an axis is made once"
        asked.append(calls)
    assert all(calls == asked[0] for calls in asked), "ranks would wait for one another forever"


def test_hybrid_shards_are_neighbours_and_pipeline_subaxes_follow_the_grid() -> None:
    with recorded(16) as calls:
        mesh = ParallelMesh.build(rank=9, size=16, tp=2, pp=2, dp_replicate=2, timeout=7.0)
        assert mesh["dp_shard"].ranks == (9, 11) and mesh["dp_replicate"].ranks == (9, 13)
        assert mesh["dp"].ranks == (9, 11, 13, 15)
        assert mesh.through([0, 1], apart="embedding").ranks == (1, 9)
        assert mesh.through([0], apart="alone").size == 1
        assert str(mesh) == "tp2 x pp2 x dp4"
        assert {timeout.total_seconds() for _, timeout in calls} == {7.0}
        mesh.complete()
        assert mesh["dp"].size == 4
        with pytest.raises(AssertionError, match="communicator of pp"):
            mesh["pp"]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"world size 6: not divisible by tp\*pp=4"):
        ParallelMesh.build(rank=0, size=6, tp=2, pp=2)
    with pytest.raises(ConfigError, match=r"world size 8: not divisible by etp\*ep\*pp=6"):
        ParallelMesh.build(rank=0, size=8, tp=2, ep=3)
    with pytest.raises(ConfigError, match="dp_replicate=3: does not divide the data-parallel size 4"):
        ParallelMesh.build(rank=0, size=4, dp_replicate=3)
    with pytest.raises(ValueError, match="no view"):
        ParallelMesh.single().over("ep", "cp")


TINY = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --global-batch-size 8 --micro-batch-size 1 "
    "--train-iters 5 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 32 --eval-iters 0 "
    "--num-workers 0 --make-vocab-size-divisible-by 8 --no-exit-signal-handler --distributed-timeout-minutes 0.4"
).split()


def body_groups(world: World, layouts: list[list[str]]) -> list[tuple[int, set[float]]]:
    """For each layout how many groups a run asks for while it is built, and their timeouts in seconds."""
    found = []
    for flags in layouts:
        with recorded() as calls, open_run(parse([*TINY, *flags], world_size=world.size), world) as run:
            built = len(calls)
            run.trainer.train_step(drain=True)
            assert len(calls) == built
        found.append((built, {timeout.total_seconds() for _, timeout in calls}))
    return found


def test_a_run_makes_the_communicators_that_it_uses() -> None:
    pp, tp = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
    layouts = {
        f"{tp} 2 {pp} 2 --untie-embeddings-and-output-weights": 2 + 2 * 2,  # tp; up and down
        f"{tp} 2 --zero-stage 1": 2 + 2,  # tp and dp
        "": 0,  # dp is the world
        f"{pp} 4 --pipeline-schedule 1f1b --untie-embeddings-and-output-weights": 2,
        f"{pp} 4 --pipeline-schedule 1f1b": 2 + 1,  # and the tied embedding
        "--zero-stage 1 --num-distributed-optimizer-instances 2": 2 + 2,  # shards and their copies
        "--calculate-per-token-loss --zero-stage 3 --num-distributed-optimizer-instances 2": 2
        + 2,  # dp is the world again
        f"{pp} 4 --pipeline-schedule chimera": 2 + 1 + 4,  # and the holders of each stage
    }
    for found in run_ranks(body_groups, 4, [flags.split() for flags in layouts]):
        assert found == [(count, {24.0} if count else set()) for count in layouts.values()]


def body_silent_peer(world: World) -> float:
    """How long rank 0 waits for rank 1, which says nothing until rank 0 has given up."""
    axis: Axis = ParallelMesh.build(rank=world.rank, size=world.size, tp=2, timeout=0.5).over("tp", apart="own")
    all_reduce_(torch.zeros(1), axis)
    began = time.monotonic()
    if world.is_first:
        with pytest.raises(RuntimeError):
            all_reduce_(torch.zeros(1), axis)
    waited = time.monotonic() - began
    dist.barrier()
    return waited


def test_every_group_keeps_the_timeout_of_the_run() -> None:
    assert 0.4 < run_ranks(body_silent_peer, 2)[0] < 20


@pytest.mark.parametrize("size", [2, 5, 64])
def test_pipeline_ranks_connect_to_their_neighbours_alone(size: int) -> None:
    """NCCL makes a communicator, with device memory of its own, for every pair that ever sends."""
    used: list[tuple[int, int]] = []
    with (
        patch.object(p2p, "device_of", lambda axis: torch.device("cpu")),
        patch.object(dist, "send", lambda token, peer, group: used.append((group, peer))),
        patch.object(dist, "recv", lambda token, peer, group: None),
    ):
        for rank in range(size):
            axis = Axis("pp", size, rank, tuple(range(size)), group=rank)
            Channel(axis, axis, loop(size).neighbours)
    lines = Counter(pair for pair in used)
    assert set(lines) == {(a, b) for a in range(size) for b in (a - 1, a + 1) if 0 <= b < size}
    assert set(lines.values()) == {2}, "once for messages down, once for messages up"
    assert max(Counter(rank for rank, _ in used).values()) <= 4


@pytest.mark.parametrize(
    ("stages", "hosts", "wanted"),
    [
        ([(4, 1), (4, 1)], "aaaabbbb", "gathered"),  # Megatron-LM's scatter/gather: 4 copies or 1
        (
            [(1, 1), (4, 1)],
            "abcde",
            "relayed",
        ),  # to four hosts: 4 copies leave one, or 1 and 3/4 go round, or one by one in chunks
        ([(1, 1), (2, 1)], "abb", "gathered"),
        ([(2, 1), (2, 1)], "abcd", "direct"),  # each host sends one copy and receives one
        ([(4, 1), (1, 1)], "aaaab", "direct"),  # there is one copy
        ([(2, 1), (2, 1)], "aaaa", "direct"),
        ([(2, 1), (2, 1)], "aaab", "direct"),  # some need no link
    ],
)
def test_where_copies_travel_in_parts(stages: list[tuple[int, int]], hosts: str, wanted: str) -> None:
    mesh = ParallelMesh.build(rank=0, size=len(hosts), stages=stages)
    mesh.hosts = list(hosts)
    assert mesh.way_between(0, 1) == wanted
