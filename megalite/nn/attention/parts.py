"""Attention to a part of the keys by flex attention, with all that `FlashKernel` has not.

A library's flex attention gives the gradient of a part's own result y and log-sums l, not of the whole's. Those of the
whole are O = sum of w y over the parts, with w = exp(l - L) and L = logsumexp of the parts' l. So a part is computed
once more in the backward, and is given the gradients that it has through O::

    dy = w dO        dl = w (dO . y - dO . O)

Where weights are dropped, y and l' are of those that are kept and w = exp(l' - L) / (1 - p); what the sum of all parts
does to O it does through their l (`masked.py`)::

    dy = w dO        dl' = w dO . y        dl = - exp(l - L) dO . O

Nothing is kept from forward to backward, and the host reads nothing of who sees whom from the device.
"""

import torch
from torch import Tensor

from megalite.nn.attention import masked
from megalite.nn.attention.flash import merge, rows_by_heads
from megalite.nn.attention.tiles import TileKernel
from megalite.parallel.context import Operands
from megalite.visibility import Visibility


def shares(dy: Tensor, delta: Tensor, lse: Tensor, part: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a part `[n, r, s, d]` and of its log-sums `[n, r, s]`; delta and lse of the whole `[n, r, s, 1]`."""
    weight = (sums[..., None] - lse).exp()
    dy = dy * weight
    dsums = (dy * part).sum(-1) - (delta * weight)[..., 0]
    return dy.to(part.dtype), dsums.to(sums.dtype)


def shares_of_kept(
    dy: Tensor, delta: Tensor, lse: Tensor, part: Tensor, kept: Tensor, sums: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where weights were dropped: of the part, of the log-sums of those that are kept, and of all."""
    dy = dy * ((kept[..., None] - lse).exp() * (1 / (1 - p)))
    dsums = -((sums[..., None] - lse).exp() * delta)[..., 0]
    return dy.to(part.dtype), (dy * part).sum(-1).to(kept.dtype), dsums.to(sums.dtype)


class FlexKernel(TileKernel):
    """`parallel.context.AttentionKernel` by compiled flex attention."""

    def forward(self, out: Tensor, lse: Tensor, operands: Operands, sight: Visibility) -> None:
        part, kept, sums = self._attend(operands, sight)
        of_kept, p = (None, 0.0) if self.drop is None else (kept, self.drop.p)
        masked.on_device(merge, part)(out, lse, part, sums, of_kept, p)

    def backward(
        self, grads: Operands, dy: Tensor, delta: Tensor, lse: Tensor, operands: Operands, sight: Visibility
    ) -> None:
        inputs = [x.detach().requires_grad_() for x in operands]
        with torch.enable_grad():
            part, kept, sums = self._attend((inputs[0], inputs[1], inputs[2]), sight)
        r, drop = operands[0].shape[1] // len(sight.queries), self.drop
        dy, delta, lse = (rows_by_heads(x, r) for x in (dy, delta[..., None], lse[..., None]))
        given: tuple[Tensor, ...]
        with torch.no_grad():
            if drop is None:
                given = masked.on_device(shares, part)(dy, delta, lse, part, sums)
            else:
                given = masked.on_device(shares_of_kept, part)(dy, delta, lse, part, kept, sums, drop.p)
        made = [part, sums] if drop is None else [part, kept, sums]
        found = torch.autograd.grad(made, inputs, given)
        for grad, more in zip(grads, found, strict=True):
            grad.add_(more)

    def _attend(self, operands: Operands, sight: Visibility) -> tuple[Tensor, Tensor, Tensor]:
        """(result `[n, r, s, d]`, log-sums `[n, r, s]` of the weights that it is made of and of all, -inf where a query
        sees none of these keys)."""
        r = operands[0].shape[1] // len(sight.queries)
        query, key, value = rows_by_heads(operands[0], r), operands[1][:, None], operands[2][:, None]
        return masked.attended(query, key, value, sight, self.softcap, self.drop, scale=1.0, enable_gqa=r > 1)
