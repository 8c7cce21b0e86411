"""One micro-batch as every layer sees it.

A layer has the signature `forward(x, microbatch) -> x`. The embedding reads the tokens, attention the positions and
documents, the head the labels and the loss weights. All of these are `[b, s]`. Activations are `[s, b, h]`; only the
embedding and the head transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.visibility import Documents, Shared

PIECE = 2**40
"""Stride of the ids of a sample's pieces (`in_pieces`). It exceeds every sample id, so ids are unique within a run."""


class StageInput(Protocol):
    """What a pipeline needs to know of a micro-batch."""

    def arranged(self, x: Tensor) -> Tensor:
        """What has arrived from another stage, in the shape of this micro-batch."""
        ...


@dataclass(frozen=True)
class Microbatch:
    """Tensors of `b` samples of length `s`.

    tokens, labels: int64 `[b, s]`; `labels` is `tokens` shifted left by one.
    positions: int64 `[b, s]`, the position of a token within its sequence (or document, with `--reset-position-ids`).
    loss_mask: float32 `[b, s]`, 1 where the token's loss counts.
    sample_ids: int64 `[b]`, the global number of each sample. It keys dropout, so that a mask depends on the sample and
        never on the layout or the order of the micro-batches.
    document_starts: int64 `[b, s]` or None; where the token's document begins in its sample. Attention does not see
        anything before it (`--reset-attention-mask`).
    places: int64 `[s]`, the position in its sample of each token that this rank holds; None unless context parallelism
        has cut the sequence.
    order: int64, the positions of all tokens, rank after rank; `document_starts` is then of all tokens in that order.
        None unless context parallelism has cut the sequence.
    share: 0-dim, the loss scale times this micro-batch's part of the mean over the micro-batches of an update: the
        weight of losses that layers add by themselves. None where no gradient is asked for.
    further_tokens, further_labels, further_weights: `[b, D, s]`, inputs, labels and loss weights of the D tokens beyond
        the next one (`nn.mtp`); None where none are predicted. further_losses: `[D]`, where their losses are written.
    documents: the same as `document_starts`, as the host knows it; None where it does not, or does not have to.
    host_tokens: `tokens` in host memory, where something there looks at them and they are on a device.
    blend_parts: int64 `[b]`, the part of the blend that each sample comes from; None without `--loss-by-part`.
    token_losses: `[b, s]`, where the loss writes that of each token, unweighted; None without `--loss-by-part`.
    shared: what one layer makes of it for the others: who sees whom. A changed micro-batch begins with nothing.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    sample_ids: Tensor
    document_starts: Tensor | None = None
    documents: Documents | None = None
    places: Tensor | None = None
    order: Tensor | None = None
    share: Tensor | None = None
    further_tokens: Tensor | None = None
    further_labels: Tensor | None = None
    further_weights: Tensor | None = None
    further_losses: Tensor | None = None
    host_tokens: Tensor | None = None
    blend_parts: Tensor | None = None
    token_losses: Tensor | None = None
    shared: Shared = field(init=False, default_factory=Shared, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(b, s)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def of_attention(self) -> dict[str, Any]:
        """What attention to whole sequences takes of it, by its names."""
        return {name: getattr(self, name) for name in ("document_starts", "documents", "sample_ids", "shared")}

    def arranged(self, x: Tensor) -> Tensor:
        """Messages have the shape of whole samples, however these are cut into sequences."""
        samples = self.tokens.shape[0]
        return x if x.shape[1] == samples else x.reshape(-1, samples, x.shape[2])

    def in_pieces(self, count: int) -> Microbatch:
        """Splits each sample into `count` independent sequences, `[b * count, s / count]`: none attends to another.
        Not for samples that context parallelism has cut. Sequence j of sample i gets the id i + j * `PIECE`."""
        if count == 1:
            return self
        b, s = self.shape
        length, shape = s // count, (b * count, s // count)
        starts, piece = self.document_starts, torch.arange(count, device=self.tokens.device)
        here = torch.arange(length, device=self.tokens.device)
        return Microbatch(
            tokens=self.tokens.reshape(shape),
            labels=self.labels.reshape(shape),
            positions=self.positions.reshape(shape).minimum(here),
            loss_mask=self.loss_mask.reshape(shape),
            sample_ids=(self.sample_ids[:, None] + piece * PIECE).flatten(),
            document_starts=None
            if starts is None
            else (starts.reshape(b, count, length) - piece[:, None] * length).clamp(min=0).view(shape),
            blend_parts=None if self.blend_parts is None else self.blend_parts.repeat_interleave(count),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Microbatch:
        """The same micro-batch on `device`."""
        moved, starts = self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking)), self.document_starts
        if starts is None or not starts.device.type == "cpu" != moved.tokens.device.type:
            return moved
        return replace(moved, documents=Documents.of(starts, device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Microbatch:
        """The same micro-batch with `change` applied to each of its tensors; without `documents`."""
        changed: Any = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Microbatch(**changed)
