"""Any layout equals one process: named corners, then random configurations. A failure prints the command to replay."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from equivalence.layouts import OPTIMIZERS, RAMPS, TINY, Layout, assert_close, compare, draw, train, train_body
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.nn.block import Block
from megalite.testing import run_ranks
from megalite.testing.oracle import reference
from megalite.train.run import open_run

CORNERS = {
    "one process": ((), 1),
    "dp2": ((), 2),
    "tp2": (("--tensor-model-parallel-size", "2"), 2),
    "tp2 sequence parallel": (("--tensor-model-parallel-size", "2", "--sequence-parallel"), 2),
    "pp2": (("--pipeline-model-parallel-size", "2"), 2),
    "tp2 dp2 zero1": (("--tensor-model-parallel-size", "2", "--zero-stage", "1"), 4),
    "pp2 dp2 zero3": (("--pipeline-model-parallel-size", "2", "--zero-stage", "3"), 4),
}


IN_TURN = dict(zip(CORNERS, itertools.cycle(("gpt", "llama")), strict=False))
"""Corner -> the family that is tried by default."""


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if IN_TURN[name] == family else pytest.mark.landing)
        for name in CORNERS
        for family in ("gpt", "llama")
    ],
)
def test_corner(name: str, family: str) -> None:
    flags, world_size = CORNERS[name]
    compare(Layout(("--num-layers", "4", "--model-type", family), ("--micro-batch-size", "1", *flags), world_size))


def test_norms_across_heads_are_the_same_where_ranks_share_the_heads() -> None:
    norms = ("--qk-layernorm", "--qk-layernorm-across-heads")
    model = ("--num-layers", "4", "--model-type", "llama", "--num-query-groups", "2", *norms)
    flags, world_size = CORNERS["tp2 sequence parallel"]
    compare(Layout(model, ("--micro-batch-size", "1", "--zero-stage", "1", *flags), world_size))


def test_dropout_is_the_same_at_every_layout(landing: bool) -> None:
    model = ("--num-layers", "4", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    for name in ["tp2 sequence parallel", *(["pp2", "dp2"] if landing else [])]:
        flags, world_size = CORNERS[name]
        compare(Layout(model, ("--micro-batch-size", "1", *flags), world_size))


AGAIN = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers")


def block_forwards_body(world: World, argv: list[str]) -> int:
    """How often this rank computes a block in one step."""
    calls, forward = 0, Block.forward

    def counted(*args):
        nonlocal calls
        calls += 1
        return forward(*args)

    Block.forward = counted
    try:
        with open_run(parse(argv, world_size=world.size), world) as run:
            run.trainer.train_step(drain=True)
    finally:
        Block.forward = forward
    return calls


@pytest.mark.landing
def test_every_stage_recomputes_its_own_number_of_layers() -> None:
    model, pp2 = ("--num-layers", "5", "--hidden-dropout", "0.1"), CORNERS["pp2"][0]
    layout = ("--micro-batch-size", "1", *pp2, "--decoder-first-pipeline-num-layers", "2", *AGAIN, "1", "3")
    compare(Layout(model, layout, 2))
    # eight micro-batches: two blocks of which one runs twice, three that all run twice
    assert run_ranks(block_forwards_body, 2, [*TINY, *model, *layout]) == [8 * 3, 8 * 6]
    # by the program: all of the first stage's, none of the last one's
    layout = (*layout[: layout.index(AGAIN[0])], "--pipeline-schedule", "shifted-critical-path")
    assert run_ranks(block_forwards_body, 2, [*TINY, *model, *layout]) == [8 * 4, 8 * 3]


@pytest.mark.in_turn
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_random_layouts(optimizer: str, full: bool, fresh: int) -> None:
    for seed, count in ((1, 20 if full else 0), (fresh, 20 if full else 1)):
        rng = random.Random(f"{optimizer} {seed}")
        for number in range(count):
            try:
                compare(draw(rng, optimizer, lambda case: full or case.world_size <= 4))
            except BaseException:
                print(f"seed {seed}, configuration {number}")
                raise


@pytest.mark.parametrize("schedule", ["2bw", pytest.param("pipedream", marks=pytest.mark.landing)])
def test_asynchronous_layouts_with_any_optimizer(schedule: str, full: bool, landing: bool, fresh: int) -> None:
    rng = random.Random(f"{schedule} {fresh}")
    for optimizer in OPTIMIZERS if full else rng.sample(list(OPTIMIZERS), 2)[: 2 if landing else 1]:
        compare(draw(rng, optimizer, lambda case: schedule in case.layout and case.world_size <= 4))


REMAINDERS = ("adam", "adam in 16 bits", "sgd")
"""Rules whose arithmetic the oracle does in the product's order."""


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_masters_in_remainders_are_exact(schedule: str, full: bool, fresh: int) -> None:
    """Weights in bf16, masters in fp32, bit for bit as long as sums have one order: ties, of which 2^-16 of the numbers
    are, go away from zero, as is documented."""
    rng = random.Random(f"{schedule} {fresh}")
    for optimizer in REMAINDERS if full else rng.sample(REMAINDERS, 1):
        model = ["--bf16", "--num-layers", "4", "--untie-embeddings-and-output-weights", "--clip-grad", "0"]
        model += [*OPTIMIZERS[optimizer].split(), "--optimizer-state", "param_remainders", "--micro-batch-size", "1"]
        argv = [*(flag for flag in TINY if flag != "--fp64"), *model, *RAMPS[0].split()]
        layout = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
        expected, found = reference(tuple(argv), 5), train([*argv, *layout], 2, 5)
        assert_close(found.losses, expected.losses, 1e-6, "loss")  # which is added up in fp32
        for name, value in expected.tensors.items():
            assert torch.equal(found.tensors[name], value), f"{optimizer}: {name}"


