"""LayerContext: everything that a layer gets to know about the run, when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from megalite.comm import Axis, ContextAxes, ExpertAxes
from megalite.expert_loads import ExpertLoads
from megalite.gradient import WeightGradQueue
from megalite.inventory import ParameterPlacement


@dataclass(frozen=True)
class LayerContext:
    """Shared by all layers of one stage.

    tp: the tensor-parallel axis.
    cp: the axes over which sequences are cut.
    experts: the axes over which experts are cut and dealt out.
    sequence_parallel: activations between blocks are `[s/t, b, h]` instead of `[s, b, h]`.
    dtype, device: of the parameters ('meta' builds shapes only).
    seed: keys dropout.
    weight_grads: takes the computations of weight gradients, which run at once or (zero-bubble schedules) later.
    loads: where routers note what they did.
    deferred: parameters have no memory until `ParameterBuffers` gives them some, one bucket after the other, so that a
        sharded model is never whole on any rank.
    """

    tp: Axis = field(default_factory=lambda: Axis.single("tp"))
    cp: ContextAxes = field(default_factory=ContextAxes)
    experts: ExpertAxes = field(default_factory=ExpertAxes)
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    seed: int = 1234
    weight_grads: WeightGradQueue = field(default_factory=WeightGradQueue)
    loads: ExpertLoads = field(default_factory=ExpertLoads)
    deferred: bool = False

    @property
    def sequence_split(self) -> bool:
        """Whether this rank's activations between blocks are only a part of the sequence."""
        return self.sequence_parallel and self.tp.size > 1

    @property
    def wide_dtype(self) -> torch.dtype:
        """The wider of fp32 and the parameter dtype: main gradients, logits, an fp32 residual stream."""
        return torch.promote_types(self.dtype, torch.float32)


def new_parameter(
    local_shape: tuple[int, ...], placement: ParameterPlacement, ctx: LayerContext, *, wide: bool = False
) -> nn.Parameter:
    """An uninitialised parameter of `local_shape` with `.placement`, without memory if the context is `deferred`. wide:
    in fp32 at least."""
    dtype = ctx.wide_dtype if wide else ctx.dtype
    parameter = nn.Parameter(torch.empty(local_shape, dtype=dtype, device="meta" if ctx.deferred else ctx.device))
    parameter.placement = placement  # type: ignore[attr-defined]  # ours, on a tensor of torch's
    return parameter
