"""Sub-optimizers of masters and moments that are stored elsewhere than plainly on the device.

    DeviceOptimizer       gradient ------------------------> rule.step()                             (sub_optimizers.py)
    RemainderOptimizer    weights, 16 bits --> masters ----> rule.step() ----> weights, 16 bits      a bucket at a time
    HostOptimizer         gradient --copy to the host -----> rule.step()                             a bucket at a time
    FileOptimizer         the same; while a bucket is stepped the next one is read                   a bucket at a time

Copies to the host overlap the device's update.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from megalite.faults import fault_point
from megalite.parallel.tiers import Arrival
from megalite.parallel.zero.master_shards import MakeOptimizer, MasterShard
from megalite.parallel.zero.sub_optimizers import DeviceOptimizer


class HostOptimizer(DeviceOptimizer):
    """Masters and moments of one bucket in host memory."""

    def __init__(self, masters: Sequence[MasterShard], make_optimizer: MakeOptimizer) -> None:
        super().__init__(masters, make_optimizer)
        self._mover = masters[0].buffers.rank_memory.mover
        self._places: dict[Hashable, Tensor] = {}
        self._numbers: dict[str, Any] = {}
        self._arrived = Arrival()
        self._writes: dict[int, Arrival] = {}

    def fetch_gradients(self, **numbers: Any) -> None:
        self._numbers = numbers
        if self._mover.apart:
            pairs = self._copies([(master, master.gradient) for master in self.masters if master.gradient.is_cuda])
            for name, value in self._numbers.items():
                if isinstance(value, Tensor) and value.is_cuda:
                    self._numbers[name] = self._on_host(name, value)
                    pairs.append((self._numbers[name], value))
            self._arrived = self._mover.to_host(pairs)

    def keep_gradients(self) -> None:
        """From now on the next batch may overwrite the gradients: there are copies, or what the device does waits for
        them."""
        if not self._mover.apart:
            self._arrived = self._mover.to_host(self._copies([(master, master.gradient) for master in self.masters]))
        self._arrived.wait()

    def begin_step(self, **numbers: Any) -> None:
        self._arrived.synchronize()
        super().begin_step(**numbers | self._numbers)

    def end_step(self) -> None:
        super().end_step()
        if not self._mover.apart:
            self._places.clear()

    def _write(self, master: MasterShard, version: int, *, as_masters: bool) -> None:
        """Casts on the host, then copies to the device."""
        target = master.weights(version)
        if not target.is_cuda or self.corrects:
            super()._write(master, version, as_masters=as_masters)
            return
        key = id(master)
        if key in self._writes:
            self._writes[key].synchronize()
        cast = self._on_host(("cast", key), target).copy_(master.tensor)
        self._writes[key] = self._mover.to_device([(target, cast)])

    def finish_writes(self) -> None:
        for arrival in self._writes.values():
            arrival.wait()

    def _gradient(self, master: MasterShard) -> Tensor:
        received = self._places.get(id(master))
        return super()._gradient(master) if received is None else received

    def _on_host(self, key: Hashable, like: Tensor) -> Tensor:
        """Where a number, a gradient (by its master) or a cast is on the host, from its first time on."""
        if key not in self._places:
            self._places[key] = self._mover.empty(like.shape, like.dtype)
        return self._places[key]

    def _copies(self, gradients: Sequence[tuple[MasterShard, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """(Where it goes on the host, gradient) of each."""
        return [(self._on_host(id(master), gradient), gradient) for master, gradient in gradients]


class FileOptimizer(HostOptimizer):
    """Masters and moments of one bucket in a file. following: what is stepped next."""

    following: FileOptimizer | None = None

    def __init__(self, masters: Sequence[MasterShard], make_optimizer: MakeOptimizer) -> None:
        super().__init__(masters, make_optimizer)
        assert masters[0].file is not None
        self._file = masters[0].file
        self._take_in()

    @property
    def regions(self) -> list[mmap.mmap]:
        """Mapped regions that hold its masters and its state."""
        tensors = [*(master.tensor for master in self.masters), *self._state()]
        regions = (self._file.region_of(tensor) for tensor in tensors)
        return list({id(region): region for region in regions if region is not None}.values())

    def begin_step(self, **numbers: Any) -> None:
        if self.following is not None:
            self._file.announce(self.following.regions)
        super().begin_step(**numbers)

    def end_step(self) -> None:
        super().end_step()
        self._take_in()
        self._file.let_go(self.regions)
        fault_point("opt_bucket")

    def write_weights(self, version: int, *, as_masters: bool = False) -> None:
        super().write_weights(version, as_masters=as_masters)
        self._file.let_go(self.regions)

    def _take_in(self) -> None:
        """Moves what the rule has allocated into the file: rules make their moments in their first step."""
        for tensor in self._state():
            self._file.take_in(tensor)

    def _state(self) -> Iterator[Tensor]:
        """The rule's tensors that are as large as masters. (The rows and columns of Adafactor are not.)"""
        for master in self.masters:
            yield from self.moments(master).values()
        yield from getattr(self.rule, "last_steps", {}).values()
        yield from (statistic.values for statistic, _ in self.statistics() if statistic.whole)


class RemainderOptimizer(DeviceOptimizer):
    """Masters of one bucket, joined from weights and remainders for the step only (`ParamRemainders`)."""

    def begin_step(self, **numbers: Any) -> None:
        self.masters[0].join()
        super().begin_step(**numbers)

    def end_step(self) -> None:
        super().end_step()
        self.write_weights(0)

    def write_weights(self, version: int, *, as_masters: bool = False) -> None:
        assert self.masters[0].remainders is not None
        self.masters[0].remainders.split()


def make_sub_optimizers(masters: Sequence[MasterShard], make_optimizer: MakeOptimizer) -> list[DeviceOptimizer]:
    """The sub-optimizers in the order in which they step, those on the device before those on the host.

    On the device there is one per family and dtype, or one per bucket if something exists only for the step (joined
    masters, widened gradients); on the host there is one per bucket.
    """
    groups: dict[tuple[int, type[DeviceOptimizer], Hashable], list[MasterShard]] = {}
    for master in masters:
        groups.setdefault(_place(master), []).append(master)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    made = [kind(group, make_optimizer) for (_, kind, _), group in ordered]
    in_file = [sub for sub in made if isinstance(sub, FileOptimizer)]
    for sub, following in pairwise(in_file):
        sub.following = following
    return made


def _place(master: MasterShard) -> tuple[int, type[DeviceOptimizer], Hashable]:
    """(Order of the step, class, group) of the sub-optimizer that a master belongs to."""
    if master.file is not None:
        return 4, FileOptimizer, id(master.bucket)
    if master.offloaded:
        return 3, HostOptimizer, id(master.bucket)
    if master.remainders is not None:
        return 2, RemainderOptimizer, id(master.bucket)
    if master.bucket.gradient_dtype != master.tensor.dtype or master.buffers.on_host:
        return 1, DeviceOptimizer, id(master.bucket)
    return 0, DeviceOptimizer, (master.buffers.axes.name, master.tensor.dtype)
