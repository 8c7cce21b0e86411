"""What a rehearsed rank starts is what a real one starts: the same calls in the same order, over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.comm import World
from megalite.config import parse
from megalite.rehearsal import DEVICE, rehearse_rank, rehearsed, watched_gpu
from megalite.rehearsal.record import Call
from megalite.testing import run_ranks
from megalite.train import open_run

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 8 --bf16 --lr 1e-2 "
    "--micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 1 --train-iters 2 "
    "--num-workers 0"
).split()
STEPS = 2


def told(calls: list[Call], *, rows: bool) -> list[tuple[object, ...]]:
    """Those of the steps. rows: whether it is known how many rows each rank gets."""
    return [
        (call.kind, call.communicator.ranks, call.peer, call.dtype, call.op, call.nbytes, call.sent if rows else ())
        for call in calls
        if call.phase.startswith("iteration")
    ]


def body(world: World, argv: list[str], rows: bool) -> list[tuple[object, ...]]:
    with watched_gpu() as gpu:

        def report(phase: str) -> None:
            gpu.calls.phase = phase

        config = parse(argv, world_size=world.size)
        with open_run(config, replace(world, device=DEVICE, report_phase=report)) as run:
            run.trainer.train()
        return told(gpu.calls, rows=rows)


CUBE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
LAYOUTS = [
    pytest.param("--tensor-model-parallel-size 2", 2),
    pytest.param("--tensor-model-parallel-size 2 --zero-stage 1", 4, marks=pytest.mark.landing),
    *(pytest.param(f"{CUBE} --zero-stage {stage}", 8, marks=pytest.mark.full) for stage in range(4)),
    pytest.param("--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2", 4, marks=pytest.mark.full),
    pytest.param("--context-parallel-size 2 --zero-stage 1", 4, marks=pytest.mark.full),
    pytest.param("--context-parallel-size 2 --cp-comm-type a2a", 4, marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout, ranks", LAYOUTS)
def test_a_record_is_that_of_real_ranks(layout: str, ranks: int) -> None:
    argv, rows = [*SMALL, *layout.split()], "--num-experts" not in layout
    real = run_ranks(body, ranks, argv, rows)
    run = rehearsed(argv, ranks, steps=STEPS)
    for rank in range(ranks):
        assert told(list(rehearse_rank(run, rank).calls), rows=rows) == real[rank]
        assert len(real[rank]) > 10
