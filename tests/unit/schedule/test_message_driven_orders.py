"""Message-driven execution on paper: every order that times can give is valid, and what it is worth."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial
from statistics import mean

import pytest
from schedule_shapes import uneven

from megalite.errors import ScheduleError
from megalite.schedule import Costs, build_program, insert_unshard, lower, schedule_problems, simulate, validate
from megalite.schedule.arrival import as_arrives


def makespan(name: str, p: int, m: int, costs: Costs, limit: int | None = None) -> Fraction:
    return simulate(build_program(name, p, m, max_in_flight=limit), costs).makespan


def stages(rng: random.Random, p: int) -> list[Fraction]:
    """Times that vary from stage to stage."""
    return [Fraction(rng.randint(5, 20), 10) for _ in range(p)]


@pytest.mark.parametrize(("p", "m"), [(8, 14), (8, 32), (16, 31), (24, 48)])
@pytest.mark.parametrize("limit", [None, 3])
def test_long_pipelines_are_valid(p: int, m: int, limit: int | None) -> None:
    """Over one communicator for all messages upwards eight ranks with 14 micro-batches would wait for each other."""
    assert validate(build_program("message-driven", p, m, max_in_flight=limit)).in_order


def test_whatever_arrives_when_the_list_is_valid_and_in_order() -> None:
    rng = random.Random(3)
    for _ in range(25):
        p, m = rng.randint(2, 5), rng.randint(1, 12)
        limit = rng.randint(1, 2 * p)
        program = lower(build_program("message-driven", p, m, max_in_flight=limit))
        program = insert_unshard(program) if rng.random() < 0.5 else program
        costs = uneven(stages(rng, p), Fraction(rng.randint(0, 10), 10))
        given = as_arrives(program, partial(costs.of, program=program), costs.communication, 2)
        assert validate(given).in_order
        peaks = simulate(program, costs, batches=2).peak_activations_per_rank
        assert max(peaks) <= min(limit, m) and peaks[-1] == 1


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_equal_times_give_1f1b_and_its_eager_form(p: int, m: int) -> None:
    """With a hop as well: never faster than 1F1B with L = p where messages are free, eager's time with 2p - 1."""
    assert makespan("message-driven", p, m, Costs(), p) == makespan("1f1b", p, m, Costs())
    for hop in (Fraction(0), Fraction(1, 5)):
        costs = Costs(communication=hop)
        assert makespan("message-driven", p, m, costs) == makespan("eager-1f1b", p, m, costs)


def test_where_costs_vary_it_is_faster_than_lists_on_average() -> None:
    rng = random.Random(5)
    for limit, name in ((0, "1f1b"), (None, "eager-1f1b")):
        ratios = []
        for _ in range(20):
            p = rng.choice([4, 6])
            costs = uneven(stages(rng, p))
            taken = makespan("message-driven", p, 3 * p, costs, p if limit == 0 else None)
            ratios.append(float(taken / makespan(name, p, 3 * p, costs)))
        assert max(ratios) <= 1.025 and mean(ratios) <= 1


def test_a_limit_of_one_is_one_micro_batch_after_another() -> None:
    assert makespan("message-driven", 3, 4, Costs(), 1) == 3 * 4 * 3
    assert makespan("message-driven", 3, 4, Costs(), 2) < 3 * 4 * 3


def test_only_message_driven_has_a_limit() -> None:
    (line,) = schedule_problems("1f1b", 2, 4, max_in_flight=3)
    assert line.startswith("`pipeline_max_in_flight`=3: 1f1b runs a fixed list")
    with pytest.raises(ScheduleError, match="1 chunk per rank"):
        build_program("message-driven", 2, 4, 2)
