"""Parameter groups: what an update rule gets to know about the master shards that it updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megalite.comm import Axis, FlatPiece
from megalite.config import Rates
from megalite.inventory import BufferParameter
from megalite.parallel.zero.bucket import Bucket
from megalite.parallel.zero.master_shards import MasterShard
from megalite.parallel.zero.parameter_buffers import ParameterBuffers

ParamGroup = dict[str, Any]
"""A group of tensors that are updated alike.

params: the tensors.
decay: whether weight decay applies.
rates: their own factors of learning rate, weight decay and epsilon.
whole: whether the tensors have their parameter's shape and must be updated as matrices.
placements: of whole tensors: their places in the logical tensors.
parameters: all parameters of which any rank of `shard_axis` holds a part: the same list on each of its ranks, for rules
    that keep statistics of a parameter.
pieces: for each tensor, which ranges of `parameters` it holds.
shard_axis: the axis over which ZeRO shards the group.
sinks: (parameter, its sink) of all buckets of these families: the same list on each rank of `shard_axis`.
copies: the axes whose ranks compute gradients of other tokens: that of the shards, and that of their copies.
cut_axes: the axes that may cut the family's parameters.
"""

MakeOptimizer = Callable[[list[ParamGroup]], Any]
"""Builds an `UpdateRule` (or a `torch.optim.Optimizer`) over parameter groups."""


class BucketParameter(NamedTuple):
    """A parameter of which this rank may own a part, and the bucket that it lies in."""

    parameter: BufferParameter
    buffers: ParameterBuffers
    bucket: Bucket


def bucket_parameters(masters: Sequence[MasterShard]) -> list[BucketParameter]:
    """All parameters of the shards' buckets. Every rank of the shard axis has a slice of each bucket, so all get
    the same list."""
    buckets = {id(master.bucket): master for master in masters}
    return [
        BucketParameter(range_.entry, m.buffers, m.bucket) for m in buckets.values() for range_ in m.bucket.plan.ranges
    ]


def make_param_groups(masters: Sequence[MasterShard], parameters: Sequence[BucketParameter]) -> list[ParamGroup]:
    """One group for each combination of `decay`, `rates` and `whole`."""
    groups: dict[tuple[bool, Rates, bool], list[MasterShard]] = {}
    for master in masters:
        kind = master.segment.kind
        groups.setdefault((kind.no_decay, kind.rates, master.segment.whole), []).append(master)
    sinks = [
        (range_.entry, sink)
        for buffers in {id(master.buffers): master.buffers for master in masters}.values()
        for bucket in buffers.buckets
        for range_, sink in zip(bucket.plan.ranges, bucket.sinks, strict=True)
    ]
    numbers = {(id(p.bucket), p.parameter.name): number for number, p in enumerate(parameters)}
    return [
        {
            "params": [m.tensor for m in members],
            "decay": not no_decay,
            "rates": rates,
            "whole": whole,
            "placements": [m.segment.ranges[0].entry.placement for m in members] if whole else [],
            "parameters": [p.parameter for p in parameters],
            "sinks": sinks,
            "pieces": [list(_pieces_of(m, numbers)) for m in members],
            "shard_axis": members[0].buffers.axes.shard if members[0].buffers.options.stage else Axis.single("shard"),
            "copies": (members[0].buffers.axes.shard, members[0].buffers.axes.replicate),
            "cut_axes": members[0].buffers.axes.cut,
        }
        for (no_decay, rates, whole), members in groups.items()
    ]


def _pieces_of(master: MasterShard, numbers: Mapping[tuple[int, str], int]) -> Iterator[FlatPiece]:
    for range_, inside, here in master.pieces():
        yield FlatPiece(numbers[id(master.bucket), range_.entry.name], inside.start, inside.stop, here.start)
