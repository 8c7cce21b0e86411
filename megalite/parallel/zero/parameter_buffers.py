"""The parameters of one family of a stage, their gradients, and the buckets that both are cut into.

weights, version 0   [ layer 3 | layer 2 | layer 1 | embedding ]    compute dtype, one buffer per weight version
gradients            [ bucket 0 |  bucket 1  |     bucket 2    ]    main dtype (fp32; fp64 for fp64 parameters)
                       complete first            complete last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from megalite.comm import Axis, FamilyAxes
from megalite.inventory import BufferParameter, placement_of, plan_buckets
from megalite.parallel.zero.bucket import Bucket
from megalite.parallel.zero.flat_weights import Fill, FlatWeights
from megalite.parallel.zero.host_gradient import HostedPool
from megalite.parallel.zero.host_link import HostLink
from megalite.parallel.zero.host_memory import prefer_own_pages
from megalite.parallel.zero.host_weights import HostedFlatWeights
from megalite.parallel.zero.options import ZeroOptions
from megalite.parallel.zero.reducer import GradientReducer, ReductionOrder
from megalite.parallel.zero.streamed_gradient import ScratchPool
from megalite.parallel.zero.unshard import Unsharder

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class ParameterBuffers:
    """`weights` (a `FlatWeights`) and `gradients` (a `GradientReducer`) of one family, over the same `buckets`.

    Args:
        versions: for each weight version the (logical name, parameter) of one dtype in forward order; the same names
            and shapes in each. Each parameter carries `.placement` (`inventory.ParameterPlacement`) and may
            carry `.sink_uses` (contributions a micro-batch, 1).
        axes: of the family: those that cut its parameters (and sum partial gradients), over which ZeRO shards, and
            along which the shards are copied.
        tied: names of parameters whose gradient another stage shares; they are reduced last, by `start_tied_reduce`.
        counts_tied: False on the stage that holds the copy of a tied parameter: there it is neither counted in the
            norm nor saved.
        extra_reduce: further axes that hold replicas of this stage (Chimera); tied gradients have already been summed
            over them.
        replica: which of these replicas this is; only replica 0 counts in the norm.
        keep_gradients: sharded gradients stay in memory between batches. False if a batch is one micro-batch.
        num_gradients: updates whose gradients are in memory at once (asynchronous pipelines: 2), stages 0 and 1 only.
        whole: (name, number of dimensions) -> whether the parameter must lie in one shard (Muon's matrices).
        beside: the other buffers of this rank, which share scratch memory with these.
        order: starts the reductions, shared with other families of the stage over the same axes.
        fill: initialises a parameter that came without memory ('meta') once it has memory.
        device: where the buffers are (None: where the parameters are).
        frozen: nothing trains them: `buckets` is empty, and those of `frozen` have weights alone.
    """

    def __init__(
        self,
        versions: Sequence[NamedParameters],
        *,
        axes: FamilyAxes,
        options: ZeroOptions,
        tied: frozenset[str] = frozenset(),
        counts_tied: bool = True,
        extra_reduce: Sequence[Axis] = (),
        replica: int = 0,
        num_gradients: int = 1,
        keep_gradients: bool = True,
        whole: Callable[[str, int], bool] | None = None,
        beside: Sequence[ParameterBuffers] = (),
        order: ReductionOrder | None = None,
        fill: Fill | None = None,
        device: torch.device | None = None,
        frozen: bool = False,
    ) -> None:
        first = versions[0]
        assert all([n for n, _ in v] == [n for n, _ in first] for v in versions), "versions of a stage differ"
        self.axes, self.options = axes, options
        self.counts_tied, self.replica = counts_tied, replica
        self.num_versions = len(versions)
        self.dtype = first[0][1].dtype if first else torch.float32
        self.device = device or (first[0][1].device if first else torch.device("cpu"))
        assert all(p.dtype == self.dtype for v in versions for _, p in v), "parameters of a family have one dtype"
        entries = [
            BufferParameter(i, name, tuple(p.shape), placement_of(p), whole is not None and whole(name, p.dim()))
            for i, (name, p) in enumerate(first)
        ]
        held: list[Bucket] = self._make_buckets(entries, tied)
        self.buckets, self.frozen = ([], held) if frozen else (held, [])
        if options.stage >= 2 or options.offload_params:
            prefer_own_pages(self.device)
        self.link, self.scratch, unsharder = self._shared(beside)
        flat = FlatWeights if self.link is None else partial(HostedFlatWeights, link=self.link)
        self.weights: FlatWeights = flat(
            held,
            [[parameter for _, parameter in version] for version in versions],
            shard_axis=axes.shard,
            options=options,
            unsharder=unsharder,
            fill=fill,
            dtype=self.dtype,
            device=self.device,
        )
        self.gradients = GradientReducer(
            self.buckets,
            [[version[i][1] for version in versions] for i in range(len(first))],
            axes=axes,
            stage=options.stage,
            extra_reduce=[axis for axis in extra_reduce if axis.size > 1],
            order=order or ReductionOrder(options),
            pool=self.scratch,
            num_gradients=num_gradients,
            keep=keep_gradients,
            link=self.link,
        )

    def _shared(self, beside: Sequence[ParameterBuffers]) -> tuple[HostLink | None, ScratchPool, Unsharder]:
        """What all buffers of a rank share."""
        hosted = self.options.offload_params
        link = beside[0].link if beside else HostLink(self.device) if hosted else None
        pools = [b.scratch for b in beside if b.gradient_dtype == self.gradient_dtype]
        pool = ScratchPool(self.gradient_dtype, self.device) if link is None else HostedPool(self.gradient_dtype, link)
        ahead = self.options.overlap_param_gather or hosted
        return link, pools[0] if pools else pool, beside[0].weights.unsharder if beside else Unsharder(prefetch=ahead)

    def _make_buckets(self, entries: Sequence[BufferParameter], tied: frozenset[str]) -> list[Bucket]:
        axis, options = self.axes.shard, self.options
        plans = plan_buckets(
            entries,
            zero_stage=options.stage,
            shards=axis.size,
            bucket_size=options.bucket_size,
            overlap=options.overlap_grad_reduce,
            on_cpu=self.device.type != "cuda",
            tied=tied,
        )
        return [
            Bucket(plan, axis=axis, sharded=options.stage > 0, dtype=self.gradient_dtype, device=self.device)
            for plan in plans
        ]

    @property
    def main_dtype(self) -> torch.dtype:
        """The wider of fp32 and the parameter dtype: what masters and moments are kept in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def gradient_dtype(self) -> torch.dtype:
        halved = self.options.grad_reduce_in_bf16 and self.dtype == torch.bfloat16
        return torch.bfloat16 if halved else self.main_dtype

    def memory(self) -> dict[str, int]:
        """Bytes held by this rank for weights and gradients, and for scratch (which exists only in stages 2 and 3)."""
        return {
            "weights": self.weights.memory(),
            "gradients": self.gradients.memory(),
            "scratch": self.scratch.most_bytes,
        }
