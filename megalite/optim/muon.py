"""Muon: momentum, made orthogonal. Whole matrices only; everything else gets AdamW.

    m = momentum * m + g                  the buffer, one value an element: half of Adam's state
    u = g + momentum * m                  Nesterov's
    p = p - lr * (scale * orthogonal(u) + weight_decay * p)

`orthogonal` replaces the singular values of u by about 1, with five Newton-Schulz steps (Jordan et al. 2024,
kellerjordan.github.io/posts/muon). A matrix that tensor parallelism cuts is gathered first: orthogonalising the parts
is not orthogonalising the whole. Which matrices: those of the blocks; embeddings, output layer, norms and biases are
AdamW's.
"""

import torch
from torch import Tensor

from megalite.inventory import ParameterPlacement
from megalite.optim.matrix_rule import MatrixRule, gather_matrix, own_part
from megalite.optim.rule import ParamGroup


class Muon(MatrixRule):
    """Muon for groups with `whole`, AdamW for the others."""

    matrix_moments = ("momentum_buffer",)

    def update_matrix(self, p: Tensor, grad: Tensor, group: ParamGroup, placement: ParameterPlacement) -> None:
        args = self.args
        buffer = self.state[p]["momentum_buffer"].mul(args.muon_momentum).add_(grad)
        self.write(self.state[p]["momentum_buffer"], buffer)
        update = grad + args.muon_momentum * buffer
        whole, dim, axis = gather_matrix(update, placement, group.get("cut_axes", ()))
        update = own_part(orthogonalise(whole), dim, axis)
        rows, columns = placement.global_shape[-2:]
        squares = {
            "spectral": max(rows, columns),  # times 0.2 it has AdamW's usual size (Liu et al., arXiv 2502.16982)
            "shape_scaling": max(1.0, rows / columns),  # Jordan's
            "unit_rms_norm": rows / columns,  # Bernstein's
        }
        scale = args.muon_extra_scale_factor * squares[args.muon_scale_mode] ** 0.5
        self.descend(p, update.to(p.dtype), group, scale)


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """`[..., rows, columns]` with all singular values brought to about 1 (0.7 to 1.2), signs and directions kept.

    Odd quintic Newton-Schulz iteration, in bf16 on a GPU (its errors are far below what the iteration leaves), unless
    the matrix is in fp64; in the given dtype elsewhere.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    y: Tensor = x.to(torch.bfloat16) if x.is_cuda and x.dtype != torch.float64 else x
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    # not y.norm(), of which a CPU loses 4e-4 at 1e7 elements: it adds them up one by one, `sum` in a tree
    y = y / (y.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y
