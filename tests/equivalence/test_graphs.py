"""Blocks by CUDA graphs give the same bits as without: whole runs on a GPU of bookkeeping, whose graphs compute nothing
while they are captured, are spoiled by each other as far as a pool allows, and refuse what a graph cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY
from megalite.comm import World
from megalite.config import parse
from megalite.nn import graphs
from megalite.rehearsal import DEVICE, watched_gpu
from megalite.testing import RanksFailed, run_ranks
from megalite.train.run import open_run

BRIEF = "--num-layers 2 --global-batch-size 8 --micro-batch-size 1".split()
STEPS = 2


@contextmanager
def other_pools() -> Iterator[None]:
    """All lanes of a rank share a pool."""
    pool = torch.cuda.graph_pool_handle()
    with patch.object(torch.cuda, "graph_pool_handle", lambda: pool):
        yield


def not_copied(name: str) -> Callable[[], Any]:
    """A micro-batch of which something stays as it was at the lane's first."""
    right, seen = graphs.Lane.begin, set[int]()

    def begin(lane: graphs.Lane, x: Tensor, microbatch: Any) -> None:
        first = id(lane) not in seen
        seen.add(id(lane))
        if not first:
            given = x if name == "x" else getattr(microbatch, name)
            given, kept = given.detach(), (lane.x if name == "x" else getattr(lane.microbatch, name))
            old = kept.detach().clone()
            right(lane, x, microbatch)
            kept.detach().copy_(old)
        else:
            right(lane, x, microbatch)

    return lambda: patch.object(graphs.Lane, "begin", begin)


def early() -> Any:
    """A lane is free before what its backward has postponed is computed."""
    right = graphs.Lane.backward

    def backward(lane: graphs.Lane, index: int, dy: Tensor) -> Tensor:
        dx = right(lane, index, dy)
        if index == 0:
            lane._graphs.free.append(lane)
        return dx

    return patch.multiple(graphs.Lane, backward=backward, _leave=lambda lane: None)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "one pool": other_pools,
    "stale input": not_copied("x"),
    "stale positions": not_copied("positions"),
    "stale samples": not_copied("sample_ids"),
    "free too early": early,
}


def body(world: World, argv: list[str], mutation: str | None) -> tuple[list[Any], list[str], int]:
    """(Losses, norms and weights; races, and where a capture waits for the device; launches of the last step)."""
    with watched_gpu() as gpu, MUTATIONS[mutation]() if mutation else nullcontext():
        found: list[Any] = []
        with open_run(parse(argv, world_size=world.size), replace(world, device=DEVICE)) as run:
            for step in range(STEPS):
                before = gpu.ledger.launches
                stats = run.trainer.train_step(drain=step == STEPS - 1)
                launches = gpu.ledger.launches - before
                found.append((float(stats.lm_loss), float(stats.grad_norm)))
            for buffers in run.state.model.families:
                buffers.weights.wait()  # the last step's may be on their way
            modules = [module for stage in run.state.model.stages.values() for module in stage.modules]
            found += [p.detach().cpu().clone() for module in modules for p in module.parameters()]
    waits = [place for kind, *_, place in gpu.ledger.log if kind == "sync" and "nn/graphs.py" in place]
    return found, gpu.races + waits, launches


def same(layout: str, ranks: int, mutation: str | None = None) -> bool:
    """Whether a run with graphs has the bits of one without, with fewer launches."""
    base = [word for word in TINY if word != "--fp64" or not {"--bf16", "--fp16"} & {*layout.split()}]
    argv = [*base, *BRIEF, *layout.split()]
    plain = run_ranks(body, ranks, argv, None)
    graphed = run_ranks(body, ranks, [*argv, "--cuda-graph-impl", "local"], mutation)
    for (expected, _, many), (found, faults, few) in zip(plain, graphed, strict=True):
        assert faults == [] and few < many
        for a, b in zip(expected, found, strict=True):
            if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b):
                return False
    return True


PP = "--pipeline-model-parallel-size 2 --pipeline-schedule"
LLAMA = "--model-type llama --num-query-groups 2 --hidden-dropout 0.1"
FEW = [(f"{LLAMA} --zero-stage 2 --bf16", 2), (f"{PP} zb-h1", 2)]
MORE = [
    ("--zero-stage 0 --hidden-dropout 0.1", 2),
    ("--zero-stage 1 --overlap-param-gather --bf16", 2),
    ("--zero-stage 2 --no-overlap-grad-reduce --qk-layernorm", 2),
    (f"{LLAMA} --recompute-activations --fp16 --initial-loss-scale 1024", 1),
    (f"{PP} 1f1b --zero-stage 1 {LLAMA}", 4),
    (f"{PP} interleaved --virtual-pipeline-model-parallel-size 2 --num-layers 4", 2),
    (f"{PP} zb-v --num-layers 4", 2),
    (f"{PP} dualpipe-v --num-layers 4", 2),
    (f"{PP} gpipe --use-parallel-residual --fp32-residual-connection --bf16", 2),
    (f"{PP} chimera", 2),
    (f"{PP} breadth-first --virtual-pipeline-model-parallel-size 2 --num-layers 4", 2),
]


@pytest.mark.parametrize(("layout", "ranks"), [*FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
def test_graphs_have_the_bits_of_what_they_replace(layout: str, ranks: int) -> None:
    assert same(layout, ranks)


BROKEN = {
    "one pool": (f"{PP} 1f1b", 2),
    "stale input": ("--zero-stage 1", 1),
    "stale positions": ("--model-type llama --reset-position-ids", 1),
    "stale samples": ("--hidden-dropout 0.1", 1),
    "free too early": (f"{PP} zb-h1", 2),
}


@pytest.mark.landing
@pytest.mark.parametrize("name", BROKEN)
def test_a_graph_that_is_wrong_is_seen(name: str) -> None:
    try:
        found = same(*BROKEN[name], name)
    except RanksFailed as error:
        found = "the gradient norm is nan" not in str(error)
    assert not found
