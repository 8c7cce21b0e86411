"""Programs compute what their papers say: exact arithmetic against sequential loops that know no pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from schedule_shapes import build_shape, random_shapes
from toy_machine import Machine, sequential, sequential_pipedream

from megalite.schedule import BatchRange, Program, build_program, lower, validate


def reference(program: Program, batches: Sequence[BatchRange]) -> list[int]:
    if program.name == "pipedream":
        return sequential_pipedream(program.num_stages, batches[-1].end)
    return sequential(program.num_stages, batches, delay=1 if program.name == "2bw" else 0)


def test_every_schedule_equals_its_sequential_reference() -> None:
    for name, shape in random_shapes(72, seed=2, largest_rank=4):
        program = lower(build_shape(name, shape))
        batches = program.batches(4)
        assert Machine(program).run(batches) == reference(program, batches), (name, shape)


def test_2bw_differs_from_the_synchronous_run() -> None:
    program = lower(build_program("2bw", 3, 4))
    batches = program.batches(4)
    assert Machine(program).run(batches) != sequential(3, batches, delay=0)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "2bw", "pipedream", "zb-v", "eager-1f1b"])
def test_batch_size_ramp_up(name: str) -> None:
    rng = random.Random(3)
    for _ in range(8):
        p = rng.randint(1, 4)
        sizes = [rng.randint(max(p - 1, 1), 3 * p) for _ in range(6)]
        program = lower(build_program(name, p, sizes[-1]))
        batches = program.batches(sizes)
        assert Machine(program).run(batches) == reference(program, batches), (name, p, sizes)
        validate(program, sizes)


def with_drains(program: Program, sizes: Sequence[int], drains: set[int]) -> list[BatchRange]:
    """A run that stops after the batches in `drains` and continues, as after a checkpoint and a resume."""
    return [
        batch._replace(
            next_size=0 if batch.iteration in drains else batch.next_size,
            first=batch.first or batch.iteration - 1 in drains,
        )
        for batch in program.batches(sizes)
    ]


@pytest.mark.parametrize("name", ["2bw", "pipedream"])
def test_stop_and_resume_anywhere_is_the_uninterrupted_run(name: str) -> None:
    rng = random.Random(4)
    for _ in range(25):
        p, count = rng.randint(1, 5), rng.randint(2, 7)
        sizes = [rng.randint(max(p - 1, 1), 3 * p) for _ in range(count)]
        drains = {t for t in range(count) if rng.random() < 0.4}
        program = lower(build_program(name, p, max(sizes)))
        run = with_drains(program, sizes, drains)
        assert Machine(program).run(run) == reference(program, program.batches(sizes)), (name, p, sizes, drains)
        validate(program, run)


def test_stopping_is_decided_one_batch_ahead() -> None:
    """Iterations before the last are the same whether or not the run ends later; only `last` differs."""
    program = lower(build_program("2bw", 3, 4))
    for rank in range(3):
        going_on = [program.actions_for_batch(rank, batch) for batch in program.batches(5)]
        stopping = [program.actions_for_batch(rank, batch) for batch in program.batches(3)]
        assert going_on[:2] == stopping[:2]
        assert going_on[2] != stopping[2]


def test_an_iteration_touches_only_its_own_and_the_next_batch() -> None:
    for name, p, m in (("2bw", 4, 3), ("2bw", 4, 9), ("pipedream", 4, 3), ("2bw", 1, 2)):
        program = lower(build_program(name, p, m))
        for batch in program.batches(5):
            for rank in range(p):
                for action in program.actions_for_batch(rank, batch):
                    if action.kind not in ("STEP", "NORM", "REDUCE"):
                        assert batch.start <= action.microbatch < batch.following.end


def test_each_iteration_ends_with_its_step() -> None:
    """After iteration t the newest weights are those of update t on every rank: what evaluation and checkpoints see."""
    for name, shape in random_shapes(36, seed=5):
        program = lower(build_shape(name, shape))
        for batch in program.batches(3):
            last = batch.end - 1 if program.update_per_microbatch else batch.iteration
            for rank in range(program.num_ranks):
                steps = [a for a in program.actions_for_batch(rank, batch) if a.kind == "STEP"]
                held = program.placement.stages_of(rank)
                assert {(a.stage, a.replica) for a in steps if a.microbatch == last} == set(held)
                assert program.actions_for_batch(rank, batch)[-1].kind == "STEP"


def test_2bw_version_rule() -> None:
    """The paper's rule, counted from 0: micro-batch k uses version max(floor(k/m) - 1, 0) on every stage."""
    for p, m in ((2, 1), (4, 4), (3, 7)):
        for actions in build_program("2bw", p, m).unroll(6):
            for action in actions:
                if action.is_compute:
                    assert action.version == max(action.microbatch // m - 1, 0)


def test_neighbours_are_who_the_messages_go_between() -> None:
    for name, shape in random_shapes(48, seed=5, largest_rank=5):
        program = lower(build_shape(name, shape))
        lists = program.unroll(program.batches(3))
        pairs = {
            (min(rank, part.peer), max(rank, part.peer))
            for rank, actions in enumerate(lists)
            for action in actions
            for part in (action.parts or (action,))
            if part.kind.startswith(("SEND", "RECV"))
        }
        assert pairs == program.placement.neighbours, (name, shape)
