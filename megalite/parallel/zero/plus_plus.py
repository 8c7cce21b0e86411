"""ZeRO++ (Wang et al. 2023, arXiv:2306.10209): ZeRO-3 that sends less, above all between nodes.

    Z = 2 ranks a partition (a node), K = 2 partitions; a rank owns a quarter of a bucket of M elements

    gather, first of a step     all ranks    M in 8 bits        each rank keeps its half (1/Z) of the result until the
    gather, all others          partition    the kept halves    weights change
    gradients, first hop        partition    M in 4 bits        a rank sums what both of its partition's owners need
    gradients, second hop       across       M/Z in 4 bits      and the owner sums those of the K partitions

A block is 64 elements. Parameters begin at multiples of that, so no block has elements of two, and a weight is rounded
alike at every layout. Weights: the block's least element and 1/254 of its range, in the dtype of the weights; at most
half of that (and its own rounding) is lost. Gradients: 1/7 of the block's largest, in the dtype of the gradient; at
most half of that, in each hop. What is not finite stays so.

Proof: `tests/equivalence/test_zero_plus_plus.py` (a training equals its emulation in one process, partitions
have the bits of plain ZeRO-3, bytes are those of the paper).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megalite.comm import (
    Axis,
    Exchange,
    FamilyAxes,
    Handle,
    ParallelMesh,
    all_gather_into,
    neighbours,
    start_all_to_all_rows,
)
from megalite.config import ZeroPlusPlus
from megalite.inventory import ALIGNMENT, AXIS_FAMILIES, BucketPlan
from megalite.parallel.zero.unshard import BucketWeights

TIE = 1e-3
"""Of a step, that a gradient may be beyond the middle of two codes and still goes to the one nearer zero."""


@dataclass(frozen=True)
class DividedAxes(FamilyAxes):
    """The axes of a family under ZeRO++: neighbours on `shard`, and the ranks at this place among theirs."""

    near: Axis
    far: Axis


def divided(axes: FamilyAxes, mesh: ParallelMesh, given: ZeroPlusPlus) -> DividedAxes:
    """The axes of a family with those of partitions, as far as messages travel there. Collective at first use."""
    size, names, shard = given.zero_hpz_partition_size, AXIS_FAMILIES[axes.name].shard, axes.shard.name
    near = far = Axis.single("near")
    if size > 1:
        near = mesh.over(*names, apart=f"near {shard}", parts=lambda ranks: neighbours(ranks, size))
    if given.zero_quantized_gradients:
        far = mesh.over(*names, apart=f"far {shard}", parts=lambda ranks: [ranks[i::size] for i in range(size)])
    return DividedAxes(**vars(axes), near=near, far=far)


class PartitionedWeights(BucketWeights):
    """A bucket's weights, of which a rank keeps a part between a step's first gather and its update.

    kept: that part, or None.
    """

    def __init__(self, full: Tensor, owned: slice, *, axes: DividedAxes, plan: BucketPlan, quantized: bool) -> None:
        super().__init__(full, owned, axis=axes.shard, stage=3, sizes=plan.sizes)
        self._near, self._quantized = axes.near, quantized
        across = axes.shard.size // axes.near.size
        self._parts = [sum(plan.sizes[i : i + across]) for i in range(0, axes.shard.size, across)]
        self.kept: Tensor | None = None

    def _fetch(self, *, async_op: bool) -> Handle:
        full = self.full.data
        if self.kept is not None:
            return all_gather_into(full, self.kept, self._near, sizes=self._parts, async_op=async_op)
        if self._quantized:
            rows = rounded_to_8_bits(self.shard)
            blocks = rows.new_empty(full.numel() // ALIGNMENT, rows.shape[1])
            sizes = [size // ALIGNMENT for size in self._sizes]
            work = all_gather_into(blocks, rows, self.axis, sizes=sizes, async_op=async_op)
            return Exchange([work], [], lambda: self._keep(from_8_bits(blocks, full.dtype)))
        return Exchange([super()._fetch(async_op=async_op)], [], self._keep)

    def _keep(self, arrived: Tensor | None = None) -> None:
        if arrived is not None:
            self.full.data.copy_(arrived)
        if self._near.size > 1:
            end = list(accumulate(self._parts))[self._near.rank]
            self.kept = self.full.data[end - self._parts[self._near.rank] : end].clone()

    def updated(self, *, async_op: bool) -> None:
        self.kept = None
        super().updated(async_op=async_op)


def scatter_in_4_bits(
    axes: DividedAxes, out: Tensor, full: Tensor, axis: Axis, *, sizes: Sequence[int], async_op: bool
) -> Handle:
    """`reduce_scatter_into` of a gradient: sends to each rank of the partition what the owners at its place need, then
    from place to place."""
    near, far = axes.near, axes.far
    parts = full.view(-1, ALIGNMENT).split([size // ALIGNMENT for size in sizes])
    places = [parts[place :: near.size] for place in range(near.size)]  # owners there, one a partition
    blocks = [[len(part) for part in place] for place in places]
    hops = [(near, [[sum(each) for each in blocks]] * near.size), (far, [blocks[near.rank]] * far.size)]
    (first, traffic), *more = [hop for hop in hops if hop[0].size > 1]
    rows = torch.cat([part for place in places for part in place])
    arrived, work = start_all_to_all_rows(rounded_to_4_bits(rows), traffic, first)

    def finish() -> None:
        total = added(arrived, first.size, full.dtype)
        for across, traffic in more:
            back, sent = start_all_to_all_rows(rounded_to_4_bits(total), traffic, across)
            sent.wait()
            total = added(back, across.size, full.dtype)
        out.copy_(total.view(-1))

    return Exchange([work], [], finish)


def rounded_to_8_bits(x: Tensor) -> Tensor:
    """Elements of whole blocks -> `[blocks, 64 + 2 numbers of x's dtype]` bytes: codes, least element, 1/254 of the
    range (an even number: zero is a code of a block that reaches as far on both sides of it)."""
    blocks = x.reshape(-1, ALIGNMENT)
    least, most = blocks.aminmax(dim=1, keepdim=True)
    wide = torch.promote_types(x.dtype, torch.float32)
    step = ((most.to(wide) - least.to(wide)) / 254).to(x.dtype)
    unit = torch.where(step == 0, 1, step).to(wide)
    codes = ((blocks.to(wide) - least.to(wide)) / unit).round_().clamp_(0, 254).to(torch.uint8)
    return torch.cat([codes, _bytes(least), _bytes(step)], dim=1)


def from_8_bits(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements, flat. dtype: that they had."""
    wide = torch.promote_types(dtype, torch.float32)
    bounds = rows[:, ALIGNMENT:].contiguous().view(dtype).to(wide)
    return (bounds[:, :1] + rows[:, :ALIGNMENT].to(wide) * bounds[:, 1:]).to(dtype).view(-1)


def rounded_to_4_bits(blocks: Tensor) -> Tensor:
    """`[blocks, 64]` -> `[blocks, 32 + a number of their dtype]` bytes: two codes in each, 1/7 of the largest."""
    step = blocks.abs().amax(dim=1, keepdim=True) / 7
    parts = (blocks / torch.where(step == 0, 1, step)).to(torch.promote_types(step.dtype, torch.float32))
    # A sum of codes is often just half of the largest sum: 3.5, whose last bit would decide. It goes toward zero.
    codes = (parts - parts.sign() * TIE).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
    half = ALIGNMENT // 2
    return torch.cat([codes[:, :half] | codes[:, half:] << 4, _bytes(step)], dim=1)


def added(rows: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`[count * blocks, 32 + ...]` -> `[blocks, 64]`: the sum of what `count` ranks sent, in their order."""
    half = ALIGNMENT // 2
    step = rows[:, half:].contiguous().view(dtype)
    codes = torch.cat([rows[:, :half] & 15, rows[:, :half] >> 4], dim=1).to(dtype).sub_(8)
    first, *others = (codes * step).chunk(count) if len(rows) else [codes]
    for part in others:
        first += part
    return first


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
