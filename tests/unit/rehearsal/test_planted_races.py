"""Planted races: each is found, and named by the two lines that are marked `one` and `other`; with the order that it
lacks (`right`) nothing is reported."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm import Axis, World, all_gather_into, all_reduce_, start_all_to_all_rows, start_shift
from megalite.page_locked import host_bytes
from megalite.rehearsal import DEVICE, watched_gpu
from megalite.testing import run_ranks

Scene = Callable[..., Any]


def new(*shape: int) -> Tensor:
    return torch.ones(shape or (8,), device=DEVICE)


def locked(*shape: int) -> Tensor:
    return torch.zeros(shape or (8,)).pin_memory()


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream)


def compute() -> Any:
    return torch.cuda.current_stream()


def reads_before_it_is_computed(right: bool) -> Tensor:
    side, home = torch.cuda.Stream(), locked()
    x = new() * 2  # one
    if right:
        side.wait_stream(compute())
    with on(side):
        home.copy_(x, non_blocking=True)  # other
    compute().wait_stream(side)
    side.synchronize()
    return home


def reads_before_it_has_arrived(right: bool) -> Tensor:
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        x.copy_(home, non_blocking=True)  # one
    if right:
        compute().wait_stream(side)
    return x * 2  # other


def waits_in_the_wrong_direction(right: bool) -> Tensor:
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        x.copy_(home, non_blocking=True)  # one
    (compute() if right else side).wait_stream(side if right else compute())
    return x + 1  # other


def records_the_event_before_the_work(right: bool) -> Tensor:
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        event = side.record_event()
        x.copy_(home, non_blocking=True)  # one
        event = side.record_event() if right else event
    compute().wait_event(event)
    return x * 2  # other


def another_stream_waits(right: bool) -> Tensor:
    side, third, x, home = torch.cuda.Stream(), torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        x.copy_(home, non_blocking=True)  # one
    event = side.record_event()
    (compute() if right else third).wait_event(event)
    return x * 2  # other


def overwrites_what_is_read(right: bool) -> Tensor:
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        home.copy_(x, non_blocking=True)  # one
    if right:
        compute().wait_stream(side)
    x.zero_()  # other
    return home


def two_streams_write(right: bool) -> Tensor:
    side, x = torch.cuda.Stream(), torch.empty(8, device=DEVICE)
    with on(side):
        x.fill_(1)  # one
    if right:
        compute().wait_stream(side)
    x.fill_(2)  # other
    return x


def frees_what_another_stream_uses(right: bool) -> Tensor:
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        home.copy_(x, non_blocking=True)  # one
    if right:
        x.record_stream(side)
    del x
    new()  # other
    return home


def frees_before_it_waits(right: bool) -> Tensor:
    """The block goes back at once; what it becomes next is written behind the wait, or not."""
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        home.copy_(x, non_blocking=True)  # one
    del x
    if right:
        compute().wait_stream(side)
    new()  # other
    return home


def shrinks_what_another_stream_uses(right: bool) -> Tensor:
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        home.copy_(x, non_blocking=True)  # one
    if right:
        compute().wait_stream(side)
    x.untyped_storage().resize_(0)
    new()  # other
    return home


def memory_of_another_pool(right: bool) -> Tensor:
    """Memory that a stream gets may still be used by the one that had it."""
    side, x = torch.cuda.Stream(), new()
    x.mul_(2)  # one
    del x
    y = torch.empty(8, device=DEVICE)
    if right:
        side.wait_stream(compute())
    with on(side):
        y.zero_()  # other
    return y


def rewrites_staging(right: bool) -> Tensor:
    x, home = new(), locked()
    x.copy_(home, non_blocking=True)  # one
    if right:
        compute().synchronize()
    home.fill_(3)  # other
    return x


def reads_on_the_host_too_early(right: bool) -> list[float]:
    x, home = new(), locked()
    home.copy_(x, non_blocking=True)  # one
    if right:
        compute().record_event().synchronize()
    found: list[float] = home.numpy().tolist()  # other
    return found


def a_copy_to_the_host_that_says_it_does_not_wait(right: bool) -> list[float]:
    home = new().to("cpu", non_blocking=not right)  # one
    found: list[float] = home.tolist()  # other
    return found


def packs_rows_that_have_not_arrived(right: bool) -> Tensor:
    """Strided memory of the host is made dense by the host, whatever the stream waits for."""
    side, x, home = torch.cuda.Stream(), new(4, 8), locked(4, 8)
    side.wait_stream(compute())
    with on(side):
        home.copy_(x, non_blocking=True)  # one
    compute().wait_stream(side)
    if right:
        side.synchronize()
    return home[:, :4].to(DEVICE, non_blocking=True)  # other


def a_sum_that_is_read_orders_its_own_stream(right: bool) -> Tensor:
    side, x, home = torch.cuda.Stream(), new(), locked()
    side.wait_stream(compute())
    with on(side):
        x.copy_(home, non_blocking=True)  # one
    if right:
        compute().wait_stream(side)
    new().sum().item()
    home.fill_(3)  # other
    return x


def a_thread_does_not_wait(right: bool) -> Tensor:
    x, home = new(), locked()
    home.copy_(x, non_blocking=True)  # one
    event = compute().record_event()

    def step() -> None:
        if right:
            event.synchronize()
        home.add_(1)  # other

    with ThreadPoolExecutor(1) as pool:
        pool.submit(step).result()
    return home


def nobody_waits_for_the_thread(right: bool) -> Tensor:
    home = torch.zeros(8)

    def step() -> None:
        home.add_(1)  # one

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(step)
        if right:
            future.result()
        home.mul_(2)  # other
    return home


def unlocks_pages_under_a_copy(right: bool) -> None:
    x, home = new(), host_bytes(32, pinned=True).view(torch.float32)
    home.copy_(x, non_blocking=True)  # one
    if right:
        compute().synchronize()
    del home  # other


SCENES: list[Scene] = [
    reads_before_it_is_computed, reads_before_it_has_arrived, waits_in_the_wrong_direction,
    records_the_event_before_the_work, another_stream_waits, overwrites_what_is_read, two_streams_write,
    frees_what_another_stream_uses, frees_before_it_waits, shrinks_what_another_stream_uses, memory_of_another_pool,
    rewrites_staging, reads_on_the_host_too_early, a_copy_to_the_host_that_says_it_does_not_wait,
    packs_rows_that_have_not_arrived, a_sum_that_is_read_orders_its_own_stream, a_thread_does_not_wait,
    nobody_waits_for_the_thread, unlocks_pages_under_a_copy,
]  # fmt: skip


def judged(scene: Scene, right: bool) -> None:
    """Runs it, and compares what was reported with the marks in the source."""
    with watched_gpu() as gpu:
        scene(right)
        gc.collect()
    check(scene, right, gpu.races)


def check(scene: Scene, right: bool, races: list[str]) -> None:
    if right:
        assert races == []
        return
    source = Path(__file__).read_text().splitlines()
    assert races, "not found"
    for race in races:
        second, first = (re.search(rf" (?:at|<) rehearsal/test_planted_races.py:(\d+) ({scene.__name__}|step)", part)
                         for part in race.split("does not wait for", 1))  # fmt: skip
        assert first and second, race
        marks = [source[int(found[1]) - 1].rpartition("  ")[2] for found in (first, second)]
        if scene is nobody_waits_for_the_thread:  # which of the two is faster
            marks.sort()
        assert marks == ["# one", "# other"] or set(marks) == {"# both"}, race


@pytest.mark.parametrize("right", [True, False], ids=["right", "planted"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_planted_race_is_found(scene: Scene, right: bool) -> None:
    judged(scene, right)


# ---- messages: two ranks ------------------------------------------------------------------------------------------


def a_collective_of_another_stream(right: bool, axis: Axis) -> Tensor:
    """Called without async_op it orders the stream that it was called on."""
    side, whole, part = torch.cuda.Stream(), new(16), new()
    side.wait_stream(compute())
    with on(side):
        all_gather_into(whole, part, axis)  # one
    if right:
        compute().wait_stream(side)
    return whole * 2  # other


def a_handle_that_nobody_waits_for(right: bool, axis: Axis) -> Tensor:
    x = new()
    handle = all_reduce_(x, axis, async_op=True)  # one
    if right:
        handle.wait()
    y = x * 2  # other
    if not right:
        handle.wait()
    return y


def a_handle_that_another_stream_waits_for(right: bool, axis: Axis) -> Tensor:
    side, x = torch.cuda.Stream(), new()
    handle = all_reduce_(x, axis, async_op=True)  # one
    with on(compute() if right else side):
        handle.wait()
    return x * 2  # other


def a_gather_into_memory_that_goes(right: bool, axis: Axis) -> Tensor:
    whole, part = new(16), new()
    handle = all_gather_into(whole, part, axis, async_op=True)  # one
    if right:
        handle.wait()
    whole.untyped_storage().resize_(0)
    y = new(16)  # other
    if not right:
        handle.wait()
    return y


def rows_that_travel(right: bool, axis: Axis) -> Tensor:
    out, handle = start_all_to_all_rows(new(4, 2), [[2, 2], [2, 2]], axis)  # one
    if right:
        handle.wait()
    y = out + 1  # other
    if not right:
        handle.wait()
    return y


def receives_into_what_it_sends(right: bool, axis: Axis) -> None:
    """Nothing orders what is in one batch."""
    x, peer = new(), axis.ranks[1 - axis.rank]
    into = new() if right else x
    ends = [dist.P2POp(dist.isend, x, peer, axis.group), dist.P2POp(dist.irecv, into, peer, axis.group)]
    for work in dist.batch_isend_irecv(ends):  # both
        work.wait()


def what_is_sent_changes(right: bool, axis: Axis) -> None:
    x = new()
    shift = start_shift(x, axis)  # one
    if right:
        shift.wait()
    x.zero_()  # other
    if not right:
        shift.wait()


MESSAGES: list[Scene] = [
    a_collective_of_another_stream, a_handle_that_nobody_waits_for, a_handle_that_another_stream_waits_for,
    a_gather_into_memory_that_goes, rows_that_travel, what_is_sent_changes, receives_into_what_it_sends,
]  # fmt: skip


def exchange(world: World) -> list[list[str]]:
    """What is reported of each scene, right and planted."""
    axis = Axis("dp", 2, world.rank, (0, 1), dist.group.WORLD)
    found = []
    for scene in MESSAGES:
        for right in (True, False):
            with watched_gpu() as gpu:
                scene(right, axis)
                gc.collect()
            found.append(gpu.races)
    return found


def test_a_planted_race_of_messages_is_found() -> None:
    for found in run_ranks(exchange, 2):
        for i, scene in enumerate(MESSAGES):
            check(scene, True, found[2 * i])
            check(scene, False, found[2 * i + 1])
