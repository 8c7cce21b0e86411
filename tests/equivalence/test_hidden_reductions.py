"""Gradients travel while others are computed: in the last half backward of a zero-bubble schedule too, and between the
groups of hybrid sharding; the bits are those of a run that sums at the end."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY, train
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.parallel.tensor.products import Products
from megalite.parallel.zero import bucket
from megalite.testing import run_ranks
from megalite.train.run import open_run

UNTIED = "--num-layers 4 --untie-embeddings-and-output-weights --micro-batch-size 1"
BUBBLE = f"{UNTIED} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"
HYBRID = f"{UNTIED} --num-distributed-optimizer-instances 2"
SMALL = "--ddp-bucket-size 4000"


def record_body(world: World, argv: list[str]) -> list[str]:
    """What this rank starts in one step, in order: `product` for a weight gradient, `scatter`, `copies`."""
    started: list[str] = []

    def noting(what: str, right):
        def call(*args, **more):
            started.append(what)
            return right(*args, **more)

        return call

    with ExitStack() as stack:
        scatter = noting("scatter", bucket.reduce_scatter_into)
        stack.enter_context(patch.object(bucket, "reduce_scatter_into", scatter))
        stack.enter_context(patch.object(bucket, "all_reduce_", noting("copies", bucket.all_reduce_)))
        product = noting("product", Products.add_weight_gradient)
        stack.enter_context(patch.object(Products, "add_weight_gradient", product))
        with open_run(parse(argv, world_size=world.size), world) as run:
            run.trainer.train_step(drain=True)
    return started


def hidden(flags: str, what: str) -> list[tuple[int, int]]:
    """Of each rank: how many of these were started in a step, and how many of them before its last product."""
    found = []
    for started in run_ranks(record_body, 4, [*TINY, *flags.split()]):
        last = len(started) - started[::-1].index("product")
        found.append((started.count(what), started[:last].count(what)))
    return found


def test_reductions_of_a_split_backward_are_behind_its_products() -> None:
    found = hidden(f"{BUBBLE} --zero-stage 1 {SMALL}", "scatter")
    # the last bucket is complete with its last product, and on the first stage with the gradient of the embedding
    assert {(all_, all_ - early) for all_, early in found} <= {(n, rest) for n in range(5, 20) for rest in (1, 2)}, (
        found
    )


@pytest.mark.parametrize(("zero", "rest"), [("1", 4), pytest.param("2", 3, marks=pytest.mark.landing)])
def test_sums_between_groups_are_behind_products(zero: str, rest: int) -> None:
    # On a CPU two reductions are in flight before the sum over copies of the first is started.
    for all_, early in hidden(f"{HYBRID} --zero-stage {zero} {SMALL}", "copies"):
        assert all_ >= 6 and all_ - early <= rest, (all_, early)


@pytest.mark.parametrize(
    "flags", [f"{HYBRID} --zero-stage 1", pytest.param(f"{BUBBLE} --zero-stage 1", marks=pytest.mark.landing)]
)
def test_bits_are_those_of_sums_at_the_end(flags: str) -> None:
    base = [*TINY, *flags.split(), *SMALL.split()]
    hidden_sums, late_sums = (train([*base, *more], 4, 2) for more in ((), ("--no-overlap-grad-reduce",)))
    assert hidden_sums.losses == late_sums.losses
    unlike = [name for name, x in hidden_sums.tensors.items() if not torch.equal(x, late_sums.tensors[name])]
    assert hidden_sums.tensors and not unlike, unlike


@pytest.mark.full
@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_sums_between_groups_on_the_host_are_the_same(zero: str) -> None:
    base = [*TINY, *f"{HYBRID} --zero-stage {zero}".split()]
    device, host = (train([*base, *more], 4, 2) for more in ((), ("--offload", "params")))
    assert host.losses == pytest.approx(device.losses, rel=1e-12)
    for name, x in device.tensors.items():
        torch.testing.assert_close(host.tensors[name], x, rtol=1e-9, atol=1e-11)
