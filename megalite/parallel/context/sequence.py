"""Which positions of a sequence a rank holds, the cut of a micro-batch, and tokens traded for heads (Ulysses, arXiv
2309.14509): of s/A tokens and all groups to all s tokens and g/A groups."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.comm import Axis, all_to_all, conjugates
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


def trade_tokens_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """`[s/A, b, g, ...]` -> `[s, b, g/A, ...]`: the groups in the order of the ranks."""
    return x if axis.size == 1 else conjugates(x, axis, _to_heads, _to_tokens)


def trade_heads_for_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Undoes `trade_tokens_for_heads`: `[s, b, g/A, ...]` -> `[s/A, b, g, ...]`."""
    return x if axis.size == 1 else conjugates(x, axis, _to_tokens, _to_heads)


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()  # [A, s/A, b, g/A, ...]
    return all_to_all(parts, axis).flatten(0, 1)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    parts = all_to_all(x.unflatten(0, (axis.size, -1)).contiguous(), axis)  # [A, s/A, b, g/A, ...]
    return parts.movedim(0, 2).flatten(2, 3)
