"""Which positions of a sequence a rank holds, and the cut of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.microbatch import Microbatch

FURTHER = ("further_tokens", "further_labels", "further_weights")


def sequence_order(length: int, ring: int, device: torch.device | None = None) -> Tensor:
    """Positions `[length]`, ring rank after ring rank: rank p of `ring` has chunks p and 2 ring - 1 - p of 2 ring. What
    a ring rank has is dealt out evenly, in order, to those with whom it trades tokens for heads.
    """
    chunks = torch.arange(length, device=device).chunk(2 * ring)
    return torch.cat([chunks[c] for p in range(ring) for c in (p, 2 * ring - 1 - p)])


@dataclass(frozen=True)
class SequenceCut:
    """This rank's part of every sequence: the one place where micro-batches are cut.

    ring: ranks of the ring (or of the gather) among the `size` ranks that share a sequence.
    """

    rank: int = 0
    size: int = 1
    ring: int = 1

    def __call__(self, microbatch: Microbatch) -> Microbatch:
        """Cuts tokens, labels, positions and loss weights; where documents begin stays whole, in the order of ranks."""
        if self.size == 1:
            return microbatch
        order = sequence_order(microbatch.shape[1], self.ring, microbatch.tokens.device)  # the host does not wait
        own = order.chunk(self.size)[self.rank]
        starts = microbatch.document_starts
        return replace(
            microbatch,
            tokens=microbatch.tokens[:, own],
            labels=microbatch.labels[:, own],
            positions=microbatch.positions[:, own],
            loss_mask=microbatch.loss_mask[:, own],
            document_starts=None if starts is None else starts[:, order],
            places=own,
            order=order,
            **{name: value[..., own] for name in FURTHER if (value := getattr(microbatch, name)) is not None},
        )
