"""Segments and the update rule that steps them, on the device or on the host.

    device      gradient -------------------> update          a bucket at a time where bf16 gradients are widened for it
    remainder   join -> update -> split, a bucket at a time
    host        gradient --copy to host--+
                (bucket by bucket)       +--> update --copy back-->

Copies to the host run on a stream of their own: behind the device's update, and behind one another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.comm import Axis, LocalParameter, Piece, Statistic
from megalite.parallel.zero.buckets import ParameterBuffers
from megalite.parallel.zero.gradient_sync import Bucket
from megalite.parallel.zero.segments import Segment

ParamGroup = dict[str, Any]
"""What `make_optimizer` receives: `params` (list of tensors), `decay` (bool: weight decay applies), `whole` (bool: the
tensors have their parameter's shape and must be updated as matrices) and, for whole groups, `placements` (their places
in the logical tensors). For rules that keep statistics of a parameter: `parameters` (those of which some rank of
`shard_axis` holds a part here: the same list on each of its ranks) and `pieces` (for each tensor, what lies in it).
`cut_axes`: those that may cut the family's parameters."""


class UpdateRule(Protocol):
    """What a step needs of an optimizer; `torch.optim.Optimizer` has it."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Tensor, Any]: ...

    def step(self) -> Any: ...


class Home(NamedTuple):
    """Where a parameter of a group's `parameters` comes from."""

    parameter: LocalParameter
    buffers: ParameterBuffers
    bucket: Bucket


MakeOptimizer = Callable[[list[ParamGroup]], Any]
"""Builds an `UpdateRule` (or a `torch.optim.Optimizer`) over parameter groups."""


class DevicePart:
    """Segments whose masters are where their gradients are."""

    def __init__(self, segments: Sequence[Segment], make_optimizer: MakeOptimizer) -> None:
        self.segments = segments
        self.homes = find_homes(segments)
        self.optimizer: UpdateRule = make_optimizer(make_groups(segments, self.homes))

    def fetch(self) -> None:
        """Nothing to fetch."""

    def gradient(self, segment: Segment) -> Tensor:
        """The gradient where the master is, in any float dtype; may be written."""
        return segment.gradient

    def update(self, *, lr: float, weight_decay: float, grad_scale: float | Tensor) -> None:
        """One optimizer step on `grad_scale` x gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        for segment in self.segments:
            gradient = self.gradient(segment)
            if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
                gradient.mul_(grad_scale)
            segment.master.grad = gradient.to(segment.master.dtype)
        self.optimizer.step()
        for segment in self.segments:
            segment.master.grad = None

    def statistics(self) -> Iterator[tuple[Statistic, Home]]:
        """State that is not one number an element: the rule's own tensors, which all ranks of the shard axis hold."""
        if hasattr(self.optimizer, "statistics"):
            for statistic in self.optimizer.statistics():
                yield statistic, self.homes[statistic.parameter]

    def set_step_count(self, count: float) -> None:
        """How many steps have been made, as the update rule remembers it."""
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].fill_(count) if isinstance(state["step"], Tensor) else count
        for group in self.optimizer.param_groups:
            if "step" in group:  # apex counts per group
                group["step"] = int(count)


