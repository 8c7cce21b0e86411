"""Of a long batch the validator walks some rounds through the pipeline: what it does not walk is what it has walked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.comm import Axis
from megalite.config import parse
from megalite.errors import ScheduleError
from megalite.inventory import MemoryPlan
from megalite.schedule import (
    SCHEDULES,
    Action,
    ActivationRoom,
    BatchRange,
    Program,
    build_program,
    find_schedule,
    render_text,
    schedule_problems,
    simulate,
    validate,
)
from megalite.train import programs
from megalite.train.dry_run import drawn
from megalite.train.programs import ProgramCache

LONG = 136
FLAGS = (
    "--num-layers 16 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-2 "
    "--train-iters 4 --mock-data --vocab-size 64 --clip-grad 0 --untie-embeddings-and-output-weights"
).split()


def cache_of(name: str, microbatches: int, p: int = 4) -> ProgramCache:
    virtual = ["--virtual-pipeline-model-parallel-size", "2"] if find_schedule(name).min_chunks > 1 else []
    flags = ["--pipeline-model-parallel-size", str(p), "--pipeline-schedule", name, *virtual]
    flags += ["--num-layers", str(max(16, 2 * p))]
    return ProgramCache(parse([*FLAGS, *flags, "--global-batch-size", str(microbatches)], world_size=p))


def program_of(name: str, microbatches: int, p: int = 4) -> Program:
    return cache_of(name, microbatches, p).full(p)


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
    real = programs.validate
    monkeypatch.setattr(programs, "LONG_BATCH", 128)
    monkeypatch.setattr(programs, "validate", lambda program, run: (walked.append(run), real(program, run)))
    long = program_of(name, LONG)
    ((short, *_),) = walked
    assert short < LONG / 4 and (LONG - short) % 16 == 0
    for rank in range(4):
        begin, end = range(8), range(LONG - 8, LONG)
        assert steps_of(long, rank, LONG, begin) == steps_of(long, rank, short, begin)
        assert steps_of(long, rank, LONG, end) == steps_of(long, rank, short, range(short - 8, short))
        middle = [range(at, at + 8) for at in (40, 56, 104)]
        assert len({tuple(steps_of(long, rank, LONG, window)) for window in middle}) == 1


def test_short_batches_and_files_are_walked_whole(tmp_path: Path) -> None:
    cache = cache_of("1f1b", LONG)
    program = cache.full(4)
    long = replace(program, num_microbatches=2048)
    assert cache.short_run(program) is None
    assert cache.short_run(long) == [16]
    assert cache.short_run(replace(long, asynchronous=True)) == [16] * 5
    file = tmp_path / "schedule.txt"
    file.write_text("ranks: 1\nstages: 0\nmicrobatches: 1\nrank 0: 0F0 0B0\n")
    flags = ["--pipeline-schedule-file", str(file), "--global-batch-size", "1"]
    assert ProgramCache(parse([*FLAGS, *flags], world_size=1)).short_run(long) is None


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_a_long_batch_is_drawn_by_a_short_one(name: str) -> None:
    cache = cache_of(name, 2050)
    *rows, cut, note = drawn(cache.full(4), *cache.shown(4))
    short = build_program(name, 4, 18)
    text = render_text(simulate(short, batches=2 if short.asynchronous else 1))
    assert rows == [line[:100].rstrip() for line in text.splitlines()]
    assert cut == "cut at 100 columns; tools/show_schedule.py draws all of it"
    assert note == "drawn: 18 of the 2050 micro-batches; the others repeat the middle"
    assert drawn(short, short, None) == [*rows, cut]


def narrowed(name: str, p: int, m: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Program, Program, ProgramCache]:
    """(A program, what is validated for it where more than four ranks are many, their cache)."""
    monkeypatch.setattr(programs, "LONG_BATCH", 16)
    monkeypatch.setattr(programs, "WIDE_PIPELINE", 4)
    cache = cache_of(name, m, p)
    narrow, _ = cache.shown(p)
    return cache._build((cache.full(p).name, False, m)), narrow, cache


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "message-driven"])
@pytest.mark.parametrize("p", [8, *(pytest.param(many, marks=pytest.mark.full) for many in (12, 32))])
def test_a_wide_pipeline_is_a_narrow_one_with_more_ranks(name: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is walked for it has as many rounds, the last one as full; the wide one is walked here and is as valid."""
    sizes = [p - p // 4, 2 * p, 2 * p + p // 2, 4 * p]
    legal = [m for m in sizes if not schedule_problems(name, p, m, 2 if find_schedule(name).min_chunks > 1 else None)]
    assert {2 * p, 4 * p} <= set(legal)
    for m in legal:
        wide, narrow, cache = narrowed(name, p, m, monkeypatch)
        assert (wide.num_ranks, narrow.num_ranks) == (p, 4)
        assert narrow.num_microbatches // 4 == m // p and (narrow.num_microbatches % 4 == 0) == (m % p == 0)
        validate(wide, None if wide.asynchronous else 1)
        cache.prove(p, Axis.single("world"))


def test_what_is_wrong_in_a_wide_pipeline_is_found_in_the_narrow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = programs.lowered_program

    def without_one_backward(*args: Any, **kwargs: Any) -> Program:
        program = real(*args, **kwargs)

        def order(rank: int, batch: BatchRange) -> list[Action]:
            actions = program.order(rank, batch)
            late = [action for action in actions if action.kind == "B"][-1]
            return [action for action in actions if rank != program.num_ranks // 2 or action != late]

        return program.with_order(order)

    monkeypatch.setattr(programs, "lowered_program", without_one_backward)
    with pytest.raises(ScheduleError, match="has no B or I on stage 2"):
        narrowed("1f1b", 8, 16, monkeypatch)


def test_what_depends_on_each_rank_is_walked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow, cache = narrowed("1f1b", 8, 16, monkeypatch)
    key = ("1f1b", False, 16)
    assert narrow is not wide and cache.narrow(key).num_microbatches == 8
    roomy = replace(cache, plan=MemoryPlan(room=ActivationRoom((1.0,) * 8, (1.0,) * 8, (99.0,) * 8)))
    assert roomy.narrow(key) is roomy._build(key)
    driven = cache_of("message-driven", 12, 8)
    assert driven.narrow(("message-driven", False, 12)) is driven.full(8)
    monkeypatch.setattr(programs, "LONG_BATCH", 1 << 20)
    assert cache.narrow(key) is wide  # a short batch of a wide pipeline


def test_a_wide_pipeline_is_drawn_by_a_narrow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow, cache = narrowed("1f1b", 8, 18, monkeypatch)
    *rows, note = drawn(wide, *cache.shown(8))
    assert rows[:4] == [line[:100].rstrip() for line in render_text(simulate(build_program("1f1b", 4, 9))).splitlines()]
    assert note == "drawn: 4 ranks and 9 micro-batches; the 8 ranks and 18 micro-batches of the run repeat the middle"


RAMP = "--pipeline-model-parallel-size 4 --global-batch-size 32 --rampup-batch-size 8 4 100".split()


def proved_by(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch, *flags: str, told: Any = None) -> Any:
    """(What a rank validates at the start, the batches in micro-batches; its cache)."""
    walked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(programs, "validate", lambda program, run: walked.append(program.num_microbatches))
        patch.setattr(programs, "all_gather_json", lambda mine, axis: told(mine) if told else [mine])
        cache = ProgramCache(parse([*FLAGS, *RAMP, *flags], world_size=4))
        cache.prove(4, Axis("world", ranks, rank, tuple(range(ranks)), group=None))
        for micro_batches in (8, 12, 32):
            cache.program(micro_batches, 1)
        return walked


def test_every_program_of_a_ramp_is_proved_on_one_rank_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [proved_by(rank, 3, monkeypatch) for rank in range(3)]
    assert sorted(size for share in shares for size in share) == list(range(8, 33, 4))
    assert max(map(len, shares)) == 3 and 32 in shares[0]


def test_what_one_rank_finds_all_ranks_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="a circle"):
        proved_by(1, 2, monkeypatch, told=lambda mine: [["a circle", ""], mine])
    with pytest.raises(ScheduleError, match="rank 1 reads another file"):
        proved_by(1, 2, monkeypatch, told=lambda mine: [[None, "a digest"], mine])
