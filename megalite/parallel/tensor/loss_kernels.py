"""The cross entropy between its GEMMs, as two functions for a compiler: each reads the logits once, in
the dtype of the GEMMs, and the second writes their gradient in it.

    statistics   logits of this rank's rows -> logsumexp over them, logit of the label           [n, V/t] -> [n], [n]
    gradient     weight * (softmax (1 + 2 z_loss logsumexp) - onehot)                    [n, V/t] -> [n, V/t]

About 8 bytes a logit in 16 bits, where kernels one by one move forty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class LossKernels(NamedTuple):
    """The two functions, compiled or not."""

    statistics: Callable[..., tuple[Tensor, Tensor]]
    gradient: Callable[..., Tensor]

    @classmethod
    def compiled(cls, backend: str = "inductor") -> LossKernels:
        """By `torch.compile`; a chunk of another length is compiled once more."""
        return cls(torch.compile(statistics, backend=backend), torch.compile(gradient, backend=backend))


def statistics(
    products: Tensor, column: Tensor, own: Tensor, valid: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(logsumexp over the rank's true rows; -inf where it has none. Logit of the label; 0 where it is another rank's).

    products: logits `[n, V/t]`, of which the first `valid` columns count. column: the label's column `[n]`, any where
    not `own`. softcap: of the logits, 0: none.
    """
    logits = _masked(products, valid, softcap)
    top = logits.amax(1).clamp(min=torch.finfo(logits.dtype).min)
    picked = logits.gather(1, column[:, None])[:, 0]
    return (logits - top[:, None]).exp().sum(1).log() + top, torch.where(own, picked, 0.0)


def gradient(
    products: Tensor,
    total: Tensor,
    column: Tensor,
    own: Tensor,
    weights: Tensor,
    valid: int,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """weights * (softmax - onehot) in the dtype of `products`. total: logsumexp over the whole vocabulary `[n]`.
    z_loss: coefficient of total squared in the loss. softcap: as of `statistics`, whose derivative is part of it."""
    softmax = (_masked(products, valid, softcap) - total[:, None]).exp()
    if z_loss:
        softmax = softmax * (1 + 2 * z_loss * total)[:, None]
    columns = torch.arange(products.shape[1], device=products.device)
    onehot = (columns == column[:, None]) & own[:, None]
    difference = (softmax - onehot.to(softmax.dtype)) * weights[:, None]
    if softcap:
        difference = difference * (1 - torch.tanh(products.to(softmax.dtype) / softcap).square())
    return difference.to(products.dtype)


def _masked(products: Tensor, valid: int, softcap: float) -> Tensor:
    """In the wider of fp32 and the dtype, capped, padding at -inf."""
    logits = products.to(torch.promote_types(products.dtype, torch.float32))
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    if valid == products.shape[1]:
        return logits
    columns = torch.arange(products.shape[1], device=products.device)
    return torch.where(columns < valid, logits, float("-inf"))
