"""The master weights that this rank owns, as the optimizer sees them: long flat tensors of one kind, or whole matrices.

    bucket      [ decayed weights                    | biases and norms      ]    segments of one kind
    rank 0      [ master shard             ]
    rank 1                                 [ shard   | master shard          ]    its slice, cut where the kind changes

A master shard knows its gradient, its compute weights, and which rectangles of which logical tensors it covers. What an
update rule gets to know of shards are parameter groups.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.comm import Axis, FlatPiece, TensorShard, shards_of_range
from megalite.config import Rates
from megalite.inventory import BucketSegment, BufferParameter, ParameterRange
from megalite.parallel.tiers import StateFile
from megalite.parallel.zero.bucket import Bucket, overlaps
from megalite.parallel.zero.param_remainders import ParamRemainders
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


@dataclass
class MasterShard:
    """Elements `start .. stop` of a family's flat buffer, of one segment of a bucket: one tensor of the optimizer.

    tensor: the fp32 (or wider) copy; the compute weights themselves if they have that dtype and one version.
    offloaded: master and moments are in host memory, or in `file`.
    remainders: the 16 bits that the bucket's bf16 weights lack, if the masters are stored that way.
    """

    buffers: ParameterBuffers
    bucket: Bucket
    segment: BucketSegment
    start: int
    stop: int
    tensor: Tensor
    offloaded: bool = False
    remainders: ParamRemainders | None = None
    file: StateFile | None = None

    @property
    def gradient(self) -> Tensor:
        """The reduced gradient, in the gradient dtype, shaped like `tensor`."""
        return self._of(self.bucket.gradient.reduced)

    def weights(self, version: int) -> Tensor:
        """The owned compute weights of a version, shaped like `tensor`."""
        return self._of(self.bucket.weights_of(version).shard)

    def _of(self, owned: Tensor) -> Tensor:
        first = self.bucket.owned_start
        return owned[self.start - first : self.stop - first].view(self.tensor.shape)

    def join(self) -> None:
        """Makes `tensor` readable and writable, for all shards of the bucket at once."""
        if self.remainders is not None:
            self.remainders.join()

    def pieces(self) -> Iterator[tuple[ParameterRange, slice, slice]]:
        """(A parameter's range; what the shard holds of it, in elements of the parameter; of the shard)."""
        return overlaps(self.segment.ranges, self.start, self.stop)

    def shards(self, prefix: str, values: Tensor, replica: int) -> Iterator[TensorShard]:
        """`values` (one per element of the shard) as rectangles of the logical tensors `prefix + name`."""
        flat = values.view(-1)
        for range_, inside, here in self.pieces():
            entry, name = range_.entry, prefix + range_.entry.name
            yield from shards_of_range(name, entry.placement, entry.shape, flat[here], inside.start, replica=replica)


def cut_master_shards(
    buffers: ParameterBuffers,
    offload_fraction: float = 0.0,
    store_param_remainders: bool = False,
    file: StateFile | None = None,
    file_fraction: float = 0.0,
) -> list[MasterShard]:
    """The master shards of one family of a stage, in buffer order.

    offload_fraction: whole buckets are offloaded until this fraction is reached, to `file` until `file_fraction` is.
        Matrices that are updated whole stay on a GPU, and in the memory of a CPU rank unless they go to the file.
    store_param_remainders: as in `ShardedOptimizer`.
    """
    separate = buffers.main_dtype != buffers.dtype or buffers.num_versions > 1
    owned = sum(b.owned_stop - b.owned_start for b in buffers.buckets)
    masters: list[MasterShard] = []
    mover, moved = buffers.rank_memory.mover, 0
    for bucket in buffers.buckets:
        whole = any(segment.whole for segment in bucket.plan.segments)
        filed = moved < file_fraction * owned and (not mover.apart or not whole)
        offload = filed or (not whole and moved < offload_fraction * owned)
        moved += bucket.owned_stop - bucket.owned_start if offload else 0
        master = bucket.weights[0].shard
        remainders = None
        if offload and buffers.on_host and not filed and not separate:
            pass  # the weights are on the host: they are the masters
        elif offload:
            space = file if filed and file else mover
            master = space.empty(master.shape, buffers.main_dtype).copy_(master)
        elif store_param_remainders and buffers.dtype == torch.bfloat16 and buffers.num_versions == 1:
            remainders = ParamRemainders(master)
            master = remainders.masters
        elif separate or (buffers.on_host and mover.apart):
            master = master.to(buffers.device, buffers.main_dtype, copy=True)
        where = file if filed else None
        for segment, inside, own in overlaps(bucket.plan.segments, bucket.owned_start, bucket.owned_stop):
            start, stop, values = segment.start + inside.start, segment.start + inside.stop, master[own]
            if segment.whole:
                entry = segment.ranges[0].entry
                stop = start + entry.numel
                values = values[: entry.numel].view(entry.shape)
            masters.append(MasterShard(buffers, bucket, segment, start, stop, values, offload, remainders, where))
    return masters


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
