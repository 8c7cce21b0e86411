"""The mover on streams that keep clocks: who reads what another has written, or writes what another reads, has waited.

A stream's clock has, for each stream and thread, how much of its work is known to be over (Lamport, 1978). Nothing
computes; copies are noted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalite.parallel.tiers import Arrival, Mover, SavedForward, SavedTensors
from megalite.parallel.tiers import mover as mover_module
from megalite.parallel.tiers.saved_tensors import unpack
from megalite.parallel.zero.host_exchange import sum_on_host


class Event:
    def __init__(self, world: World, clock: dict[Any, int]) -> None:
        self.world, self.clock, self.over = world, clock, False

    def synchronize(self) -> None:
        self.world.host().learn(self.clock)

    def query(self) -> bool:
        return self.over


class Stream:
    """Of a device; or a thread of the host, which tells the streams that it gives work to what it knows."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: dict[Any, int] = {self: 0}

    def learn(self, clock: dict[Any, int]) -> None:
        for key, time in clock.items():
            self.clock[key] = max(self.clock.get(key, 0), time)

    def wait_stream(self, other: Stream) -> None:
        self.learn(self.world.host().clock)
        self.learn(other.clock)

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def record_event(self) -> Event:
        self.world.events.append(Event(self.world, dict(self.clock)))
        return self.world.events[-1]


class World:
    """One device and its host."""

    def __init__(self) -> None:
        self.hosts: dict[int, Stream] = {}
        self.compute = Stream(self)
        self.current = [self.compute]
        self.events: list[Event] = []
        self.uses: dict[int, list[tuple[Stream, int, bool]]] = {}
        self.races: list[str] = []
        self.recorded: list[tuple[int, Stream]] = []

    def host(self) -> Stream:
        return self.hosts.setdefault(threading.get_ident(), Stream(self))

    def use(self, x: Tensor, *, writes: bool, by: Stream | None = None) -> None:
        """By the current stream unless said otherwise."""
        who = by or self.current[-1]
        who.learn(self.host().clock)
        uses = self.uses.setdefault(x.data_ptr(), [])
        for other, time, wrote in uses:
            if (writes or wrote) and who.clock.get(other, 0) < time:
                self.races.append(f"{'write' if writes else 'read'} behind {'write' if wrote else 'read'}")
        who.clock[who] += 1
        uses.append((who, who.clock[who], writes))

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


class Noting(Mover):
    world: World

    def move(self, pairs: Any) -> None:
        for target, source in pairs:
            self.world.use(source, writes=False)
            self.world.use(target, writes=True)


@contextmanager
def device() -> Iterator[tuple[World, Mover]]:
    world = World()
    with (
        patch("torch.cuda.Stream", lambda device: Stream(world)),
        patch("torch.cuda.current_stream", lambda device=None: world.current[-1]),
        patch("torch.cuda.stream", world.entered),
        patch("torch.cuda.device", lambda device: nullcontext()),
        patch("torch.empty_like", lambda x, **_: torch.zeros(x.shape)),
        patch.object(mover_module, "host_bytes", lambda nbytes, pinned: torch.zeros(nbytes, dtype=torch.uint8)),
        patch.object(Tensor, "pin_memory", lambda self: self),
        patch.object(Tensor, "record_stream", lambda self, stream: world.recorded.append((self.data_ptr(), stream))),
    ):
        mover = Noting(torch.device("cuda"))
        mover.world = world
        yield world, mover


def out_and_back(world: World, mover: Mover) -> None:
    """Activations: to the host, their memory is used for something else, and back into other memory."""
    x = torch.zeros(4)
    world.use(x, writes=True)
    copy, left = mover.land(x)
    left.wait()
    world.use(x, writes=True)
    back, came = mover.bring(copy, after=left)
    came.wait()
    world.use(back, writes=False)


def leaving_alone(world: World, mover: Mover) -> None:
    """The same where nobody waits for the first copy but the second."""
    x = torch.zeros(4)
    world.use(x, writes=True)
    copy, left = mover.land(x, release=True)
    assert (x.data_ptr(), mover._streams[0]) in world.recorded  # the allocator gives its memory to nobody before
    back, came = mover.bring(copy, after=left)
    came.wait()
    world.use(back, writes=False)


def weights_of_a_layer(world: World, mover: Mover) -> None:
    """The memory had other contents; other ranks' parts arrive on the same stream; the host steps afterwards."""
    full, home = torch.zeros(4), torch.zeros(4)
    world.use(home, writes=True, by=world.host())
    world.use(full, writes=False)

    def collective() -> Arrival:
        world.use(full, writes=True)
        return Arrival()

    came = mover.to_device([(full, home)], start=collective)
    came.wait()
    world.use(full, writes=False)
    mover.settle()
    world.use(home, writes=True, by=world.host())


