"""Long tensors piece by piece, so that what a step needs beside them stays small."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

PIECE = 1 << 22
"""Elements at once: 16 MB in fp32 for each temporary tensor."""


def pieces(p: Tensor) -> Iterator[slice]:
    """Slices of `p.view(-1)`."""
    for begin in range(0, p.numel(), PIECE):
        yield slice(begin, begin + PIECE)