def deep(case: Layout) -> bool:
    """2BW over several stages."""
    return case.delay > 0 and "--pipeline-model-parallel-size 1" not in case.command


def fit(case: Layout) -> bool:
    """Comparable in few digits: SOAP makes 1e4 times as much of a rounding as AdamW, nothing to compare; a token
    takes another expert for a rounding."""
    return not case.stages and "soap" not in case.model and "--num-experts" not in case.model


FORMATS = {
    "fp32": ((), 1e-5),
    "bf16": (("--bf16",), 2e-2),
    "fp16": (("--fp16", "--loss-scaling", "initial=4194304", "hysteresis=1"), 4e-3),
}
"""Flags, and how far two runs may be apart that round at other places: a few units of the last digit of 24, 8, 11. The
scale is one with which the first updates are skipped."""


@pytest.mark.parametrize(
    "name", ["fp16", *(pytest.param(name, marks=pytest.mark.landing) for name in ("fp32", "bf16"))]
)
def test_random_layouts_in_other_number_formats(name: str, full: bool, fresh: int) -> None:
    """Against one process in the same format, for it is the layout that is tested here, not the format. (fp32 and bf16
    are compared with the oracle by default, in test_rounding.py.)"""
    flags, tolerance = FORMATS[name]
    base = [*(flag for flag in TINY if flag != "--fp64"), *flags]
    for seed, count in ((2, 12 if full else 0), (fresh, 6 if full else 1)):
        rng = random.Random(f"{name} {seed}")
        for number in range(count):
            # The first is 2BW over a pipeline, where stages see an update early or late.
            case = draw(rng, want=lambda case, first=number == 0: fit(case) and (not first or deep(case)))
            argv = [*base, *case.model]
            alone = ["--micro-batch-size", "1", *(("--pipeline-schedule", "2bw") if case.delay else ())]
            found = run_ranks(train_body, case.world_size, [*argv, *case.layout], 4)
            expected = run_ranks(train_body, 1, [*argv, *alone], 4)
            try:
                assert_close(found[0][0], expected[0][0], tolerance, "loss")
                # Adam's first steps are as large for a rounding as for a gradient: bf16 alone is 2 % off fp32's norm
                assert_close(found[0][1], expected[0][1], 3 * tolerance, "norm")
            except BaseException:
                print(f"seed {seed}, configuration {number}: {case.command}, in {name}")
                raise
