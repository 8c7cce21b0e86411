"""Attention to a part of the keys by flex attention, with documents, windows and caps, which `FlashKernel` has not.

A library's flex attention gives the gradient of a part's own result y and log-sums l, not of the whole's. Those of the
whole are O = sum of w y over the parts, with w = exp(l - L) and L = logsumexp of the parts' l. So a part is computed
once more in the backward, and is given the gradients that it has through O::

    dy = w dO        dl = w (dO . y - dO . O)

Nothing is kept from forward to backward, and the host reads nothing of who sees whom from the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.nn.attention import masked
from megalite.nn.attention.flash import merge, rows_by_heads
from megalite.nn.attention.tiles import TileKernel
from megalite.parallel.context import Operands
from megalite.visibility import Visibility


class FlexKernel(TileKernel):
    """`parallel.context.AttentionKernel` by compiled flex attention: all but dropout."""

    def forward(self, out: Tensor, lse: Tensor, operands: Operands, sight: Visibility) -> None:
        part, sums = self._attend(operands, sight)
        merge(out, lse, part, sums)

    def backward(
        self, grads: Operands, dy: Tensor, delta: Tensor, lse: Tensor, operands: Operands, sight: Visibility
    ) -> None:
        inputs = [x.detach().requires_grad_() for x in operands]
        with torch.enable_grad():
            part, sums = self._attend((inputs[0], inputs[1], inputs[2]), sight)
        r = operands[0].shape[1] // len(sight.queries)
        with torch.no_grad():
            dy, delta, lse = (rows_by_heads(x, r) for x in (dy, delta[..., None], lse[..., None]))
            weight = (sums[..., None] - lse).exp_()
            dy = dy * weight
            dsums = (dy * part).sum(-1, keepdim=True).sub_(delta * weight)
        found = torch.autograd.grad((part, sums), inputs, (dy.to(part.dtype), dsums[..., 0].to(sums.dtype)))
        for grad, more in zip(grads, found, strict=True):
            grad += more

    def _attend(self, operands: Operands, sight: Visibility) -> tuple[Tensor, Tensor]:
        """(result `[n, r, s, d]`, log-sums `[n, r, s]`, -inf where a query sees none of these keys)."""
        attend, blocks_of = masked.flex()
        r = operands[0].shape[1] // len(sight.queries)
        query, key, value = rows_by_heads(operands[0], r), operands[1][:, None], operands[2][:, None]
        mask = masked.block_mask(sight, len(query), blocks_of)
        cap: Any = None if self.softcap is None else masked.capped(self.softcap)
        found: tuple[Tensor, Tensor] = attend(
            query, key, value, score_mod=cap, block_mask=mask, scale=1.0, enable_gqa=r > 1, return_lse=True
        )
        return found