class HostPart(DevicePart):
    """One bucket's segments whose masters and moments are in host memory."""

    def __init__(self, segments: Sequence[Segment], make_optimizer: MakeOptimizer) -> None:
        super().__init__(segments, make_optimizer)
        device = segments[0].buffers.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: Any = None
        self._received: dict[int, Tensor] = {}

    def fetch(self) -> None:
        """Starts to copy the gradients to the host."""
        # A gradient that is not in memory is made here, and would belong to the other stream for good.
        sources = [segment.gradient for segment in self.segments]
        if self._stream is None:
            self._copy(sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(sources)
            self._arrived = self._stream.record_event()

    def gradient(self, segment: Segment) -> Tensor:
        return self._received[id(segment)]

    def update(self, *, lr: float, weight_decay: float, grad_scale: float | Tensor) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()
        if isinstance(grad_scale, Tensor):
            grad_scale = grad_scale.cpu()
        super().update(lr=lr, weight_decay=weight_decay, grad_scale=grad_scale)
        if self._stream is None:
            self._received.clear()

    def _copy(self, sources: Sequence[Tensor]) -> None:
        for segment, source in zip(self.segments, sources, strict=True):
            if id(segment) not in self._received:
                pinned = source.is_cuda
                self._received[id(segment)] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            self._received[id(segment)].copy_(source, non_blocking=True)


class RemainderPart(DevicePart):
    """One bucket's segments whose masters are put together for the step."""

    def update(self, *, lr: float, weight_decay: float, grad_scale: float | Tensor) -> None:
        remainder = self.segments[0].remainder
        assert remainder is not None
        remainder.join()
        super().update(lr=lr, weight_decay=weight_decay, grad_scale=grad_scale)
        remainder.split()


def make_parts(segments: Sequence[Segment], make_optimizer: MakeOptimizer) -> list[DevicePart]:
    """What is on the device first, each family in one piece, or a bucket at a time where something exists for the step
    only (masters that are put together, gradients that are widened); then one part a bucket for the host."""
    here = [s for s in segments if not s.offloaded]
    plain = [s for s in here if s.remainder is None and s.bucket.dtype == s.master.dtype]
    parts = [DevicePart(members, make_optimizer) for members in _grouped(plain, _family)]
    for members in _grouped((s for s in here if s.remainder is None and s.bucket.dtype != s.master.dtype), _bucket):
        parts.append(DevicePart(members, make_optimizer))
    for members in _grouped((s for s in here if s.remainder is not None), _bucket):
        parts.append(RemainderPart(members, make_optimizer))
    for members in _grouped((s for s in segments if s.offloaded), _bucket):
        parts.append(HostPart(members, make_optimizer))
    return parts


def _family(segment: Segment) -> Hashable:
    return segment.buffers.axes.name, segment.master.dtype


def _bucket(segment: Segment) -> Hashable:
    return id(segment.bucket)


def _grouped(segments: Iterable[Segment], key: Callable[[Segment], Hashable]) -> list[list[Segment]]:
    groups: dict[Hashable, list[Segment]] = {}
    for segment in segments:
        groups.setdefault(key(segment), []).append(segment)
    return list(groups.values())


def find_homes(segments: Sequence[Segment]) -> list[Home]:
    """All parameters of the buckets that the segments are slices of: every rank of the shard axis has a slice of
    each."""
    buckets = {id(s.bucket): s for s in segments}
    return [
        Home(LocalParameter(slot.entry.name, slot.entry.shape, slot.entry.placement), s.buffers, s.bucket)
        for s in buckets.values()
        for slot in s.bucket.plan.slots
    ]


def make_groups(segments: Sequence[Segment], homes: Sequence[Home]) -> list[ParamGroup]:
    """Parameter groups: one for each combination of decay and shard rule."""
    groups: dict[tuple[bool, bool], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.run.kind.no_decay, segment.run.whole), []).append(segment)
    numbers = {(id(home.bucket), home.parameter.name): number for number, home in enumerate(homes)}
    return [
        {
            "params": [s.master for s in members],
            "decay": not no_decay,
            "whole": whole,
            "placements": [s.run.slots[0].entry.placement for s in members] if whole else [],
            "parameters": [home.parameter for home in homes],
            "pieces": [list(pieces_of(s, numbers)) for s in members],
            "shard_axis": shard_axis(members[0].buffers),
            "cut_axes": members[0].buffers.axes.cut,
        }
        for (no_decay, whole), members in groups.items()
    ]


def pieces_of(segment: Segment, numbers: Mapping[tuple[int, str], int]) -> Iterator[Piece]:
    """What lies in a segment's tensor."""
    for slot, start, stop in segment.pieces():
        number = numbers[id(segment.bucket), slot.entry.name]
        yield Piece(number, start - slot.start, stop - slot.start, start - segment.start)


def shard_axis(buffers: ParameterBuffers) -> Axis:
    """The ranks that own other slices of the same parameters."""
    return buffers.axes.shard if buffers.options.stage else Axis.single("shard")
