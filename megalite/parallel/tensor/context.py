"""LayerContext: everything that a layer gets to know about the run, when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megalite.comm import Axis, ContextAxes, ExpertAxes
from megalite.config import Float8
from megalite.gradient import WeightGradQueue
from megalite.inventory import Parameter, ParameterPlacement
from megalite.microbatch_notes import ExpertLoads, Magnitudes
from megalite.parallel.tensor.delayed_scaling import DelayedProducts
from megalite.parallel.tensor.float8 import Float8Products
from megalite.parallel.tensor.products import Products, TappedProducts, product_dtype


@dataclass(frozen=True)
class LayerContext:
    """Shared by all layers of one stage.

    tp: the tensor-parallel axis.
    sharers: of its ranks those that share a key/value head.
    cp: the axes over which sequences are cut.
    experts: the axes over which experts are cut and dealt out.
    sequence_parallel: activations between blocks are `[s/t, b, h]` instead of `[s, b, h]`.
    dtype, device: of the parameters ('meta' builds shapes only).
    seed: keys dropout.
    weight_grads: takes the computations of weight gradients, which run at once or (zero-bubble schedules) later.
    tapped: whether the optimizer looks at the operands of weight gradients.
    float8: the format and scales of linear layers' products.
    keeps_float8: whether weights stay in float8, too, until an update changes them.
    loads: where routers note what they did.
    magnitudes: where products in float8 note the size of their operands.
    host_embedding: makes the word embedding, if its rows are on the host.
    halves: over what two half-batches of a micro-batch take turns, a 'layer' or a 'stage'; '': it runs whole.
    grid: makes the layers, by kind (`nn.grid`), where the tensor axis is a grid; `tp` is then what cuts heads.
    deferred: parameters have no memory until `ParameterBuffers` gives them some, one bucket after the other, so that a
        sharded model is never whole on any rank.
    """

    tp: Axis = field(default_factory=lambda: Axis.single("tp"))
    sharers: Axis = field(default_factory=lambda: Axis.single("keys"))
    cp: ContextAxes = field(default_factory=ContextAxes)
    experts: ExpertAxes = field(default_factory=ExpertAxes)
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    seed: int = 1234
    weight_grads: WeightGradQueue = field(default_factory=WeightGradQueue)
    tapped: bool = False
    float8: Float8 = Float8()
    keeps_float8: bool = False
    loads: ExpertLoads = field(default_factory=ExpertLoads)
    magnitudes: Magnitudes = field(default_factory=Magnitudes)
    host_embedding: Callable[[LayerContext], nn.Module] | None = None
    halves: str = ""
    grid: Mapping[str, Callable[..., Any]] | None = None
    deferred: bool = False

    def products(
        self, *, inputs: Axis | None = None, outputs: Axis | None = None, tokens: Axis | None = None
    ) -> Products:
        """The products of a linear layer with inputs, outputs or tokens (beside `cp`) cut over an axis."""
        if self.float8.fp8_format is None:
            kind = TappedProducts if self.tapped else Products
            return kind(product_dtype(self.dtype, torch.device(self.device).type))
        cuts = {"in": inputs, "out": outputs}
        axes = {dim: [] if axis is None else [axis] for dim, axis in cuts.items()}
        axes["tokens"] = [self.cp.heads, self.cp.ring, *([] if tokens is None else [tokens])]
        how: Any = {"keeps": self.keeps_float8, "postponed": lambda: self.weight_grads.collecting}
        if self.float8.fp8_recipe == "delayed":
            how |= {"magnitudes": self.magnitudes, "device": self.device}
            return DelayedProducts(self.float8, axes, self.wide_dtype, **how)
        return Float8Products(self.float8, axes, self.wide_dtype, **how)

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


def parameter_of(described: Parameter, ctx: LayerContext) -> nn.Parameter:
    """This rank's part of a parameter of the inventory."""
    ep, axis = ctx.experts.ep, ctx.experts.etp if described.family == "expert" else ctx.tp
    split = ctx.sequence_parallel
    place = described.place(axis.size, axis.rank, sequence_parallel=split, ep=ep.size, ep_rank=ep.rank)
    return new_parameter(described.local_shape(axis.size, ep.size), place, ctx, wide=described.wide)


def weight_and_bias(described: Sequence[Parameter], ctx: LayerContext) -> tuple[nn.Parameter, nn.Parameter | None]:
    """This rank's parts of a layer's weight, and of its bias if there is one."""
    weight, *bias = (parameter_of(each, ctx) for each in described)
    return weight, bias[0] if bias else None
