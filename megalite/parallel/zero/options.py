"""What a user chooses about data parallelism, resolved."""

from __future__ import annotations

from dataclasses import dataclass


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
