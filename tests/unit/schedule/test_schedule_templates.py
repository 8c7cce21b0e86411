"""The list of a batch is numbered from a template: it must be, action for action, what the generator and the passes
would write for that very batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from schedule_shapes import build_shape, random_shapes

from megalite.schedule import Action, BatchRange, Program, build_program, insert_unshard, lower, parse_program


def runs(rng: random.Random, program: Program, shape_m: int) -> list[BatchRange]:
    """A run of ramped-up sizes with stops in between, and then batches from far behind it."""
    ramps = program.name in ("gpipe", "1f1b", "eager-1f1b", "2bw", "pipedream", "zb-h1", "zb-h2", "zb-v")
    least = max(program.num_ranks - 1, 1)
    sizes = [rng.randint(least, shape_m + 3) if ramps else shape_m for _ in range(6)]
    run = list(program.batches(sizes))
    stops = {t for t in range(6) if rng.random() < 0.3}
    run = [
        b._replace(next_size=0 if b.iteration in stops else b.next_size, first=b.first or b.iteration - 1 in stops)
        for b in run
    ]
    far = [program.batch(t, start=start, size=shape_m) for t, start in ((57, 1000), (3, 991), (10**6, 10**9))]
    return [*run, *far, *run[:2]]


def check(what: object, program: Program, run: Sequence[BatchRange]) -> None:
    for rank in range(program.num_ranks):
        for batch in run:
            found = program.actions_for_batch(rank, batch)
            assert found == program.order(rank, batch), (what, rank, batch)
            assert all(type(action) is Action for action in found), what


def test_every_schedule_lists_what_it_generates() -> None:
    rng = random.Random(11)
    for name, shape in random_shapes(36, seed=12, largest_rank=5):
        program = build_shape(name, shape)
        run = runs(rng, program, shape.m)
        check((name, shape), lower(program), run)
        if not program.asynchronous:
            check((name, shape), insert_unshard(lower(program)), run)


def test_a_file_lists_what_it_says() -> None:
    text = (
        "ranks: 2\nstages: 0 1\nstages: 1 0\nmicrobatches: 2\nrank 0: 0F0 1.1F1 [0B0+1.1B1]\n"
        "rank 1: 0.1F1 1F0 1B0 0.1I1 0.1W1\n"
    )
    program = parse_program(text)
    check(text, lower(program), program.batches(3))


def test_a_list_is_generated_once_for_each_shape_of_a_batch() -> None:
    calls = []
    program = build_program("2bw", 4, 8)
    order = program.order
    counted = lower(program.with_order(lambda rank, batch: calls.append(batch) or order(rank, batch)))
    for batch in counted.batches(3):
        counted.actions_for_batch(1, batch)
    before = len(calls)
    for batch in counted.batches(40)[:39]:
        counted.actions_for_batch(1, batch)
    assert len(calls) == before


def test_a_list_may_be_changed_by_whoever_asked_for_it() -> None:
    program = lower(build_program("1f1b", 2, 3))
    first = program.actions_for_batch(0, program.batch(4))
    copy = list(first)
    first.clear()
    assert program.actions_for_batch(0, program.batch(4)) == copy
