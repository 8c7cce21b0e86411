"""Options of data parallelism, and what a pipeline stage asks of its buffers, resolved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from megalite.comm import Axis
from megalite.config import Rates

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
    """

    stage: int = 0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    grad_reduce_in_bf16: bool = False
    offload_params: bool = False


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
