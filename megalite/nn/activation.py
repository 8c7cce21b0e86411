"""MLP activations. A gated one takes `[..., 2f]`, gate first, and returns `[..., f]` (GLU variants, arXiv
2002.05202).

Each has its gradient beside it, (input, gradient of the result) -> gradient of the input: the layer that computes an
activation again in backward needs no second graph for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig
from megalite.nn.clamped_gate import Elementwise, Gradient, clamped, quick_geglu, quick_geglu_gradient

aten = torch.ops.aten


def gelu(x: Tensor) -> Tensor:
    """Exact GELU (arXiv 1606.08415)."""
    return F.gelu(x)


def gelu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    dx: Tensor = aten.gelu_backward(dy, x, approximate="none")
    return dx


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation that GPT-2 uses."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_gradient(x: Tensor, dy: Tensor) -> Tensor:
    dx: Tensor = aten.gelu_backward(dy, x, approximate="tanh")
    return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def swiglu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return torch.cat([aten.silu_backward(dy * value, gate), dy * F.silu(gate)], -1)


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) * value, exact GELU."""
    gate, value = x.chunk(2, -1)
    return F.gelu(gate) * value


def geglu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return torch.cat([aten.gelu_backward(dy * value, gate, approximate="none"), dy * F.gelu(gate)], -1)


def geglu_tanh(x: Tensor) -> Tensor:
    """gelu_tanh(gate) * value."""
    gate, value = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * value


def geglu_tanh_gradient(x: Tensor, dy: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    dgate = aten.gelu_backward(dy * value, gate, approximate="tanh")
    return torch.cat([dgate, dy * F.gelu(gate, approximate="tanh")], -1)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) ** 2 (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


def squared_relu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    return dy * F.relu(x) * 2


ACTIVATIONS: dict[str, Elementwise] = {
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu-tanh": geglu_tanh,
    "quick-geglu": quick_geglu,
    "squared-relu": squared_relu,
}

GRADIENTS: dict[str, Gradient] = {
    "gelu": gelu_gradient,
    "gelu-tanh": gelu_tanh_gradient,
    "swiglu": swiglu_gradient,
    "geglu": geglu_gradient,
    "geglu-tanh": geglu_tanh_gradient,
    "quick-geglu": quick_geglu_gradient,
    "squared-relu": squared_relu_gradient,
}


def activation_of(config: ModelConfig) -> tuple[Elementwise, Gradient]:
    """(Activation, its gradient) of a model's MLPs."""
    plain, gradient = ACTIVATIONS[config.activation], GRADIENTS[config.activation]
    offset, most = config.glu_linear_offset, config.activation_func_clamp_value
    return (plain, gradient) if offset == 0.0 and most is None else clamped(plain, gradient, offset, most)
