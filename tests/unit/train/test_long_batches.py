"""Of a long batch the validator walks some rounds through the pipeline: what it does not walk is what it has walked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.config import parse
from megalite.schedule import SCHEDULES, Program, find_schedule
from megalite.train import build
from megalite.train.build import ProgramCache

LONG = 136
FLAGS = (
    "--num-layers 16 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-2 "
    "--train-iters 4 --mock-data --vocab-size 64 --clip-grad 0 --untie-embeddings-and-output-weights"
).split()


def program_of(name: str, microbatches: int, p: int = 4) -> Program:
    virtual = ["--virtual-pipeline-model-parallel-size", "2"] if find_schedule(name).min_chunks > 1 else []
    flags = ["--pipeline-model-parallel-size", str(p), "--pipeline-schedule", name, *virtual]
    return ProgramCache(parse([*FLAGS, *flags, "--global-batch-size", str(microbatches)], world_size=p)).full(p)


def steps_of(program: Program, rank: int, size: int, window: range) -> list[tuple[Any, ...]]:
    """What a rank does with the micro-batches of a window of its second batch, numbered from the window's start."""
    batch = program.batch(1, size=size)
    return [
        (part.kind, part.stage, part.microbatch - batch.start - window.start)
        for action in program.order(rank, batch)
        for part in (action.computations() or [action])
        if part.kind in "FBIW" and part.microbatch - batch.start in window
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_long_batch_is_a_short_one_with_more_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Any] = []
    real = build.validate
    monkeypatch.setattr(build, "LONG_BATCH", 128)
    monkeypatch.setattr(build, "validate", lambda program, run: (walked.append(run), real(program, run)))
    long = program_of(name, LONG)
    ((short, *_),) = walked
    assert short < LONG / 4 and (LONG - short) % 16 == 0
    for rank in range(4):
        begin, end = range(8), range(LONG - 8, LONG)
        assert steps_of(long, rank, LONG, begin) == steps_of(long, rank, short, begin)
        assert steps_of(long, rank, LONG, end) == steps_of(long, rank, short, range(short - 8, short))
        middle = [range(at, at + 8) for at in (40, 56, 104)]
        assert len({tuple(steps_of(long, rank, LONG, window)) for window in middle}) == 1


def test_short_batches_and_files_are_walked_whole() -> None:
    program = program_of("1f1b", LONG)
    assert build._proved(program, of_file=False) is None
    assert build._proved(replace(program, num_microbatches=2048), of_file=False) == [16, 16]
    assert build._proved(replace(program, num_microbatches=2048), of_file=True) is None
