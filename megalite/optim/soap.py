"""SOAP: AdamW in the eigenbasis of Shampoo's preconditioner (Vyas et al., arXiv 2409.11321). Whole matrices only;
everything else gets AdamW.

    L = beta2 L + (1 - beta2) G G^T         R = beta2 R + (1 - beta2) G^T G
    M = beta1 M + (1 - beta1) G             V = beta2 V + (1 - beta2) (Q_L^T G Q_R)^2
    W = W - lr * (Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T + weight_decay * W)       bias-corrected as Adam
    every few steps Q_L and Q_R follow the eigenvectors of L and R: one power iteration, QR

As the authors' code does, the first gradient makes the first bases (eigenvectors of L and R) and moves nothing, so that
no gradient is ever seen through a basis made of itself; V is reordered as the eigenvectors change places. Where L or R
has no eigenvectors but those that rounding makes (few tokens, many columns: an eigenvalue below 1e-9 of the largest in
fp64, 1e-7 in fp32) the former basis stays, so that all layouts have the same. Above that it is the authors' algorithm.

A matrix of `[rows, columns]` keeps its two moments and `2 (rows^2 + columns^2)` numbers more, on the one ZeRO rank that
owns it. A matrix that tensor parallelism cuts is gathered first, and every rank of the axis computes (and keeps the
bases of) the whole, as for Muon. Which matrices: those of the blocks, of experts those that the rank has, but no
router. A matrix that the first batch has not used (of an expert without tokens) begins with its own coordinates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.inventory import ParameterPlacement
from megalite.optim.adamw import MOMENTS
from megalite.optim.matrix_rule import TwoSidedRule, gather_matrix, own_part
from megalite.optim.rule import ParamGroup


def empty(dtype: torch.dtype) -> float:
    """A direction with so small a part of the largest eigenvalue has seen no gradient that could be told from rounding:
    products and sums leave some 1e-16 of the largest eigenvalue in fp64, so that an eigenvector at this bound is known
    to seven digits, and steps that follow each other keep most of them. At 1e-10 half of forty drawn gradients, changed
    by 1e-15, turned bases by more than 1e-5."""
    return 1e-9 if dtype == torch.float64 else 1e-7


class Side(NamedTuple):
    """One side of a matrix: preconditioner `[..., n, n]` (decayed mean of G G^T or G^T G), and basis `[..., n, n]`,
    whose columns are about its eigenvectors, those of the largest eigenvalues first. dim: -2 rows, -1 columns."""

    dim: int
    preconditioner: Tensor
    basis: Tensor

    def after(self, gradient: Tensor, beta: float) -> Tensor:
        """The preconditioner with a gradient added."""
        product = gradient @ gradient.mT if self.dim == -2 else gradient.mT @ gradient
        return self.preconditioner.lerp(product, 1.0 - beta)

    def first_basis(self, preconditioner: Tensor) -> Tensor:
        """That of the eigenvectors, as far as there are any: `in_general_position` beyond."""
        values, vectors = torch.linalg.eigh(preconditioner.to(torch.float64))
        values, vectors = values.flip(-1), vectors.flip(-1)
        nothing = values <= empty(preconditioner.dtype) * values[..., :1]
        columns = torch.where(nothing.unsqueeze(-2), in_general_position(vectors), vectors)
        basis: Tensor = torch.linalg.qr(columns).Q
        return basis.to(self.basis.dtype)

    def turned(self, preconditioner: Tensor) -> tuple[Tensor, Tensor]:
        """(The basis after one power iteration, orthogonalised; the order in which the old basis vectors were taken,
        `[..., n]`). Where no gradient has been seen the basis keeps its directions and their order: in fp32 by a shift
        of all eigenvalues, which is as small as its rounding; in fp64 what images add nothing comes last, unturned."""
        image = preconditioner @ self.basis
        sizes = (self.basis * image).sum(-2)
        least = empty(image.dtype) * sizes.amax(-1, keepdim=True)
        order = sizes.clamp(min=least).argsort(dim=-1, descending=True, stable=True)
        if image.dtype != torch.float64:
            columns = image + least.unsqueeze(-2) * self.basis
            return torch.linalg.qr(_taken(columns, order)).Q, order
        nothing = _adding_nothing(_taken(image, order), least)
        columns = torch.where(nothing.unsqueeze(-2), _taken(self.basis, order), _taken(image, order))
        last = nothing.to(torch.int8).argsort(dim=-1, stable=True)
        return torch.linalg.qr(_taken(columns, last)).Q, order.gather(-1, last)


class Soap(TwoSidedRule):
    """SOAP for groups with `whole`, AdamW for the others. A side that is longer than `soap_max_precond_dim` keeps its
    own coordinates: with the other alone SOAP is one-sided."""

    matrix_moments = MOMENTS
    sides: dict[Tensor, list[Side]]

    def side_of(self, p: Tensor, dim: int, n: int) -> Side | None:
        if n > self.args.soap_max_precond_dim:
            return None
        basis = torch.eye(n, dtype=p.dtype, device=p.device).expand(*p.shape[:-2], n, n).contiguous()
        return Side(dim, torch.zeros_like(basis), basis)

    def update_matrix(self, p: Tensor, grad: Tensor, group: ParamGroup, placement: ParameterPlacement) -> None:
        state, sides, steps, axes = self.state[p], self.sides[p], self.steps, group.get("cut_axes", ())
        beta1, beta2 = self.args.soap_beta1, self.args.soap_beta2
        gradient, dim, axis = gather_matrix(self.finite(grad), placement, axes)
        if steps == 0:
            seen = gradient.flatten(-2).any(-1)[..., None, None]
            for side in sides:
                preconditioner = side.after(gradient, beta2)
                self.write(side.basis, torch.where(seen, side.first_basis(preconditioner), side.basis))
                self.write(side.preconditioner, preconditioner)
            return
        mean, square = (gather_matrix(state[name], placement, axes)[0] for name in MOMENTS)
        mean = mean.lerp(gradient, 1.0 - beta1)
        square = square.lerp(_in_bases(gradient, sides).square(), 1.0 - beta2)
        correction = (1.0 - beta2**steps) ** 0.5 / (1.0 - beta1**steps)
        update = _in_bases(_in_bases(mean, sides) / (square.sqrt() + self.args.soap_eps), sides, back=True)
        for side in sides:
            preconditioner = side.after(gradient, beta2)
            if steps % self.args.soap_precondition_frequency == 0:
                basis, order = side.turned(preconditioner)
                square = _taken(square, order, side.dim)
                self.write(side.basis, basis)
            self.write(side.preconditioner, preconditioner)
        self.descend(p, own_part(update, dim, axis), group, correction)
        self.write(state["exp_avg"], own_part(mean, dim, axis))
        self.write(state["exp_avg_sq"], own_part(square, dim, axis))


def _adding_nothing(columns: Tensor, least: Tensor) -> Tensor:
    """Columns of `[..., n, n]` which are no longer than `least`, `[..., 1]`, without their parts along those before
    them that are longer: bool `[..., n]`."""
    found, nothing = torch.zeros_like(columns), torch.ones_like(columns[..., 0, :], dtype=torch.bool)
    for i in range(columns.shape[-1]):
        rest, before = columns[..., i : i + 1], found[..., :i]
        for _ in range(2):
            rest = rest - before @ (before.mT @ rest)
        size = torch.linalg.vector_norm(rest, dim=-2)
        nothing[..., i : i + 1] = size <= least
        found[..., i : i + 1] = torch.where((size > least).unsqueeze(-2), rest / size.unsqueeze(-2), 0.0)
    return nothing


def _taken(x: Tensor, order: Tensor, dim: int = -1) -> Tensor:
    """The columns of `[..., n, k]`, or with dim -2 the rows, in the order `[..., k]`."""
    return x.gather(dim, order.unsqueeze(-1 if dim == -2 else -2).expand_as(x))


def in_general_position(like: Tensor) -> Tensor:
    """Draws fixed `[n, n]` directions, which have nothing to do with any matrix."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape[-2:], dtype=like.dtype, generator=generator).to(like.device).expand_as(like)


def _in_bases(x: Tensor, sides: Sequence[Side], *, back: bool = False) -> Tensor:
    """x in coordinates of the bases; back: the inverse."""
    for side in sides:
        basis = side.basis.mT if back else side.basis
        x = basis.mT @ x if side.dim == -2 else x @ basis
    return x
