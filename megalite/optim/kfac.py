"""K-FAC (Martens and Grosse, arXiv 1503.05671) for the linear layers of the blocks; everything else gets AdamW.

    A = mean of a a^T over tokens, a: input of the layer    G = mean of g g^T, g: of a token's loss by its output
    V = (G + sqrt(l)/pi I)^-1 dW (A + pi sqrt(l) I)^-1      pi = sqrt((tr A / dim A) / (tr G / dim G)), l: the damping
    B = momentum B + nu V                                   nu = min(1, sqrt(kappa / (lr^2 <V, dW>)))
    W = W - lr * (B + weight_decay * W)

A and G are decayed means over batches, without the damping, which is added when they are inverted (every few steps, in
fp64). Tokens are not averaged before the outer product. nu is of each matrix: the published one adds <V, dW> up over
all layers first, for which every pipeline stage would have to wait.

`kfac_factors` = all (D-KFAC): of all tokens, summed over the replicas. own (DP-KFAC, Zhang et al., arXiv 2206.15143):
the rank that owns a matrix (ZeRO) makes its factors from its own micro-batches alone; no factor travels. For each
layer of a GPT A and G have 46 h^2 elements, its gradient 12 h^2.

A linear layer hands over what it multiplies for its weight's gradient (`TappedProducts`). What tensor parallelism cuts
of it is gathered there, so that A and G are those of one process; the matrix itself as for Muon. A gated projection's
two matrices share their A.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megalite.comm import Axis, all_reduce_
from megalite.config import OPTIMIZER_SPECS, OptimizerConfig
from megalite.inventory import BufferParameter, ParameterPlacement
from megalite.optim.matrix_rule import MatrixRule, gather_matrix, own_part, side_by_side
from megalite.optim.rule import ParamGroup


class Factors:
    """Sums over a batch: `inputs` of a a^T, `[c, c]`; `outputs` of dy dy^T, `[..., r, r]`; how many tokens, `rows`."""

    def __init__(self, parameter: BufferParameter, cut_axes: tuple[Axis, ...], like: Tensor) -> None:
        place = parameter.placement
        axes = [axis for axis in cut_axes if axis.name in place.sharded]
        cut = [have != total for have, total in zip(parameter.shape, place.global_shape, strict=True)]
        self.cuts = [axes[0] if cut[dim] else None for dim in (-2, -1)]
        self.parts, self.rows = parameter.shape[:-2], 0
        (r, c), new = place.global_shape[-2:], like.new_zeros
        self.inputs, self.outputs = new(c, c), new(*self.parts, r, r)
        self.sums = (self.inputs, self.outputs)

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Adds the tokens of `[n, out]` and `[n, in]`."""
        self.rows += len(x)
        dtype, dy = self.inputs.dtype, dy.reshape(len(dy), *self.parts, -1)
        dy, x = (t if axis is None else side_by_side(t, axis, -1) for axis, t in zip(self.cuts, (dy, x), strict=True))
        x, dy = x.to(dtype), dy.to(dtype).movedim(0, -2)
        self.inputs.addmm_(x.t(), x)
        self.outputs.add_(dy.mT @ dy)

    def clear(self) -> None:
        """A batch begins."""
        self.rows = 0
        for total in self.sums:
            total.zero_()


