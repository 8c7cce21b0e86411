"""Transfers between unlike meshes: every element arrives once, and as many cross as the closed forms say."""

from __future__ import annotations

import random

import pytest

from megalite.inventory.boxes import find_overlap
from megalite.inventory.transfer_plan import Transfer, in_rounds, tiles, transfer_plan

SHAPE = (24, 2, 3)
WHOLE = 24 * 2 * 3


def arrived(plan, receiver: int) -> list:
    return [task.box for task in plan.tasks if task.receiver == receiver]


@pytest.mark.parametrize("split", [True, False], ids=["parts of the sequence", "copies"])
def test_every_receiver_gets_each_element_once(split: bool) -> None:
    rng = random.Random(1)
    for _ in range(60):
        a, b, gather = rng.randint(1, 8), rng.randint(1, 8), rng.random() < 0.5
        plan = transfer_plan(SHAPE, tiles(SHAPE, a, split=split), tiles(SHAPE, b, split=split), gather=gather)
        for task in plan.tasks:
            held = plan.source[task.sender]
            assert task.box.intersect(held) == task.box, "a sender has what it sends"
        for receiver in range(b):
            boxes = arrived(plan, receiver)
            wanted = tiles(SHAPE, b, split=True)[receiver] if plan.gathered else plan.target[receiver]
            assert sum(box.numel for box in boxes) == wanted.numel and find_overlap(boxes) is None
            assert all(box.intersect(wanted) == box for box in boxes)


@pytest.mark.parametrize(
    ("a", "b", "split", "gather", "times"),
    [
        (4, 2, True, False, 1),  # parts of the sequence: each element once, whatever the sizes
        (2, 4, True, False, 1),
        (3, 4, True, True, 1),
        (1, 4, False, False, 4),  # copies: one for each receiver
        (1, 4, False, True, 1),  # or one in parts, put together behind the link
        (4, 4, False, True, 1),  # two hosts x 4: Megatron-LM's scatter/gather
        (4, 4, False, False, 4),
        (4, 1, False, True, 1),
    ],
)
def test_elements_that_cross(a: int, b: int, split: bool, gather: bool, times: int) -> None:
    plan = transfer_plan(SHAPE, tiles(SHAPE, a, split=split), tiles(SHAPE, b, split=split), gather=gather)
    assert plan.elements == times * WHOLE


def test_senders_share_the_load() -> None:
    for a, b in ((4, 4), (2, 4), (3, 6)):
        plan = transfer_plan(SHAPE, tiles(SHAPE, a, split=False), tiles(SHAPE, b, split=False), gather=True)
        sent = [sum(task.box.numel for task in plan.tasks if task.sender == rank) for rank in range(a)]
        assert max(sent) == WHOLE // a


def test_tasks_come_in_rounds_that_are_the_same_everywhere() -> None:
    whole = tiles(SHAPE, 1, split=False)[0]
    tasks = [Transfer(whole, a, b) for a in range(3) for b in range(3)]
    ordered = in_rounds(tasks)
    assert ordered == in_rounds(tasks) and sorted(ordered) == sorted(tasks)
    for begin in range(0, 9, 3):  # three rounds are enough: in each every rank sends once and receives once
        now = ordered[begin : begin + 3]
        assert {task.sender for task in now} == {task.receiver for task in now} == {0, 1, 2}
