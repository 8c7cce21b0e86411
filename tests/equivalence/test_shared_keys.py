"""Fewer key/value heads than tensor-parallel ranks: ranks that share a head train as one process does."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import Layout, compare, train_body
from megalite.comm import all_gather, autograd
from megalite.comm.world import World

ONE, TWO = "--num-query-groups 1", "--num-query-groups 2"
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
SP = "--sequence-parallel"
CORNERS = {
    "one key": (f"--model-type llama {ONE}", TP2, 2),
    "two keys on four ranks": (TWO, f"{TP4} {SP}", 4),
}
MORE = {
    "one key on four ranks": (f"--model-type llama {ONE}", f"{TP4} {SP} --zero-stage 1", 4),
    "norms of heads and biases": (f"{TWO} --qk-layernorm --add-qkv-bias", f"{TP4} {SP} --zero-stage 2", 4),
    "ring": (f"{ONE} --position-embedding-type rope", f"{TP2} --context-parallel-size 2 --zero-stage 3", 4),
    "gathered keys": (ONE, f"{TP2} {SP} --context-parallel-size 2 --cp-comm-type all_gather", 4),
    "muon": (f"{TWO} --optimizer muon", f"{TP4} --zero-stage 1", 4),
    "soap": (f"--model-type llama {ONE} --optimizer soap", f"{TP2} --zero-stage 1", 2),
    "adafactor": (f"--model-type llama {ONE} --optimizer adafactor", TP2, 2),
    "sinks and dropout": (f"{TWO} --softmax-type learnable --attention-dropout 0.1", TP4, 4),
    "gates": (f"--model-type llama {ONE} --attention-output-gate", f"{TP2} {SP}", 2),
    "split backward": (ONE, f"{TP2} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 4),
    "halves take turns": (ONE, f"{TP2} {SP} --tp-comm-overlap", 2),
    "recomputed": (ONE, f"{TP2} --recompute-granularity full --recompute-method uniform", 2),
    "the oracle is asked, too": (f"{ONE} --recompute-granularity full --recompute-method uniform", TP2, 2),
    "2bw": (
        f"{ONE} --untie-embeddings-and-output-weights",
        f"{TP2} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw",
        4,
    ),
    "stages that differ": (TWO, f"--stage-meshes 4x1,1x2 {SP} --zero-stage 1", 6),
    "one stage shares": (ONE, "--stage-meshes 1x2,2x1", 4),
}


def case_of(model: str, layout: str, world_size: int) -> Layout:
    micro = "2" if "overlap" in layout else "1"
    more = {"delay": 1} if "2bw" in layout else {}
    return Layout(
        ("--num-layers", "4", *model.split()), ("--micro-batch-size", micro, *layout.split()), world_size, **more
    )


@pytest.mark.parametrize("name", CORNERS)
def test_corner(name: str) -> None:
    compare(case_of(*CORNERS[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_more_corners(name: str) -> None:
    compare(case_of(*MORE[name]))


def not_summed(x: torch.Tensor, axis: autograd.Axis) -> torch.Tensor:
    return autograd.own_slice(x, axis).clone()


def summed_twice(x: torch.Tensor, axis: autograd.Axis) -> torch.Tensor:
    return 2 * autograd.reduce_scatter(x.contiguous(), axis)


def neighbours_rows(x: torch.Tensor, axis: autograd.Axis) -> torch.Tensor:
    return all_gather(x, axis).flip(0)


def own_rows_twice(x: torch.Tensor, axis: autograd.Axis) -> torch.Tensor:
    return torch.cat([x] * axis.size)


MUTATIONS = {
    "gradients of the key not summed": ("_scatter_sum", not_summed),
    "gradients counted twice": ("_scatter_sum", summed_twice),
    "rows in another order": ("all_gather", neighbours_rows),
    "nothing gathered": ("all_gather", own_rows_twice),
}


def mutated_body(world: World, argv: list[str], steps: int, name: str) -> tuple:
    attribute, other = MUTATIONS[name]
    with patch.object(autograd, attribute, other):
        return train_body(world, argv, steps)


@pytest.mark.landing
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(name: str) -> None:
    with pytest.raises(AssertionError, match="instead of|differs by"):
        compare(case_of(TWO, TP4, 4), body=mutated_body, more=(name,))
