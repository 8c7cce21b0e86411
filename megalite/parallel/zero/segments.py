"""What this rank owns, as the optimizer sees it: long flat tensors of one kind, or whole matrices.

A segment is a run of a bucket (`inventory.buckets.Run`) cut to the owned slice. It knows where its master, its gradient
and its compute weights are, and which rectangles of which logical tensors it covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.comm import TensorShard, shards_of_range
from megalite.inventory import Run, Slot
from megalite.parallel.zero.buckets import ParameterBuffers
from megalite.parallel.zero.gradient_sync import Bucket
from megalite.parallel.zero.remainder import RemainderMaster


@dataclass
class Segment:
    """A piece of a run that this rank owns: one tensor of the optimizer.

    master: the one fp32 (or wider) copy; the compute weights themselves where they already have that dtype and one
    version. offloaded: master and moments are in host memory. remainder: what the master is put together from, where it
    is kept in 16 bits.
    """

    buffers: ParameterBuffers
    bucket: Bucket
    run: Run
    start: int
    stop: int
    master: Tensor
    offloaded: bool = False
    remainder: RemainderMaster | None = None

    @property
    def gradient(self) -> Tensor:
        """The reduced gradient, in the gradient dtype, shaped like `master`."""
        flat = self.bucket.gradient[self.start - self.bucket.owned_start : self.stop - self.bucket.owned_start]
        return flat.view(self.master.shape)

    def weights(self, version: int) -> Tensor:
        """The owned compute weights of a version, shaped like `master`."""
        shard = self.bucket.weights[version].shard
        flat = shard[self.start - self.bucket.owned_start : self.stop - self.bucket.owned_start]
        return flat.view(self.master.shape)

    def pieces(self) -> Iterator[tuple[Slot, int, int]]:
        """(slot, start, stop) of every parameter's part of the segment, in elements of the flat buffer."""
        for slot in self.run.slots:
            start, stop = max(slot.start, self.start), min(slot.stop, self.stop)
            if start < stop:
                yield slot, start, stop

    def shards(self, prefix: str, values: Tensor, replica: int) -> Iterator[TensorShard]:
        """`values` (one per element of the segment) as rectangles of the logical tensors `prefix + name`."""
        flat = values.view(-1)
        for slot, start, stop in self.pieces():
            part = flat[start - self.start : stop - self.start]
            entry = slot.entry
            yield from shards_of_range(
                prefix + entry.name, entry.placement, entry.shape, part, start - slot.start, replica=replica
            )


def cut_segments(
    buffers: ParameterBuffers, offload_fraction: float = 0.0, store_param_remainders: bool = False
) -> list[Segment]:
    """The segments of one stage, in buffer order; whole buckets are offloaded until the fraction is reached.

    (Matrices that need other tensor-parallel ranks for their update stay on the device.)
    """
    separate = buffers.main_dtype != buffers.dtype or buffers.num_versions > 1
    owned = sum(b.owned_stop - b.owned_start for b in buffers.buckets)
    segments: list[Segment] = []
    moved = 0
    for bucket in buffers.buckets:
        whole = any(run.whole for run in bucket.plan.runs)
        offload = not whole and moved < offload_fraction * owned
        moved += bucket.owned_stop - bucket.owned_start if offload else 0
        master = bucket.weights[0].shard
        remainder = None
        if offload:
            master = host_copy(master, buffers.main_dtype)
        elif store_param_remainders and buffers.dtype == torch.bfloat16 and buffers.num_versions == 1:
            remainder = RemainderMaster(master)
            master = remainder.values
        elif separate:
            master = master.to(buffers.main_dtype, copy=True)
        for run in bucket.plan.runs:
            start, stop = max(run.start, bucket.owned_start), min(run.stop, bucket.owned_stop)
            if start >= stop:
                continue
            values = master[start - bucket.owned_start : stop - bucket.owned_start]
            if run.whole:
                entry = run.slots[0].entry
                stop = start + entry.numel
                values = values[: entry.numel].view(entry.shape)
            segments.append(Segment(buffers, bucket, run, start, stop, values, offload, remainder))
    return segments


def host_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in host memory, page-locked where a device will read it."""
    copy = torch.empty(x.shape, dtype=dtype, pin_memory=x.is_cuda)
    return copy.copy_(x)
