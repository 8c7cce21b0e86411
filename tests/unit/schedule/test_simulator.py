"""The simulator against another one: start times by relaxation over all constraints at once, messages included."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from schedule_shapes import build_shape, random_shapes

from megalite.schedule import SCHEDULES, Action, Costs, Program, lower, simulate
from megalite.schedule.passes import matching_recv


def relaxed_makespan(program: Program, costs: Costs, batches: int) -> Fraction | float:
    """Longest path: raise every end time until program order, wires and data dependencies all hold.

    It knows computations only through the messages in the lists and the order on the rank: nothing of the simulator.
    """
    lists = program.unroll(batches)
    nodes = [(rank, place) for rank, actions in enumerate(lists) for place in range(len(actions))]
    where = {(rank, lists[rank][place]): (rank, place) for rank, place in nodes}
    before: dict[tuple[int, int], list[tuple[tuple[int, int], Fraction | float]]] = {node: [] for node in nodes}
    for rank, actions in enumerate(lists):
        waiting: dict[tuple[str, int, int, int], tuple[int, int]] = {}
        for place, action in enumerate(actions):
            if place and actions[place].is_compute:
                before[rank, place] += [((rank, p), 0) for p in range(place) if actions[p].is_compute][-1:]
            if action.kind.startswith("SEND"):
                maker = max(p for p in range(place) if actions[p].is_compute)
                before[rank, place].append(((rank, maker), 0))
                target = where[action.peer, matching_recv(action, rank)]
                before[target].append(((rank, place), costs.communication))
            elif action.kind.startswith("RECV"):
                waiting[action.kind[-1], action.stage, action.replica, action.microbatch] = (rank, place)
            for part in action.computations():
                kind = "F" if part.kind == "F" else "B"
                need = waiting.get((kind, part.stage, part.replica, part.microbatch))
                if need is not None and part.kind not in "WR":
                    before[rank, place].append((need, 0))
    length = {n: costs.of(lists[n[0]][n[1]], program) if lists[n[0]][n[1]].is_compute else 0 for n in nodes}
    end: dict[tuple[int, int], Fraction | float] = dict.fromkeys(nodes, 0)
    changed = True
    while changed:
        changed = False
        for node in nodes:
            value = max((end[other] + wait for other, wait in before[node]), default=0) + length[node]
            if value > end[node]:
                end[node], changed = value, True
    return max(end.values())


def test_simulator_equals_relaxation() -> None:
    rng = random.Random(15)
    for name, shape in random_shapes(36, seed=16, largest_rank=4):
        if shape.m > 10:
            continue
        program = lower(build_shape(name, shape))
        times = [Fraction(rng.randint(1, 9), rng.randint(1, 4)) for _ in range(3)]
        costs = Costs(*times, communication=Fraction(rng.randint(0, 3), 2))
        assert simulate(program, costs, batches=2).makespan == relaxed_makespan(program, costs, 2), (name, shape, costs)


def test_work_is_conserved() -> None:
    for name, shape in random_shapes(24, seed=17, largest_rank=4):
        run = simulate(build_shape(name, shape), Costs(Fraction(2), Fraction(3), Fraction(1)), batches=2)
        again = 2 * (shape.p - 1) if SCHEDULES[name].recomputes else 0  # all stages but the last run forwards again
        assert sum(run.busy_per_rank) == 2 * shape.m * (shape.p * 6 + again), name
        assert all(
            idle >= inside >= 0 for idle, inside in zip(run.idle_per_rank, run.idle_inside_per_rank, strict=True)
        )


def test_measured_costs_may_be_floats() -> None:
    program = build_shape("1f1b", next(shape for name, shape in random_shapes(24, seed=18) if name == "1f1b"))
    exact, rough = simulate(program, Costs(Fraction(1), Fraction(2))), simulate(program, Costs(1.0, 2.0, 1.0, 0.0))
    assert rough.makespan == pytest.approx(float(exact.makespan))


def test_an_overlap_costs_the_sum_of_its_parts_unless_told_otherwise() -> None:
    from megalite.schedule import build_program
    from megalite.schedule.action import backward, forward, overlap

    program = build_program("dualpipe-v", 2, 4)
    pair: Action = overlap(forward(0, 3), backward(3, 1))
    assert Costs().of(pair, program) == Fraction(3, 2)
    assert Costs(overlap=Fraction(2, 3)).of(pair, program) == 1
    assert simulate(program, Costs(overlap=Fraction(2, 3))).makespan < simulate(program).makespan


def test_exact_times_are_those_of_floating_point_numbers() -> None:
    """Fractions are counted in a common unit, floating-point numbers as they are; of eighths both are exact."""
    rng = random.Random(18)
    for name, shape in random_shapes(52, seed=19, largest_rank=4):
        program = lower(build_shape(name, shape))
        one, two, three, four, *others = (Fraction(rng.randint(0, 24), 8) for _ in range(6))
        given = {(0, "F"): others[0], (program.num_stages - 1, "W"): others[1], (0, "STEP"): Fraction(5, 8)}
        exact = Costs(one, two, three, four, exact=given, overlap=Fraction(3, 4))
        floats = {key: float(time) for key, time in given.items()}
        real = Costs(*map(float, (one, two, three, four)), exact=floats, overlap=0.75)
        norm = rng.random() < 0.5
        found = simulate(program, exact, batches=2, global_norm=norm)
        assert all(type(time) is Fraction for span in found.spans for time in span[2:])
        if shape.v != 3:  # a third of an eighth is not exact
            assert found.spans == simulate(program, real, batches=2, global_norm=norm).spans, (name, shape, exact)
