"""Bytes of numbers, and tokens of a micro-batch on a rank: what all that counts bytes begins with."""

from __future__ import annotations

from typing import NamedTuple

from megalite.config import Config, ModelConfig


class ElementBytes(NamedTuple):
    """Bytes of an element: compute weights and activations, masters and losses, accumulated gradients."""

    compute: int
    wide: int
    gradient: int

    @classmethod
    def of(cls, config: Config) -> ElementBytes:
        chosen = config.training.precision
        compute, wide = (8, 8) if chosen.fp64 else (2, 4) if chosen.half else (4, 4)
        return cls(compute, wide, 2 if chosen.bf16 and config.parallel.grad_reduce_in_bf16 else wide)


def micro_tokens(config: Config) -> int:
    """Tokens of a micro-batch on one rank."""
    return config.model.seq_length // config.parallel.context.context_parallel_size * config.training.micro_batch_size


def statistics(size: ElementBytes, model: ModelConfig, on_cpu: bool, element: int) -> int:
    """Bytes of what a norm knows of a token: mean and deviation, or the deviation."""
    if model.normalization == "LayerNorm":
        return 2 * (element if on_cpu else size.wide)
    return size.wide