class Kfac(MatrixRule):
    """K-FAC for groups with `whole`, AdamW for the others. Needs `sinks` in the groups.

    kept: of each matrix by label, the running means of its factors and their damped inverses, in the factors' shapes.
    """

    matrix_moments = ("momentum_buffer",)
    labels = ("inputs", "outputs", "inputs_inverse", "outputs_inverse")

    def __init__(self, groups: list[ParamGroup], settings: OptimizerConfig) -> None:
        super().__init__(groups, settings)
        args, whole, first = self.args, OPTIMIZER_SPECS["kfac"].whole, self.param_groups[0]
        assert whole is not None
        named = {p: first["parameters"][pieces[0].parameter].name for p, pieces in self.members("params", "pieces")}
        self.replicas: list[Axis] = [*first["copies"]]
        self.sums = self.replicas if args.kfac_factors == "all" else self.replicas[1:]
        self.talks = self.talks or any(axis.size > 1 for axis in self.sums)
        self.factors: dict[str, Factors] = {}
        like = next(p for group in self.param_groups for p in group["params"])
        for parameter, sink in first["sinks"]:
            name = parameter.name
            if whole(name, len(parameter.shape)) and (args.kfac_factors == "all" or name in named.values()):
                self.factors[name] = Factors(parameter, first["cut_axes"], like.detach())
                sink.tap = self.factors[name].add
        self.sums_of = {p: self.factors[name] for p, name in named.items()}
        zeros = {p: [total.clone() for total in 2 * each.sums] for p, each in self.sums_of.items()}
        self.kept = {p: dict(zip(self.labels, each, strict=True)) for p, each in zeros.items()}

    @property
    def scratch(self) -> list[Tensor]:
        """Sums of a batch."""
        return [x for each in self.factors.values() for x in each.sums]

    def kept_of(self, p: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        for label, values in self.kept[p].items():
            yield label, -1 if label.startswith("inputs") else -2, values

    @torch.no_grad()
    def step(self) -> None:
        for axis in self.sums if self.steps >= 0 else ():
            for total in self.scratch if axis.size > 1 else ():
                all_reduce_(total, axis)
        super().step()
        for each in self.factors.values():
            each.clear()

    def update_matrix(self, p: Tensor, grad: Tensor, group: ParamGroup, placement: ParameterPlacement) -> None:
        args, kept, lr = self.args, self.kept[p], group["lr"] * self.args.kfac_scale
        means = self._means(self.sums_of[p], kept)
        inverses = kept["inputs_inverse"], kept["outputs_inverse"]
        if self.steps % args.kfac_inverse_frequency == 0:
            inverses = damped_inverses(*means, args.kfac_damping)
        for target, new in zip(kept.values(), (*means, *inverses), strict=True):
            self.write(target, new)
        gradient, dim, axis = gather_matrix(grad, placement, group.get("cut_axes", ()))
        step = (inverses[1] @ gradient @ inverses[0]).div_(args.kfac_damping)
        product = (step * gradient).sum((-2, -1), keepdim=True).mul_(lr * lr)
        nu = (args.kfac_kl_clip / product.clamp(min=torch.finfo(p.dtype).tiny)).sqrt_().clamp_(max=1.0)
        buffer = self.state[p]["momentum_buffer"] * args.kfac_momentum + own_part(step * nu, dim, axis)
        self.descend(p, buffer, group, args.kfac_scale)
        self.write(self.state[p]["momentum_buffer"], buffer)

    def _means(self, sums: Factors, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The running means with this batch. dy is of the mean over all tokens of all replicas: g = tokens dy."""
        everywhere, summed = (sums.rows * math.prod(axis.size for axis in each) for each in (self.replicas, self.sums))
        weight = 1.0 - min(1.0 - 1.0 / (self.steps + 1), self.args.kfac_decay)
        batch = sums.inputs / summed, sums.outputs * (everywhere**2 / summed)
        return kept["inputs"].lerp(batch[0], weight), kept["outputs"].lerp(batch[1], weight)


def damped_inverses(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Of `[c, c]` and `[..., r, r]`: `(A / (pi sqrt(l)) + I)^-1` and `(G pi / sqrt(l) + I)^-1`, which are l times what
    the formula has, and never above 1. A gated projection has one A and one pi, which is of the mean of its G."""
    traces = [x.diagonal(dim1=-2, dim2=-1).double().mean().clamp(min=1e-30) for x in (inputs, outputs)]
    root, pi = damping**0.5, (traces[0] / traces[1]).sqrt()
    return _inverse(inputs, pi * root), _inverse(outputs, root / pi)


def _inverse(x: Tensor, damping: Tensor) -> Tensor:
    wide = x.to(torch.float64, copy=True).div_(damping)
    wide.diagonal(dim1=-2, dim2=-1).add_(1.0)
    inverse: Tensor = torch.linalg.inv_ex(wide).inverse
    return inverse.to(x.dtype)
