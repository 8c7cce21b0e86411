"""Stages that differ (`--stage-meshes`) train as one process does: named corners, checkpoints from and to other
layouts, and mutations that must be seen."""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from equivalence.layouts import OPTIMIZERS, TINY, Layout, assert_close, compare, draw, saved_tensors, train, train_body
from megalite.comm import Done, mesh_channel
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.inventory.transfer_plan import tiles
from megalite.parallel.pipeline.shared_rows import SharedRows
from megalite.parallel.zero.sharded_optimizer import ShardedOptimizer
from megalite.rehearsal import rehearse_run, rehearsed
from megalite.testing import run_ranks
from megalite.testing.oracle import reference
from megalite.train.batch_reader import BatchReader
from megalite.train.run import open_run

UNTIED = "--untie-embeddings-and-output-weights"
ASYNCHRONOUS = f"{UNTIED} --clip-grad 0"
SP = "--sequence-parallel --check-pipeline-messages"
CORNERS = {
    "replicas first": ("", "1x2,1x1", "", {}),
    "sequence parallel and not": ("", "2x1,1x2", f"{SP} --zero-stage 1", {}),
    "partitions beside one shard": ("", "1x1,1x2", "--zero-stage 3 --zero-plus-plus partition=2", {}),
    "2bw": (UNTIED, "1x1,1x2", "--pipeline-schedule 2bw", {"delay": 1}),
    "pipedream": (
        ASYNCHRONOUS,
        "1x2,1x1",
        "--pipeline-schedule pipedream",
        {"stages": 2, "together": 2, "lags": (1, 0)},
    ),
}
"""(Model, meshes, layout, what its oracle has to know)."""
MORE = {
    "tp first": (UNTIED, "2x1,1x1", "", {}),
    "tp last": ("", "1x1,2x1", "--zero-stage 2", {}),
    "three stages": ("", "1x2,1x1,1x1", "--zero-stage 3", {}),
    "partitions of three stages": ("", "1x2,1x1,1x1", "--zero-stage 3 --zero-plus-plus partition=2", {}),
    "replicas in the middle": ("", "1x1,1x2,1x1", "--pipeline-schedule zb-h1", {}),
    "4 x 1 and 1 x 2": ("", "4x1,1x2", f"--pipeline-schedule gpipe {SP}", {}),
    "both in one stage": ("", "2x2,1x2", f"--pipeline-schedule eager-1f1b --zero-stage 1 {SP}", {}),
    "padding only on the last ranks": ("", "4x1,2x1", "--make-vocab-size-divisible-by 128", {}),
    "tokens counted over all": ("--calculate-per-token-loss --eod-mask-loss", "1x1,1x2", "", {}),
    "2bw of three": ("", "1x2,1x1,1x1", "--pipeline-schedule 2bw --zero-stage 1", {"delay": 1}),
    "2bw with flushes first": ("", "2x1,1x2", "--pipeline-schedule 2bw", {"delay": 1}),
    "delayed update": ("", "1x2,1x1", "--delayed-parameter-update", {"delay": 1}),
    "pipedream of three": (
        ASYNCHRONOUS,
        "1x2,1x1,1x1",
        "--pipeline-schedule pipedream",
        {"stages": 3, "together": 2, "lags": (1, 1, 0)},
    ),
    "pipedream with tensor parallelism": (
        ASYNCHRONOUS,
        "2x1,1x2",
        f"--pipeline-schedule pipedream {SP}",
        {"stages": 2, "together": 2, "lags": (1, 0)},
    ),
    "pipedream in vertical sync": (
        ASYNCHRONOUS,
        "1x2,1x1",
        "--pipeline-schedule pipedream --pipedream-vertical-sync",
        {"stages": 2, "together": 2, "lags": (1, 1)},
    ),
    "llama": ("--model-type llama --num-query-groups 2", "2x1,1x1", f"{SP} --zero-stage 1", {}),
    "dropout": ("--hidden-dropout 0.1 --attention-dropout 0.1", "2x1,1x2", SP, {}),
    "muon": ("--optimizer muon", "1x2,2x1", "--zero-stage 2", {}),
    "masters on the host": ("", "1x2,1x1", "--offload optimizer --zero-stage 1", {}),
}
"""Lags by hand: NOAM of (2, 1) is ceil(3 / 2) and 1, one update of two micro-batches ahead and none; of (2, 1, 1) it is
2, 2 and 1: 2 micro-batches, 1 and 0, in whole updates 1, 1 and 0."""


