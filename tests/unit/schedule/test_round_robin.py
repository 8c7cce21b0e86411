"""Stages whose ranks take micro-batches in turn: the same lists as a list scheduler makes, proved like any others."""

from __future__ import annotations

import random
from itertools import product
from math import lcm

import pytest
from schedule_shapes import uneven

from megalite.errors import ScheduleError
from megalite.schedule import build_program, forward_program, lower, schedule_problems, simulate, validate
from megalite.schedule.stage_placement import loop, round_robin

NAMES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "2bw", "pipedream")
SHAPES = [
    workers
    for p in (2, 3, 4)
    for workers in product((1, 2, 3, 4), repeat=p)
    if sum(workers) <= 6 and lcm(*workers) <= 12 and len(set(workers)) > 1
]


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_is_proved_and_its_lists_are_renumbered(name: str, full: bool) -> None:
    rng, proved = random.Random(name), 0
    for workers in SHAPES if full else rng.sample(SHAPES, 8):
        m = lcm(*workers) * rng.choice([2, 3])
        sync = name == "pipedream" and rng.random() < 0.5
        if schedule_problems(name, len(workers), m, workers=workers, vertical_sync=sync):
            continue
        program = lower(build_program(name, len(workers), m, workers=workers, vertical_sync=sync))
        validate(program)
        for iteration, rank in product((0, 2), range(program.num_ranks)):
            batch = program.batch(iteration)
            assert program.actions_for_batch(rank, batch) == program.order(rank, batch)
        proved += 1
    assert proved >= 4


def test_who_runs_what() -> None:
    placement = round_robin((2, 3))
    assert (placement.num_ranks, placement.num_stages, placement.round) == (5, 2, 6)
    assert [placement.rank_of(0, microbatch=k) for k in range(4)] == [0, 1, 0, 1]
    assert [placement.rank_of(1, microbatch=k) for k in range(4)] == [2, 3, 4, 2]
    assert placement.neighbours == {(a, b) for a in (0, 1) for b in (2, 3, 4)}  # 6 micro-batches meet all pairs
    assert round_robin((2, 4)).neighbours == {(0, 2), (0, 4), (1, 3), (1, 5)}
    assert [placement.stages_of(rank)[0][0] for rank in range(5)] == [0, 0, 1, 1, 1]


def test_one_worker_a_stage_is_the_plain_pipeline() -> None:
    for name in set(NAMES) - {"2bw"}:  # whose slack is another
        unlike, plain = (build_program(name, 3, 6, workers=workers) for workers in ((1, 1, 1), ()))
        assert unlike.unroll(3) == plain.unroll(3)
        assert unlike.peak_activations == plain.peak_activations
    assert round_robin((1, 1, 1)).ranks == loop(3).ranks


def by_list_scheduling(workers: tuple[int, ...], m: int, forward: list[int], backward: list[int]) -> int:
    """Makespan of a greedy scheduler over the graph of (stage, micro-batch) with exclusive workers: a worker prefers a
    backward, and runs a forward only while fewer than NOAM of its micro-batches are in flight."""
    p = len(workers)
    noam = [-(-sum(workers[s:]) // workers[s]) for s in range(p)]
    ready_f = {(0, k): 0 for k in range(m)}
    ready_b: dict[tuple[int, int], int] = {}
    free = {(s, r): 0 for s in range(p) for r in range(workers[s])}
    flying = dict.fromkeys(free, 0)
    end, now = 0, 0
    while ready_f or ready_b:
        for (stage, turn), since in free.items():
            if since > now:
                continue
            backs, fronts = (
                sorted(k for (s, k), at in tasks.items() if s == stage and k % workers[s] == turn and at <= now)
                for tasks in (ready_b, ready_f)
            )
            if backs:
                k, takes, kind = backs[0], backward[stage], "B"
            elif fronts and flying[stage, turn] < noam[stage]:
                k, takes, kind = fronts[0], forward[stage], "F"
            else:
                continue
            done = now + takes
            free[stage, turn], end = done, max(end, done)
            flying[stage, turn] += 1 if kind == "F" else -1
            if kind == "F":
                del ready_f[stage, k]
                (ready_f if stage + 1 < p else ready_b)[min(stage + 1, p - 1), k] = done
            else:
                del ready_b[stage, k]
                if stage:
                    ready_b[stage - 1, k] = done
        now = min((t for t in free.values() if t > now), default=now + 1)
    return end


@pytest.mark.parametrize("workers", [(2, 1), (1, 2), (2, 1, 1), (4, 2), (1, 1, 2)])
def test_1f1b_is_what_a_list_scheduler_makes(workers: tuple[int, ...]) -> None:
    """Where the work of a stage is in proportion to its workers, so that all are busy."""
    m, p = 24, len(workers)
    costs = uneven(workers)
    found = simulate(build_program("1f1b", p, m, workers=workers), costs).makespan
    expected = by_list_scheduling(workers, m, [w for w in workers], [2 * w for w in workers])
    assert found <= expected * 1.01, (found, expected)
    assert found <= 3 * m + sum(3 * w for w in workers) + 3 * max(workers)  # one micro-batch a 3, and the way down


def test_a_middle_stage_with_more_workers_wants_twice_the_warmup() -> None:
    """NOAM is not enough to keep (1, 2, 1) busy in strict turns; eager 1F1B is."""
    rates = []
    for name in ("1f1b", "eager-1f1b"):
        takes = [simulate(build_program(name, 3, m, workers=(1, 2, 1)), uneven((1, 2, 1))).makespan for m in (24, 48)]
        rates.append((takes[1] - takes[0]) / 24)
    assert rates == [4.5, 3]


def test_pipedreams_case_keeps_all_workers_busy() -> None:
    """Two blocks, costs 2 : 1, on (2, 1): a micro-batch in the time of the cheap one; on one rank each, of the dear."""
    for name in ("1f1b", "pipedream", "2bw"):
        times = []
        for m in (24, 48):
            costs = uneven((2, 1))
            times.append(simulate(build_program(name, 2, m, workers=(2, 1)), costs).makespan)
        assert (times[1] - times[0]) / 24 == 3, name


def test_a_wrong_turn_is_refused() -> None:
    program = build_program("1f1b", 2, 4, workers=(2, 1))

    def swapped(rank, batch):
        return [a._replace(microbatch=a.microbatch ^ 1) if a.is_compute and rank < 2 else a for a in
                program.order(rank, batch)]  # fmt: skip

    with pytest.raises(ScheduleError, match="is not the turn of rank 0"):
        validate(program.with_order(swapped))


def test_evaluation_goes_through_all_workers() -> None:
    program = forward_program(round_robin((2, 1)), 5)
    validate(program)
    runs = [a.microbatch for a in program.order(1, program.batch(0, last=True)) if a.is_compute]
    assert runs == [1, 3]


@pytest.mark.parametrize(
    ("name", "m", "workers", "said"),
    [
        ("chimera", 4, (2, 1), "`pipeline_schedule`=chimera: not with `stage_meshes`; legal: gpipe, 1f1b"),
        (
            "1f1b",
            6,
            (4, 1),
            "4 replicas of a stage do not divide m = 6 micro-batches per batch; make m a multiple of 4",
        ),
        ("2bw", 2, (1, 2, 2), "rank 0 runs 4 forwards ahead and would need weights before their update (m >= 4)"),
    ],
)
def test_refusals(name: str, m: int, workers: tuple[int, ...], said: str) -> None:
    reasons = schedule_problems(name, len(workers), m, workers=workers)
    assert any(said in reason for reason in reasons), reasons
