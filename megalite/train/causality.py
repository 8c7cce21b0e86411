"""Does a module of the user's own read later tokens? A language model that does has seen what it is to foretell: its
loss falls quickly and means nothing."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

MOST_PARAMETERS = 1 << 26
"""Of larger modules no copy is made."""
MOST_PRODUCTS = 10**10
"""Parameters times tokens above which two forwards would take long (on one core more than a second)."""
NOISE = 16
"""Roundings, in units of the precision, that other shapes inside the module may make (tokens of each expert)."""


def small_copy(module: nn.Module, shape: tuple[int, int]) -> nn.Module | None:
    """What `reads_ahead` asks, in evaluation mode and in fp32 at least; None of a module without values, of one that
    is large, and of one that cannot be copied. shape: [b, s] of a micro-batch."""
    states = [*module.parameters(), *module.buffers()]
    size = sum(parameter.numel() for parameter in module.parameters())
    if any(state.is_meta for state in states) or size > MOST_PARAMETERS or size * math.prod(shape) > MOST_PRODUCTS:
        return None
    try:
        copy = deepcopy(module).eval()
    except Exception:  # whatever somebody's module holds
        return None
    half = any(state.dtype in (torch.float16, torch.bfloat16) for state in states)
    return copy.float() if half else copy


def reads_ahead(copy: nn.Module, shape: tuple[int, int], vocab_size: int) -> str | None:
    """How far the logits before the last token move when that token changes, with the same draws both times; None if
    they do not, and of a module that fails."""
    if vocab_size < 2 or shape[1] < 2:
        return None
    device = next((state.device for state in [*copy.parameters(), *copy.buffers()]), torch.device("cpu"))
    tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(device)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % vocab_size
    try:
        logits, moved = _logits(copy, tokens)[:, :-1], _logits(copy, other)[:, :-1]
    except Exception:  # whatever somebody's module raises; it was traced, so a run may still do
        return None
    furthest, largest = float((moved - logits).abs().max()), float(logits.abs().max())
    return f"by {furthest:.1e} of {largest:.1e}" if furthest > NOISE * torch.finfo(logits.dtype).eps * largest else None


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(1)
        found: Any = module(tokens)
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits
