"""What a tensor-parallel layer must be told; `megalite.nn.context.LayerContext` is one such context."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from megalite.comm.mesh import Axis
from megalite.gradient import WeightGradQueue
from megalite.inventory.placement import Placement


class TensorContext(Protocol):
    """Read-only facts, the same for all layers of a stage.

    tp: the tensor-parallel axis. sequence_parallel: activations between the parallel regions are `[s/t, b, h]`
    instead of `[s, b, h]`. dtype, device: of the parameters. weight_grads: where weight gradients are computed, now
    or later. deferred: parameters get their memory and values later, from whoever owns the memory (`ParameterBuffers`).
    """

    @property
    def tp(self) -> Axis: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device | str: ...
    @property
    def weight_grads(self) -> WeightGradQueue: ...
    @property
    def deferred(self) -> bool: ...


def new_parameter(local_shape: tuple[int, ...], placement: Placement, ctx: TensorContext) -> nn.Parameter:
    """An uninitialised parameter of `local_shape` that knows its place (`param.placement`); deferred: no memory."""
    parameter = nn.Parameter(torch.empty(local_shape, dtype=ctx.dtype, device="meta" if ctx.deferred else ctx.device))
    parameter.placement = placement  # type: ignore[attr-defined]
    return parameter
