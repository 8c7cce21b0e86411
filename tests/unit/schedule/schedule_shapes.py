"""Random legal shapes for the tests of the schedule room."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from megalite.schedule import SCHEDULES, Costs, Program, ScheduleShape, Time, build_program, schedule_problems


def random_shapes(count: int, *, seed: int, largest_rank: int = 6) -> Iterator[tuple[str, ScheduleShape]]:
    """`count` legal (name, shape) pairs, every schedule equally often."""
    rng = random.Random(seed)
    names = list(SCHEDULES)
    found = 0
    while found < count:
        name = names[found % len(names)]
        p = rng.randint(1, largest_rank)
        m = rng.choice([rng.randint(1, 4 * p), p * rng.randint(1, 4)])
        v = rng.choice([2, 3]) if SCHEDULES[name].num_chunks is None else None
        f = rng.choice([1, 2]) if SCHEDULES[name].paired else 1
        if not schedule_problems(name, p, m, v, num_pairs=f):
            found += 1
            yield name, ScheduleShape(p, m, v or SCHEDULES[name].num_chunks or 1, f)


def build_shape(name: str, shape: ScheduleShape) -> Program:
    chunks = shape.v if SCHEDULES[name].num_chunks is None else None
    return build_program(name, shape.p, shape.m, chunks, num_pairs=shape.f)


def uneven(factors: Sequence[Time], communication: Time = 0) -> Costs:
    """Stages of one chunk a rank, whose forward, I and W take as long as their factor says."""
    exact = {(stage, kind): factor for stage, factor in enumerate(factors) for kind in "FIW"}
    return Costs(exact=exact, communication=communication)
