"""Options of data parallelism, and what a pipeline stage asks of its buffers, resolved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalite.comm import Axis, FamilyAxes, ParallelMesh
from megalite.config import Rates, ZeroPlusPlus
from megalite.inventory import BucketPlan
from megalite.parallel.zero.bucket import Bucket
from megalite.parallel.zero.plus_plus import DividedAxes, PartitionedWeights, divided, scatter_in_4_bits
from megalite.parallel.zero.unshard import BucketWeights

Fill = Callable[[str, nn.Parameter], None]
"""Gives the parameter of this name its initial values."""


@dataclass(frozen=True)
class ZeroOptions:
    """How gradients, optimizer state and parameters are spread over the data-parallel ranks.

    stage: 0 everything replicated; 1 optimizer state and master weights sharded; 2 also gradients; 3 also parameters.
    overlap_grad_reduce: a bucket's reduction starts as soon as its last gradient has arrived, not at the end of the
        batch.
    overlap_param_gather: updated weights are gathered while the next forward runs (stages 1 and 2), or a layer ahead of
        their use (stage 3).
    bucket_size: elements of a gradient bucket; None: `bucket_limit`'s default. Stage 3 always has one bucket per layer.
    grad_reduce_in_bf16: gradients of bf16 parameters are accumulated and summed in bf16 (half the bytes, 8 bits of
        mantissa).
    offload_params: weights and gradients live on the host, and those of a layer are on the device while it uses them.
    plus_plus: what stage 3 sends less of.
    """

    stage: int = 0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    grad_reduce_in_bf16: bool = False
    offload_params: bool = False
    plus_plus: ZeroPlusPlus = ZeroPlusPlus()

    def axes(self, mesh: ParallelMesh, family: str) -> FamilyAxes:
        """Those of a family. Collective at first use."""
        found = mesh.family(family)
        if not self.plus_plus.on:
            return found
        parted = divided(found, mesh, self.plus_plus)  # by all ranks: of stages that differ, another may have shards
        return parted if found.shard.size > 1 else found

    def weights(self, full: Tensor, owned: slice, *, axes: FamilyAxes, plan: BucketPlan) -> BucketWeights:
        """Of a bucket in one version."""
        if isinstance(axes, DividedAxes) and self.plus_plus.changes_gathers:
            quantized = self.plus_plus.zero_quantized_weights
            return PartitionedWeights(full, owned, axes=axes, plan=plan, quantized=quantized)
        return BucketWeights(full, owned, axis=axes.shard, stage=self.stage, sizes=plan.sizes)

    def bucket(self, plan: BucketPlan, *, axes: FamilyAxes, dtype: torch.dtype, device: torch.device) -> Bucket:
        """One of a family."""
        bucket = Bucket(plan, axis=axes.shard, sharded=self.stage > 0, dtype=dtype, device=device)
        if isinstance(axes, DividedAxes) and self.plus_plus.zero_quantized_gradients:
            bucket.reduce_scatter = partial(scatter_in_4_bits, axes)
        return bucket


@dataclass(frozen=True)
class StageOptions:
    """How the parameters of one stage lie in memory, and who else has them.

    tied: names of parameters whose gradient another stage shares; they are reduced last, by `start_tied_reduce`.
    counts_tied: False on the stage that holds the copy of a tied parameter: there it is neither counted in the norm nor
        saved.
    extra_reduce: further axes that hold replicas of this stage (Chimera); tied gradients have already been summed over
        them.
    replica: which of these replicas this is; only replica 0 counts in the norm.
    keep_gradients: sharded gradients stay in memory between batches. False if a batch is one micro-batch.
    num_gradients: updates whose gradients are in memory at once (asynchronous pipelines: 2), stages 0 and 1 only.
    whole: (name, number of dimensions) -> whether the parameter must lie in one shard (Muon's matrices).
    rates: (name, whether it decays) -> its own factors of the optimizer's numbers.
    fill: initialises a parameter that came without memory ('meta') once it has memory.
    """

    tied: frozenset[str] = frozenset()
    counts_tied: bool = True
    extra_reduce: Sequence[Axis] = ()
    replica: int = 0
    num_gradients: int = 1
    keep_gradients: bool = True
    whole: Callable[[str, int], bool] | None = None
    rates: Callable[[str, bool], Rates] | None = None
    fill: Fill | None = None
