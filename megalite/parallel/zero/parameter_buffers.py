"""The parameters of a stage, family by family, their gradients, and the buckets that both are cut into.

weights, version 0   [ layer 3 | layer 2 | layer 1 | embedding ]    compute dtype, one buffer per weight version
gradients            [ bucket 0 |  bucket 1  |     bucket 2    ]    main dtype (fp32; fp64 for fp64 parameters)
                       complete first            complete last
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megalite.comm import FamilyAxes
from megalite.config import Rates
from megalite.inventory import AXIS_FAMILIES, BufferParameter, placement_of, plan_buckets
from megalite.parallel.zero.bucket import Bucket, overlaps
from megalite.parallel.zero.flat_weights import FlatWeights, move_parameter
from megalite.parallel.zero.host_weights import HostedFlatWeights
from megalite.parallel.zero.options import StageOptions, ZeroOptions
from megalite.parallel.zero.rank_memory import RankMemory
from megalite.parallel.zero.reducer import GradientReducer, ReductionOrder

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class ParameterBuffers:
    """`weights` (a `FlatWeights`) and `gradients` (a `GradientReducer`) of one family, over the same `buckets`.

    versions: for each weight version the (logical name, parameter) of one dtype in forward order; the same names and
        shapes in each. Each parameter carries `.placement` (`inventory.ParameterPlacement`) and may carry `.sink_uses`
        (contributions a micro-batch, 1).
    axes: of the family: those that cut its parameters (and sum partial gradients), over which ZeRO shards, and along
        which the shards are copied.
    pipeline_stage: that holds the parameters.
    memory: of the rank (None: these are its only buffers, on the device where the parameters are).
    order: starts the reductions, shared with other families of the stage over the same axes.
    frozen: nothing trains them: `buckets` is empty, and those of `frozen` have weights alone.
    on_host: whether the home of the weights is the host. main_dtype: the wider of fp32 and that of the parameters: what
        masters and moments are kept in.
    """

    def __init__(
        self,
        versions: Sequence[NamedParameters],
        *,
        axes: FamilyAxes,
        options: ZeroOptions,
        pipeline_stage: StageOptions | None = None,
        memory: RankMemory | None = None,
        order: ReductionOrder | None = None,
        frozen: bool = False,
    ) -> None:
        first, stage = versions[0], pipeline_stage or StageOptions()
        assert all([n for n, _ in v] == [n for n, _ in first] for v in versions), "versions of a stage differ"
        self.axes, self.options, self.pipeline_stage = axes, options, stage
        self.num_versions = len(versions)
        self.dtype = first[0][1].dtype if first else torch.float32
        assert all(p.dtype == self.dtype for v in versions for _, p in v), "parameters of a family have one dtype"
        self.rank_memory = memory or RankMemory(first[0][1].device if first else torch.device("cpu"), options)
        self.device, self.on_host = self.rank_memory.device, self.rank_memory.tier is not None
        self.main_dtype = torch.promote_types(self.dtype, torch.float32)
        halved = options.grad_reduce_in_bf16 and self.dtype == torch.bfloat16
        self.gradient_dtype = torch.bfloat16 if halved else self.main_dtype
        entries = [
            BufferParameter(
                i,
                name,
                tuple(p.shape),
                placement_of(p),
                whole=stage.whole is not None and stage.whole(name, p.dim()),
                rates=Rates() if stage.rates is None else stage.rates(name, placement_of(p).decay),
            )
            for i, (name, p) in enumerate(first)
        ]
        held: list[Bucket] = self._make_buckets(entries, stage.tied)
        self.buckets, self.frozen = ([], held) if frozen else (held, [])
        self.weights = (HostedFlatWeights if self.on_host else FlatWeights)(
            held,
            [[parameter for _, parameter in version] for version in versions],
            axes=axes,
            options=options,
            memory=self.rank_memory,
            fill=stage.fill,
            dtype=self.dtype,
        )
        self.gradients = GradientReducer(
            self.buckets,
            [[version[i][1] for version in versions] for i in range(len(first))],
            axes=axes,
            zero_stage=options.stage,
            pipeline_stage=stage,
            order=order or ReductionOrder(options),
            pool=self.rank_memory.scratch(self.gradient_dtype),
        )

    def _make_buckets(self, entries: Sequence[BufferParameter], tied: frozenset[str]) -> list[Bucket]:
        axis, options = self.axes.shard, self.options
        plans = plan_buckets(
            entries,
            zero_stage=options.stage,
            shards=axis.size,
            bucket_size=options.bucket_size,
            overlap=options.overlap_grad_reduce,
            on_cpu=not self.rank_memory.mover.apart,
            tied=tied,
        )
        return [options.bucket(plan, axes=self.axes, dtype=self.gradient_dtype, device=self.device) for plan in plans]


def stage_buffers(
    versions: Sequence[NamedParameters],
    families: Mapping[str, FamilyAxes],
    *,
    options: ZeroOptions,
    pipeline_stage: StageOptions | None = None,
    memory: RankMemory | None = None,
) -> list[ParameterBuffers]:
    """One `ParameterBuffers` for each family and dtype of a stage, in the same order on every rank: that of the table
    of families, narrow dtypes first; those that require no gradient apart.

    versions: for each weight version the (logical name, parameter) in forward order.
    memory: of the rank, shared by all its stages (None: this is the only one).
    """
    grouped: dict[tuple[int, int, str, bool], list[list[Any]]] = {}
    order = list(AXIS_FAMILIES)
    for number, version in enumerate(versions):
        for name, parameter in version:
            family = placement_of(parameter).family
            key = (order.index(family), parameter.dtype.itemsize, family, not parameter.requires_grad)
            grouped.setdefault(key, [[] for _ in versions])[number].append((name, parameter))
            memory = memory or RankMemory(parameter.device, options)
    made: list[ParameterBuffers] = []
    orders = {name: ReductionOrder(options) for name in families}
    for (_, _, family, frozen), own in sorted(grouped.items(), key=lambda item: item[0]):
        shared = replace(options, stage=0) if frozen and options.stage < 3 else options  # nothing but weights to share
        made.append(
            ParameterBuffers(
                own[:1] if frozen else own,
                axes=families[family],
                options=shared,
                pipeline_stage=pipeline_stage,
                memory=memory,
                order=orders[family],
                frozen=frozen,
            )
        )
        if frozen:
            share_frozen(made[-1], own[1:])
    return made


def share_frozen(family: ParameterBuffers, versions: Sequence[NamedParameters]) -> None:
    """Further versions of the frozen weights are the same memory."""
    for bucket in family.frozen:
        for range_ in bucket.plan.ranges:
            place = slice(range_.start - bucket.plan.start, range_.stop - bucket.plan.start)
            for version in versions:
                move_parameter(version[range_.entry.index][1], bucket.weights[0].full[place])


def where_not_finite(families: Sequence[ParameterBuffers], *, overwritten: bool) -> str:
    """Which of this rank's reduced gradients are not, as text. overwritten: they are those of another batch by now."""
    if overwritten:
        return "of which tensor is not known: its gradients have been overwritten since"
    found = []
    for bucket in (bucket for family in families for bucket in family.buckets):
        for range_, _, own in overlaps(bucket.plan.ranges, bucket.owned_start, bucket.owned_stop):
            if not bool(bucket.gradient.reduced[own].isfinite().all()):
                found.append((range_.entry.index, range_.entry.name))
    if not found:
        return "from gradients of other ranks"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"here in the gradient of {min(found)[1]}{more}"
