"""MLP activations. A gated one takes `[..., 2f]`, gate first, and returns `[..., f]` (GLU variants, arXiv
2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Exact GELU (arXiv 1606.08415)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation that GPT-2 uses."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) * value, exact GELU."""
    gate, value = x.chunk(2, -1)
    return F.gelu(gate) * value


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) ** 2 (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "swiglu": swiglu,
    "geglu": geglu,
    "squared-relu": squared_relu,
}
