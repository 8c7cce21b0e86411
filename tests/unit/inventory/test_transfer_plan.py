"""Transfers between unlike meshes: every element arrives once, and as many cross as the closed forms say."""

from __future__ import annotations

import random

import pytest

from megalite.inventory.boxes import find_overlap
from megalite.inventory.transfer_plan import (
    CHUNKS,
    DIRECT,
    GATHERED,
    RELAYED,
    Transfer,
    TransferPlan,
    fastest_way,
    in_rounds,
    tiles,
    transfer_plan,
)

SHAPE = (24, 2, 3)
WHOLE = 24 * 2 * 3


def messages(plan: TransferPlan) -> list[tuple[str, Transfer]]:
    """All of them in order, those that receivers send on included: ("from" the stage before or "on", transfer)."""
    found = [("from", task) for task in plan.tasks]
    for receiver in range(len(plan.target) - 1 if plan.way == RELAYED else 0):
        found += [("on", Transfer(task.box, receiver, receiver + 1)) for task in plan.tasks]
    return found


@pytest.mark.parametrize("way", [DIRECT, GATHERED, RELAYED])
@pytest.mark.parametrize("split", [True, False], ids=["parts of the sequence", "copies"])
def test_every_receiver_gets_each_element_once(split: bool, way: str) -> None:
    rng = random.Random(1)
    for _ in range(60):
        a, b, shape = rng.randint(1, 8), rng.randint(1, 8), (rng.choice([8, 24, 35]), 2, 3)
        plan = transfer_plan(shape, a, b, split=split, way=way)
        has = [[] for _ in range(b)]
        for kind, task in messages(plan):
            held = [plan.source[task.sender]] if kind == "from" else has[task.sender]
            assert any(task.box.intersect(box) == task.box for box in held), "a sender has what it sends"
            has[task.receiver].append(task.box)
        for receiver, boxes in enumerate(has):
            wanted = tiles(shape, b, split=split or plan.way == GATHERED)[receiver]
            assert plan.target[receiver] == wanted
            assert sum(box.numel for box in boxes) == wanted.numel and find_overlap(boxes) is None
            assert all(box.intersect(wanted) == box for box in boxes)
        if plan.way == RELAYED:  # in the order of the sequence, so that all ranks post the same list
            assert [box.offset for box in has[0]] == sorted(box.offset for box in has[0])
            assert len(has[0]) == min(CHUNKS, shape[0]) and max(box.shape[0] for box in has[0]) <= -(-shape[0] // 8)


@pytest.mark.parametrize(
    ("a", "b", "split", "way", "times"),
    [
        (4, 2, True, DIRECT, 1),  # parts of the sequence: each element once, whatever the sizes
        (2, 4, True, DIRECT, 1),
        (3, 4, True, GATHERED, 1),
        (1, 4, False, DIRECT, 4),  # copies: one for each receiver
        (1, 4, False, GATHERED, 1),  # or one in parts, put together behind the link
        (4, 4, False, GATHERED, 1),  # two hosts x 4: Megatron-LM's scatter/gather
        (4, 4, False, DIRECT, 4),
        (4, 1, False, GATHERED, 1),
        (1, 8, False, RELAYED, 1),  # then from receiver to receiver
    ],
)
def test_elements_that_cross(a: int, b: int, split: bool, way: str, times: int) -> None:
    plan = transfer_plan(SHAPE, a, b, split=split, way=way)
    assert sum(task.box.numel for task in plan.tasks) == times * WHOLE


def seconds(plan: TransferPlan, senders: list[int], receivers: list[int]) -> float:
    """Simulated, in times of the whole tensor over a link: a host sends one message at a time and receives one; what
    stays on a host is there at once. senders, receivers: the host of each rank."""
    leaves: dict[int, float] = {}
    enters: dict[int, float] = {}
    here: dict[tuple[int, tuple[int, ...]], float] = {}
    order = messages(plan)
    for kind, task in order if plan.way != RELAYED else sorted(order, key=lambda one: one[1].box.offset):
        key = task.box.offset
        since = 0.0 if kind == "from" else here[task.sender, key]
        source, target = (senders if kind == "from" else receivers)[task.sender], receivers[task.receiver]
        if source != target:
            since = max(since, leaves.get(source, 0.0), enters.get(target, 0.0)) + task.box.numel / plan.target[0].numel
            leaves[source] = enters[target] = since
        here[task.receiver, key] = since
    return max(here.values())


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("hosts", [1, 2, 3, 8])
def test_a_broadcast_in_chunks_takes_one_and_a_chain_of_chunks(hosts: int, per_host: int) -> None:
    """A hosts of B ranks: A B -> 1 + (A - 1) / K, and the same bytes arrive (test_every_receiver_...)."""
    shape, copies = (96, 2, 3), hosts * per_host
    senders, receivers = [-1], [rank // per_host for rank in range(copies)]
    ways = {
        way: seconds(transfer_plan(shape, 1, copies, split=False, way=way), senders, receivers)
        for way in (DIRECT, RELAYED)
    }
    assert ways[DIRECT] == pytest.approx(copies)
    if copies > 1:
        assert ways[RELAYED] == pytest.approx(1 + (hosts - 1) / CHUNKS)


@pytest.mark.parametrize(
    ("senders", "receivers", "copies", "way"),
    [
        (1, 1, 1, DIRECT),
        (1, 1, 8, GATHERED),  # 8, 1 or 1: parts go by all cards of a host
        (1, 2, 2, RELAYED),  # 2, 1.5 or 1 + 1 / 16
        (1, 8, 64, RELAYED),
        (2, 2, 2, DIRECT),  # each host sends one
        (2, 2, 16, GATHERED),  # 8, 1 or 1 + 1 / 16
        (2, 4, 32, RELAYED),  # 16, 1.25 or 1 + 3 / 16
        (4, 1, 4, GATHERED),
    ],
)
def test_the_way_is_that_of_least_time_on_the_busiest_link(senders: int, receivers: int, copies: int, way: str) -> None:
    assert fastest_way(senders, receivers, copies) == way


def test_senders_share_the_load() -> None:
    for a, b in ((4, 4), (2, 4), (3, 6)):
        plan = transfer_plan(SHAPE, a, b, split=False, way=GATHERED)
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
