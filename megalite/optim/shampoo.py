"""Shampoo (Gupta et al., arXiv 1802.09568) with Adam's step size. Whole matrices only; everything else gets AdamW.

    L = beta2 L + (1 - beta2) G G^T         R = beta2 R + (1 - beta2) G^T G
    M = beta1 M + (1 - beta1) G             V = beta2 V + (1 - beta2) G^2
    D = root(L) M root(R)                   root(S) = (S / |S| + eps I)^(-1/4), |S| the largest eigenvalue
    W = W - lr * (D |A| / |D| + weight_decay * W)       A = M' / (sqrt(V') + eps), Adam's step (bias-corrected)

`beta1` = 0 is the paper's direction, from the gradient itself. Its length is that of Adam's step for the matrix
(grafting, Anil et al., arXiv 2002.09018), so that AdamW's learning rate carries over, and the scale of L and R falls
out. Roots are made in fp64 from eigenvalues, at the first step and then every few. eps bounds what they make of a
rounding: unlike SOAP's eigenvectors they are a smooth function of L and R.

A side longer than `shampoo_max_precond_dim` is cut into blocks of that size, which know nothing of each other: L and R
are then block-diagonal. A matrix `[r, c]` keeps its two moments and `2 (r min(r, d) + c min(c, d))` numbers more, on
the one ZeRO rank that owns it; one that tensor parallelism cuts is gathered first, as for Muon.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megalite.inventory import ParameterPlacement
from megalite.optim.adamw import MOMENTS
from megalite.optim.matrix_rule import TwoSidedRule, gather_matrix, own_part
from megalite.optim.rule import ParamGroup


class Side(NamedTuple):
    """One side of a matrix, n long: the decayed mean of its products, `[..., n, d]`, and their roots in the same shape.
    A block of k <= d rows is in k rows and the first k columns. dim: -2 rows, -1 columns."""

    dim: int
    preconditioner: Tensor
    root: Tensor

    def after(self, gradient: Tensor, beta: float) -> Tensor:
        """The preconditioner with a gradient `[..., r, c]` added."""
        mean = self.preconditioner.clone()
        for block, part in zip(_blocks(mean), gradient.split(mean.shape[-1], self.dim), strict=True):
            block.lerp_(part @ part.mT if self.dim == -2 else part.mT @ part, 1.0 - beta)
        return mean

    def root_of(self, preconditioner: Tensor, eps: float) -> Tensor:
        """`(S / |S| + eps)^(-1/4)` of each block S; without a gradient yet, a multiple of one."""
        roots = torch.zeros_like(preconditioner)
        for block, root in zip(_blocks(preconditioner), _blocks(roots), strict=True):
            values, vectors = torch.linalg.eigh(block.to(torch.float64))
            values = values.clamp(min=0.0) / values[..., -1:].clamp(min=torch.finfo(torch.float64).tiny)
            root.copy_((vectors * (values + eps).pow(-0.25).unsqueeze(-2)) @ vectors.mT)
        return roots

    def applied(self, root: Tensor, x: Tensor) -> Tensor:
        """`[..., r, c]` with this side multiplied by the root."""
        pairs = zip(_blocks(root), x.split(root.shape[-1], self.dim), strict=True)
        parts = [block @ part if self.dim == -2 else part @ block for block, part in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def _blocks(rows: Tensor) -> list[Tensor]:
    """The blocks of `[..., n, d]`, each as a view of its rows."""
    return [part[..., : part.shape[-2]] for part in rows.split(rows.shape[-1], -2)]


class Shampoo(TwoSidedRule):
    """Shampoo for groups with `whole`, AdamW for the others."""

    matrix_moments = MOMENTS
    sides: dict[Tensor, list[Side]]

    def side_of(self, p: Tensor, dim: int, n: int) -> Side:
        zeros = p.new_zeros(*p.shape[:-2], n, min(n, self.args.shampoo_max_precond_dim))
        return Side(dim, zeros, zeros.clone())

    def update_matrix(self, p: Tensor, grad: Tensor, group: ParamGroup, placement: ParameterPlacement) -> None:
        steps, args, state, grad = self.steps, self.args, self.state[p], self.finite(grad)
        mean = state["exp_avg"].lerp(grad, 1.0 - args.shampoo_beta1)
        square = state["exp_avg_sq"].lerp(grad.square(), 1.0 - args.shampoo_beta2)
        adam = (square / (1.0 - args.shampoo_beta2 ** (steps + 1))).sqrt_().add_(args.shampoo_eps)
        adam = torch.div(mean, adam, out=adam).div_(1.0 - args.shampoo_beta1 ** (steps + 1))
        each = [gather_matrix(x, placement, group.get("cut_axes", ())) for x in (grad, mean, adam)]
        (gradient, direction, adam), dim, axis = (x[0] for x in each), *each[0][1:]
        for side in self.sides[p]:
            preconditioner, root = side.after(gradient, args.shampoo_beta2), side.root
            if steps % args.shampoo_precondition_frequency == 0:
                root = side.root_of(preconditioner, args.shampoo_matrix_eps)
                self.write(side.root, root)
            self.write(side.preconditioner, preconditioner)
            direction = side.applied(root, direction)
        length = _norm(adam) / _norm(direction).clamp(min=torch.finfo(p.dtype).tiny)
        self.descend(p, own_part(direction * length, dim, axis), group)
        self.write(state["exp_avg"], mean)
        self.write(state["exp_avg_sq"], square)


def _norm(x: Tensor) -> Tensor:
    """Of each matrix of a stack, `[..., 1, 1]`; a sum in a tree, which loses no digits with length."""
    return x.square().sum((-2, -1), keepdim=True).sqrt()
