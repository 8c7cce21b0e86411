"""Inputs, labels and weights of multi-token prediction, made of whole sequences before ranks take their parts.

At depth k = 1, 2, ... position i reads token i + k, which is label i + k - 1, and is asked for token i + k + 1, label
i + k. It counts where that label does and lies in the same document.

A depth has fewer labels that count than the next token has, so its weights are the factor n_0 / n_k larger: with them
the sum over the tokens becomes its mean by the same factor that makes that of the next token a mean. n are counted over
a micro-batch, or where each token has the same weight over the batch and all replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.comm import Axis, all_reduce_
from megalite.microbatch import Microbatch


@dataclass(frozen=True)
class Further:
    """Adds them to the micro-batches of a batch."""

    depth: int  # tokens beyond the next
    over: Axis | None  # over which tokens are counted; None: each micro-batch by itself
    dtype: torch.dtype  # of the weights

    def __call__(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        masks = [torch.stack([mask_of(mb, k) for k in range(1, self.depth + 1)], 1) for mb in microbatches]
        counts = torch.stack(
            [
                torch.cat((mb.loss_mask.double().sum()[None], mask.double().sum((0, 2))))
                for mb, mask in zip(microbatches, masks, strict=True)
            ]
        )
        if self.over is not None:
            all_reduce_(counts, self.over)
            counts = counts.sum(0, keepdim=True).expand_as(counts)
        counts = counts.clamp(min=1)
        weights = (counts[:, :1] / counts[:, 1:])[:, None, :, None]
        return [
            replace(
                mb,
                further_tokens=torch.stack([moved(mb.labels, k - 1) for k in range(1, self.depth + 1)], 1),
                further_labels=torch.stack([moved(mb.labels, k) for k in range(1, self.depth + 1)], 1),
                further_weights=(mask * weight).to(self.dtype),
            )
            for mb, mask, weight in zip(microbatches, masks, weights, strict=True)
        ]


def moved(x: Tensor, steps: int) -> Tensor:
    """`[b, s]` with entry i + steps in place i, and zeros behind the last."""
    return torch.cat((x[:, steps:], x.new_zeros(len(x), min(steps, x.shape[1]))), 1)


def mask_of(mb: Microbatch, depth: int) -> Tensor:
    """Where a label of this depth counts."""
    mask = moved(mb.loss_mask, depth)
    if mb.document_starts is None:
        return mask
    return mask * (moved(mb.document_starts + 1, depth) == mb.document_starts + 1)