def sums_on_the_host(world: World, mover: Mover) -> None:
    gradient = torch.zeros(4)
    world.use(gradient, writes=True)
    landed, left = mover.land(gradient)
    mover.then(lambda: world.use(landed, writes=False, by=world.host()), left).synchronize()
    left.wait()
    world.use(gradient, writes=True)


def staging(world: World, mover: Mover) -> None:
    """Page-locked memory that is written again for the next step."""
    target, cast = torch.zeros(4), torch.zeros(4)
    for _ in range(2):
        world.use(cast, writes=True, by=world.host())
        came = mover.to_device([(target, cast)])
        came.wait()
        world.use(target, writes=False)
        came.synchronize()


def rows(world: World, mover: Mover) -> None:
    values = torch.zeros(4)
    world.use(values, writes=True, by=world.host())
    came = mover.upload(values)
    world.use(came, writes=False)
    assert (came.data_ptr(), world.compute) in world.recorded  # its memory is of the other stream


def exchange_over_the_host(world: World, mover: Mover) -> None:
    """Ranks sum what has just left for the host; a strided part is made dense there, by the host."""
    full, scratch = torch.zeros(8), torch.zeros(8)
    world.use(scratch, writes=True)
    mover.to_host([(full, scratch)]).wait()

    def upload(part: Tensor) -> Tensor:
        world.use(full, writes=False, by=world.host())
        return part

    with (
        patch("torch.empty", lambda size, **_: torch.zeros(size)),
        patch("megalite.parallel.zero.host_exchange.reduce_scatter_into", lambda own, x, axis, sizes: None),
        patch.multiple(mover, upload=upload, download=lambda x: x),
    ):
        sum_on_host(full, SimpleNamespace(size=2, rank=0), mover, [4, 4])  # type: ignore[arg-type]


SCENES: list[Callable[[World, Mover], None]] = [
    out_and_back, leaving_alone, weights_of_a_layer, sums_on_the_host, exchange_over_the_host, staging, rows,
]  # fmt: skip


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_nobody_reads_too_early_or_writes_too_soon(scene: Callable[[World, Mover], None]) -> None:
    with device() as (world, mover):
        scene(world, mover)
    assert world.races == []


@pytest.mark.parametrize("scene, where, what", [
    (out_and_back, Arrival, "wait"),
    (out_and_back, Stream, "wait_stream"),
    (leaving_alone, Stream, "wait_event"),
    (weights_of_a_layer, Stream, "wait_stream"),
    (weights_of_a_layer, Mover, "settle"),
    (exchange_over_the_host, Mover, "settle"),
    (sums_on_the_host, Event, "synchronize"),
    (staging, Arrival, "synchronize"),
    (rows, Stream, "wait_event"),
])  # fmt: skip
def test_a_wait_that_is_left_out_is_seen(scene: Callable[[World, Mover], None], where: type, what: str) -> None:
    with device() as (world, mover), patch.object(where, what, lambda self, *_: None):
        scene(world, mover)
    assert world.races


def test_both_ends_live_until_their_copy_has_ended() -> None:
    with device() as (world, mover):
        target, home = torch.zeros(4), torch.zeros(4)
        ends = weakref.ref(target), weakref.ref(home)
        arrival = mover.to_device([(target, home)])
        del target, home
        mover.to_host([])
        assert all(end() is not None for end in ends)
        arrival.wait()  # what the stream is given from here on comes behind the copy; the host does not
        assert ends[0]() is None and ends[1]() is not None
        for event in world.events:
            event.over = True
        mover.to_host([])
        assert ends[1]() is None


def test_what_torch_would_copy_twice_is_refused() -> None:
    """Between a device and its host it goes through memory that nobody waits for."""
    mover, x = Mover(torch.device("cpu")), torch.zeros(4, 4)
    for target, source in ((x[:, 0], torch.zeros(4)), (torch.zeros(4), x[0].double())):
        with pytest.raises(AssertionError):
            mover.to_device([(target, source)])


def test_a_layer_waits_for_its_own_copies_alone() -> None:
    """The event that a backward waits for was recorded before the copies of the layer before it began; a tensor that is
    saved twice is copied once."""
    waited: list[int] = []
    with device() as (world, mover):
        memory = SavedTensors(mover)
        first = SavedForward(memory, on_demand=True)
        second = SavedForward(memory, on_demand=True, before=first)
        x, y = torch.ones(4), torch.ones(4)
        with patch("torch.empty_like", lambda t, **_: torch.zeros(t.shape, dtype=t.dtype)):
            one, other = first.pack(x), [second.pack(y), second.pack(y), second.pack(y[:2])]
            first.evict(release=True)
            second.evict(release=True)
            assert len(world.events) == 2 and len({saved.piece for saved in other}) == 1
            with patch.object(Stream, "wait_event", lambda self, event: waited.append(world.events.index(event))):
                assert [unpack(saved).numel() for saved in other] == [4, 4, 2]
                assert len(world.events) == 4 and waited[-1] == 2, "those of the layer before are on their way"
                unpack(one)
    assert waited[-1] == 3
