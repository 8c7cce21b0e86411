"""Layers to stages: balance against brute force, fixed ends, Megatron's layout string, and never a lost layer."""

from __future__ import annotations

import itertools
import random

import pytest

from megalite.errors import ScheduleError
from megalite.schedule import partition
from megalite.schedule.partition import full_layout, parse_layout, partition_of
from megalite.schedule.stage_placement import bidirectional, loop, vee


def every_cut(count: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]


def test_balance_equals_brute_force() -> None:
    rng = random.Random(13)
    for _ in range(60):
        layers = rng.randint(1, 9)
        stages = rng.randint(1, min(layers + 2, 5))
        costs = [float(rng.choice([0, 1, 1, 2, 5])) for _ in range(layers + 2)]
        found = partition(layers, loop(stages), costs=costs)

        def loads(cut: tuple[int, ...], costs: list[float] = costs) -> tuple[float, float]:
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise(cut)]
            return max(sums), sum(load * load for load in sums)

        best = min(loads(cut) for cut in every_cut(layers + 2, stages))
        assert loads((0, *(cut.stop for cut in found))) == pytest.approx(best), (layers, stages, costs)


def test_no_layer_is_ever_lost() -> None:
    rng = random.Random(14)
    for _ in range(200):
        layers, p, v = rng.randint(1, 40), rng.randint(1, 6), rng.randint(1, 3)
        place = rng.choice([loop(p, v), vee(p), bidirectional(p)])
        if layers + 2 < place.num_stages:
            continue
        cuts = partition(layers, place, costs=[rng.random() for _ in range(layers + 2)])
        items = [item for cut in cuts for item in cut]
        assert items == list(range(layers + 2))
        assert all(cuts) and parse_layout(full_layout(cuts), layers, len(cuts)) == cuts
    with pytest.raises(AssertionError, match="loses layers"):
        partition_of(4, (2, 1))


@pytest.mark.parametrize(
    ("layers", "place", "costs", "layout"),
    [
        (4, loop(2), None, "Ett|ttL"),
        (5, loop(2), None, "Ettt|ttL"),
        (7, loop(4), None, "Ett|tt|tt|tL"),
        (8, loop(2, 2), None, "Ett|tt|tt|ttL"),
        (6, loop(4), [0, 1, 1, 1, 1, 1, 1, 2], "Ett|tt|tt|L"),
        (4, loop(3), [4, 6, 3, 4, 2, 3], "E|tt|ttL"),  # heaviest first: 4 9 9, though 10 7 5 is more even
        (6, loop(3), [2, 1, 1, 1, 1, 1, 1, 2], "Ett|ttt|tL"),
    ],
)
def test_cuts(layers: int, place: object, costs: list[float] | None, layout: str) -> None:
    assert full_layout(partition(layers, place, costs=costs)) == layout  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "first", "last", "layout"),
    [
        (loop(4), 1, None, "Et|ttt|ttt|tttL"),
        (loop(4), 1, 3, "Et|ttt|ttt|tttL"),
        (loop(4), None, 1, "Ettt|ttt|ttt|tL"),
        (loop(2, 2), 4, 6, "Ett|ttt|tt|tttL"),
        (vee(2), 4, 6, "Ett|ttt|ttt|ttL"),
        (loop(3), 0, 0, "E|" + "t" * 10 + "|L"),
    ],
)
def test_fixed_ends(place: object, first: int | None, last: int | None, layout: str) -> None:
    assert full_layout(partition(10, place, first=first, last=last)) == layout  # type: ignore[arg-type]


def test_megatron_layout() -> None:
    cuts = partition(62, loop(16, 2), layout="Et*3|(tt|)*29,t|L")
    assert len(cuts) == 32 and cuts[0] == range(4) and cuts[31] == range(63, 64)
    assert partition(4, loop(3), layout="Ett|tt|mmL") == partition(4, loop(3), layout="Ett|tt|L")
    assert full_layout(parse_layout("E(t|(tt|)*2)*2tL", 11, 7)) == "Et|tt|tt|t|tt|tt|tL"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|ttL", "2 stages, but pipeline ranks times chunks per rank are 3"),
        ("Et|tt|L", r"1 embeddings, 3 layers and 1 heads; the model is E, then --num-layers=4"),
        ("tE|tt|tL", "in this order"),
        ("Ett||ttL", "stage 1 holds no layer"),
        ("Ett|ttm|L", "multi-token prediction, shares the stage of L here; write mL at the end$"),
        ("Ett|m|ttL", "write mL at the end; also, stage 1 holds no layer"),
        ("Ett|m|L", "write mL at the end; also, stage 1 holds no layer.*; also, holds 1 embeddings, 2 layers"),
        ("Ett|tx|L", "cannot read 'x'"),
        ("Ett|(t|L", r"cannot read '\('"),
        ("E(t*999)*999|t|L", "more than 100000 layers"),
    ],
)
def test_wrong_layouts(layout: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        partition(4, loop(3), layout=layout)


def test_contradictions() -> None:
    with pytest.raises(ScheduleError, match="leave out --decoder-first-pipeline-num-layers"):
        partition(4, loop(2), layout="Ett|ttL", first=2)
    with pytest.raises(ScheduleError, match="the sum must be --num-layers=4"):
        partition(4, loop(2), first=3, last=3)
    with pytest.raises(ScheduleError, match="7 stages for 4 layers, embedding and head; use at most 6 stages"):
        partition(4, loop(7))
    with pytest.raises(ScheduleError, match="stage 2 would hold no layer"):
        partition(4, loop(4), first=2, last=1)
    with pytest.raises(ScheduleError, match="one pipeline rank"):
        partition(4, loop(1), first=2, last=1)
    with pytest.raises(AssertionError, match="1.0, 1.0, 1.0, 1.0"):
        partition(4, loop(2), costs=[1.0] * 4)
