"""Preflight: replicas that compute the same agree bit for bit, and a rank with one wrong bit is named."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from equivalence.layouts import TINY
from torch import Tensor

from megalite.comm import World
from megalite.config import parse
from megalite.gradient import GradSink
from megalite.proof.preflight import Preflight
from megalite.testing import run_ranks

FLAGS = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--global-batch-size", "6"]
PP2 = ["--pipeline-model-parallel-size", "2"]


def flipped(x: Tensor, bit: int) -> Tensor:
    """The same numbers, but for a bit of one."""
    x.view(-1).view(torch.int64)[3] ^= 1 << bit
    return x


def wrong_product():
    """A forward product, once. (Its lowest bit may be rounded away behind it.)"""
    from megalite.parallel.tensor.products import Products

    right, calls = Products.forward, iter(range(10**6))

    def forward(*args):
        y, kept = right(*args)
        return flipped(y, 20) if next(calls) == 5 else y, kept

    return patch.object(Products, "forward", forward)


def wrong_weight_gradient(bit: int = 20):
    """A weight gradient, once. (What other micro-batches add may round its lowest bit away.)"""
    right, calls = GradSink.addmm, iter(range(10**6))

    def addmm(self: GradSink, a: Tensor, b: Tensor) -> None:
        right(self, a, b)
        if next(calls) == 3:
            flipped(self.buffer, bit)

    return patch.object(GradSink, "addmm", addmm)


def body(world: World, argv: list[str], fault: str, odd: int) -> int:
    config = parse(argv, world_size=world.size)
    if world.rank != odd:
        return Preflight(2, print)(config, world)
    with globals()[fault]():
        return Preflight(2, print)(config, world)


@pytest.mark.parametrize(
    ("fault", "flags", "ranks", "odd", "account"),
    [
        ("wrong_product", [], 3, 1, r"iteration 1, forward, stage 0, its micro-batch 0: rank 1 \(host \S+\) computed"),
        ("wrong_weight_gradient", [], 3, 2, r"iteration 1, backward, the gradient of \S+: rank 2 \(host \S+\) comp"),
        ("wrong_product", PP2, 4, 2, r"iteration 1, forward, stage 1, its micro-batch .: rank 2 \(.*\), rank 3 \("),
    ],
)
def test_a_flipped_bit_is_found_and_its_rank_named(
    fault: str, flags: list[str], ranks: int, odd: int, account: str
) -> None:
    run_ranks(body, ranks, [*FLAGS, *flags], fault, odd, expect=account)


def test_replicas_agree_and_one_alone_is_refused() -> None:
    for flags, ranks in (
        ([*PP2, "--zero-stage", "1"], 4),
        (["--zero-stage", "3", "--bf16", "--no-fp64"], 2),
        (["--context-parallel-size", "2"], 4),
        (["--num-experts", "4", "--expert-model-parallel-size", "2", "--global-batch-size", "8"], 4),
    ):
        assert run_ranks(body, ranks, [*FLAGS, *flags], "", -1) == [0] * ranks
    run_ranks(body, 2, [*FLAGS, *PP2], "", -1, expect="--preflight: compares replicas, and this layout has one")