def case_of(model: str, meshes: str, layout: str, oracle: dict) -> Layout:
    world = sum(int(tp) * int(dp) for tp, dp in (mesh.split("x") for mesh in meshes.split(",")))
    flags = f"--micro-batch-size 1 --stage-meshes {meshes} {layout}"
    return Layout(("--num-layers", "4", *model.split()), tuple(flags.split()), world, **oracle)


@pytest.mark.parametrize("name", CORNERS)
def test_corner(name: str) -> None:
    compare(case_of(*CORNERS[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_more_corners(name: str) -> None:
    compare(case_of(*MORE[name]))


def products_are_added_last() -> bool:
    """Whether A B + C is rounded as A B first, as by MKL on Intel's CPUs; on AMD's its sums begin with C."""
    draws = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, 32, 32, dtype=torch.float64, generator=draws)
    return torch.equal(a @ b + c, torch.addmm(c, a, b))


@pytest.mark.parametrize("meshes", ["1x2,1x1", pytest.param("1x1,1x2", marks=pytest.mark.full)])
def test_2bw_is_bitwise_the_delayed_reference(meshes: str) -> None:
    """With two micro-batches a batch every sum is one of two terms, in whatever order: not one bit differs, where one
    rank adds its two gradients as two ranks do."""
    model = f"{UNTIED} --clip-grad 0 --global-batch-size 2"
    case = case_of(model, meshes, "--pipeline-schedule 2bw --zero-stage 1", {"delay": 1})
    assert compare(case, steps=4) == 0 or not products_are_added_last()


def test_the_oracle_does_not_know_how_many_threads_there_are() -> None:
    """The backward of a normalisation adds up the gradients of its weight thread by thread; a rank has one thread."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(reference.__wrapped__((*TINY, "--num-layers", "1", "--micro-batch-size", "1"), 2).tensors)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


SPELLED = {"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2": "--stage-meshes 2x1,2x1"}
"""A layout -> the same by the meshes of its stages."""


def messages_of(layout: str, rank: int) -> list[tuple[Any, ...]]:
    """All that a rank exchanges in a short run on four ranks, call by call, with the lines that do."""
    model = (*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--train-iters", "9", "--bf16")
    argv = [word for word in model if word not in ("--fp64",)]
    report = rehearse_run(rehearsed([*argv, *layout.split()], 4, steps=1), [rank])
    assert report.records[rank].problem is None, report.records[rank].problem
    return [
        (call.kind, call.nbytes, call.dtype, call.op, call.communicator.ranks, call.peer, call.action, call.place)
        for call in report.records[rank].calls
    ]


def test_stages_that_are_alike_exchange_what_they_always_did() -> None:
    """Spelled by their meshes the same messages from the same lines, and as many between stages as micro-batches. (That
    a step enters none of the code of stages that differ: tests/unit/train/test_files_of_a_step.py.)"""
    for plain, meshes in SPELLED.items():
        calls = messages_of(plain, 3)
        assert messages_of(meshes, 3) == calls
        of_step = [kind for kind, *_, action, _ in calls if action]
        assert of_step.count("send") == of_step.count("recv") == 8


@pytest.mark.landing
def test_stages_that_are_alike_train_to_the_same_bits() -> None:
    for plain, meshes in SPELLED.items():
        model = [*TINY, "--num-layers", "4", "--micro-batch-size", "1"]
        first, second = (train([*model, *layout.split()], 4, 3) for layout in (plain, meshes))
        assert (first.losses, first.norms) == (second.losses, second.norms)
        assert all(torch.equal(second.tensors[name], value) for name, value in first.tensors.items())


def test_vertical_sync_is_another_training_on_uniform_stages(full: bool) -> None:
    flags = "--micro-batch-size 1 --pipeline-model-parallel-size 3 --pipeline-schedule pipedream".split()
    model = ("--num-layers", "4", *ASYNCHRONOUS.split())
    compare(Layout(model, (*flags, "--pipedream-vertical-sync"), 3, stages=3, lags=(2, 2, 2)))
    if full:
        with pytest.raises(AssertionError, match="instead of"):
            compare(Layout(model, (*flags, "--pipedream-vertical-sync"), 3, stages=3))


def two_hosts_body(
    world: World, argv: list[str], steps: int, counted: str | None = None, size: int | None = None
) -> tuple:
    """`size` ranks a host, half of all if not given; with `counted` the elements that go from one host to another,
    point to point, are written there."""
    size = size or world.size // 2
    sent, real = 0, dist.isend
    there = replace(world, local_size=size, host=f"host {world.rank // size}")

    def isend(x: torch.Tensor, rank: int, **how) -> Any:
        nonlocal sent
        sent += x.numel() * (rank // size != world.rank // size)
        return real(x, rank, **how)

    with patch.object(dist, "isend", isend):
        found = train_body(there, argv, steps)
    if counted is not None:
        Path(counted, str(world.rank)).write_text(str(sent))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_copies_cross_the_link_between_hosts_once(size: int, tmp_path: Path) -> None:
    """tp -> tp without sequence parallelism on two hosts: 1 x the tensor in each direction, not tp x."""
    flags = f"--micro-batch-size 1 --tensor-model-parallel-size {size} --pipeline-model-parallel-size 2"
    case = Layout(("--num-layers", "4", UNTIED, "--clip-grad", "0"), tuple(flags.split()), 2 * size)
    compare(case, body=two_hosts_body, more=(str(tmp_path),))
    boundary = 16 * 1 * 32
    microbatches = 8 * 3
    assert sum(int(path.read_text()) for path in tmp_path.iterdir()) == 2 * microbatches * boundary


@pytest.mark.parametrize("copies", [2, pytest.param(4, marks=pytest.mark.full)])
def test_copies_for_many_hosts_go_from_one_to_the_next(copies: int, tmp_path: Path) -> None:
    """One rank to several on hosts of their own, and back: no link carries more than 1 x the tensor in a direction."""
    case = case_of(ASYNCHRONOUS, f"1x1,{copies}x1", "--check-pipeline-messages", {})
    compare(case, body=two_hosts_body, more=(str(tmp_path), 1))
    sent = [int((tmp_path / str(rank)).read_text()) for rank in range(1 + copies)]
    messages, header = 8 * 3, 8
    whole, chunks = messages * (16 * 32 + header), messages * (16 * 32 + 16 * header)
    assert sent == [chunks, chunks + whole, *[chunks] * (copies - 2), 0]  # one of them sends the gradient back


@pytest.mark.full
def test_unlike_stages_on_two_hosts() -> None:
    for meshes in ("2x1,1x2", "2x1,2x1"):
        case = case_of("", meshes, "--zero-stage 1", {})
        compare(case, body=two_hosts_body)


def test_a_third_of_the_random_layouts_have_stages_that_differ() -> None:
    rng = random.Random(3)
    drawn = [draw(rng, rng.choice(list(OPTIMIZERS))).layout for _ in range(24)]
    assert sum("--stage-meshes" in layout for layout in drawn) >= 8


LEGS = {
    "--stage-meshes 1x2,2x1 --zero-stage 1": 4,
    "--pipeline-model-parallel-size 2 --zero-stage 3": 2,
    "--stage-meshes 2x1,1x1": 3,
}
"""Layout -> ranks."""


def leg_body(world: World, argv: list[str], steps: int) -> tuple[list[float], dict]:
    """Some iterations, an evaluation and a save."""
    with open_run(parse(argv, world_size=world.size), world) as run:
        losses = [float(run.trainer.train_step(drain=step == steps - 1).lm_loss) for step in range(steps)]
        run.trainer.progress.iteration = run.trainer.iteration
        (record,) = run.trainer.evaluate(run.trainer.iteration, False)
        run.state.save(run.trainer.progress)
    return losses, record


@pytest.mark.landing
def test_a_run_goes_on_at_other_stage_meshes_and_at_none() -> None:
    """One training over three layouts, evaluated at each, is that of one process."""
    model = ["--num-layers", "4", "--micro-batch-size", "1", "--eval-iters", "2"]
    base = list(TINY)
    base[base.index("--eval-iters") + 1] = "2"
    with tempfile.TemporaryDirectory() as folder:
        losses, before = [], []
        for number, (leg, world) in enumerate(LEGS.items()):
            argv = [*base, *model, *leg.split(), "--save", f"{folder}/{number}", *before]
            found = run_ranks(leg_body, world, argv, 2)
            assert all(one == found[0] for one in found)
            losses += found[0][0]
            alone = run_ranks(score_body, 1, [*base, *model, "--load", f"{folder}/{number}"])[0]
            assert abs(found[0][1]["lm_loss"] - alone["lm_loss"]) < 1e-12
            assert found[0][1]["num_tokens"] == alone["num_tokens"]
            before = ["--load", f"{folder}/{number}"]
        expected = reference((*TINY, "--micro-batch-size", "1", "--num-layers", "4"), 6)
        assert_close(losses, expected.losses, 1e-12, "loss")
        for name, value in saved_tensors(f"{folder}/2").items():
            assert float((value - expected.tensors[name]).abs().max()) < 1e-11, name


def score_body(world: World, argv: list[str]) -> dict:
    with open_run(parse(argv, world_size=world.size), world) as run:
        (record,) = run.trainer.evaluate(run.trainer.iteration, False)
        return record


def reversed_tiles(shape, parts, *, split):
    return tiles(shape, parts, split=split)[::-1]


def twice_on_rank_3(self: BatchReader, tokens: torch.Tensor, scale: float) -> list[torch.Tensor]:
    return [factor * 2 if self.odd else factor for factor in FACTORS(self, tokens, scale)]


def neighbours_turn(self: BatchReader, microbatch: int) -> tuple:
    return GET(self, microbatch ^ 1 if self.odd else microbatch)


def first_again(self: mesh_channel.IncomingParts) -> torch.Tensor:
    arrived = WAIT(self)
    return STALE.setdefault(arrived.shape, arrived)


FACTORS, GET, WAIT = BatchReader._factors, BatchReader.get, mesh_channel.IncomingParts.wait
STALE: dict = {}
MUTATIONS = {
    "a wrong tile": (sys.modules["megalite.inventory.transfer_plan"], "tiles", reversed_tiles),
    "a factor of one replica": (BatchReader, "_factors", twice_on_rank_3),
    "a lost tie": (SharedRows, "__call__", lambda self, copies: Done()),
    "the norm of a stage counted twice": (ShardedOptimizer, "_counts", lambda self, master: True),
    "a turn of another's": (BatchReader, "get", neighbours_turn),
    "a receive buffer of before": (mesh_channel.IncomingParts, "wait", first_again),
}


def mutated_body(world: World, argv: list[str], steps: int, name: str) -> tuple:
    target, attribute, other = MUTATIONS[name]
    with ExitStack() as changed:
        changed.enter_context(patch.object(BatchReader, "odd", world.rank == world.size - 1, create=True))
        changed.enter_context(patch.object(target, attribute, other))
        return train_body(world, argv, steps)


@pytest.mark.landing
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(name: str) -> None:
    with pytest.raises(AssertionError, match="instead of|differs by|disagree"):
        compare(case_of("", "2x1,1x2", f"--zero-stage 1 {SP}", {}), body=mutated_body, more=(name,))


@pytest.mark.landing
@pytest.mark.parametrize("name", ["a factor of one replica", "a turn of another's", "a receive buffer of before"])
def test_a_mutation_of_2bw_is_seen_in_its_bits(name: str) -> None:
    case = case_of(f"{UNTIED} --clip-grad 0 --global-batch-size 2", "1x2,1x1", "--pipeline-schedule 2bw", {"delay": 1})
    argv, expected = [*TINY, *case.model, *case.layout], case.expected(4)
    found = train(argv, case.world_size, 4, body=mutated_body, more=(name,))
    assert any(not torch.equal(found.tensors[key], value) for key, value in expected.tensors.items())
