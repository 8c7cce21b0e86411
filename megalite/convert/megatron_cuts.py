"""How Megatron-LM's tensor-parallel ranks share the values of a logical tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import ModelConfig


@dataclass(frozen=True)
class RankCut:
    """How tensor-parallel ranks share values; `to_ours` is the inverse of `to_theirs`."""

    to_theirs: Callable[[ModelConfig, Tensor, int], Sequence[Tensor]]
    to_ours: Callable[[ModelConfig, Sequence[Tensor]], Tensor]


def _padded_rows(model: ModelConfig, values: Tensor, ranks: int) -> Sequence[Tensor]:
    padding = model.padded_vocab_size(ranks) - model.vocab_size
    return torch.cat([values, values.new_zeros(padding, *values.shape[1:])]).chunk(ranks)


def _columns(model: ModelConfig, values: Tensor, ranks: int) -> Sequence[Tensor]:
    return [values] * ranks if values.dim() == 1 else values.chunk(ranks, 1)


def _gated_rows(model: ModelConfig, values: Tensor, ranks: int) -> Sequence[Tensor]:
    """`[2, f, ...]` -> on every rank its gates above its values, `[2 f / ranks, ...]`."""
    return [part.flatten(0, 1) for part in values.chunk(ranks, 1)] if model.gated else values.chunk(ranks)


def _join_gated_rows(model: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.unflatten(0, (2, -1)) for part in parts], 1) if model.gated else torch.cat(list(parts))


# The same values on every rank.
WHOLE = RankCut(lambda model, t, ranks: [t] * ranks, lambda model, parts: parts[0])
# Rows; queries, keys and values too, since their rows are grouped by key/value head on both sides.
ROWS = RankCut(lambda model, t, ranks: t.chunk(ranks), lambda model, parts: torch.cat(list(parts)))
# Rows of the vocabulary, padded with zeros until all ranks have the same number.
VOCABULARY = RankCut(_padded_rows, lambda model, parts: torch.cat(list(parts))[: model.vocab_size])
# Columns; the bias is whole.
COLUMNS = RankCut(_columns, lambda model, parts: parts[0] if parts[0].dim() == 1 else torch.cat(list(parts), 1))
GATED_ROWS = RankCut(_gated_rows, _join_gated_rows)
