"""MLP activations. A gated one takes `[..., 2f]`, gate first, and returns `[..., f]` (GLU variants, arXiv
2002.05202).

Each has its gradient beside it, (input, gradient of the result) -> gradient of the input: the layer that computes an
activation again in backward needs no second graph for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig

Elementwise = Callable[[Tensor], Tensor]
Gradient = Callable[[Tensor, Tensor], Tensor]
Activation = tuple[Elementwise, Gradient]
aten = torch.ops.aten
QUICK = 1.702


def gelu(x: Tensor) -> Tensor:
    """Exact GELU (arXiv 1606.08415)."""
    return F.gelu(x)


def gelu_gradient(x: Tensor, dy: Tensor, approximate: str = "none") -> Tensor:
    dx: Tensor = aten.gelu_backward(dy, x, approximate=approximate)
    return dx


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation that GPT-2 uses."""
    return F.gelu(x, approximate="tanh")


def silu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    dx: Tensor = aten.silu_backward(dy, x)
    return dx


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) ** 2 (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


@dataclass(frozen=True)
class Gated:
    """plain(gate) * value. gradient: that of `plain`."""

    plain: Elementwise
    gradient: Gradient

    def __call__(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return self.plain(gate) * value

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return torch.cat([self.gradient(gate, dy * value), dy * self.plain(gate)], -1)


def clamped(plain: Elementwise, gradient: Gradient, offset: float, most: float | None) -> Activation:
    """(A gated activation, its gradient) with the gate at most `most`, the value between it and its negative, and
    `offset` added to the value (gpt-oss)."""
    bound = torch.inf if most is None else most

    def shifted(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return torch.cat([gate.clamp(max=bound), value.clamp(-bound, bound) + offset], -1)

    def shifted_gradient(x: Tensor, dy: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        within = torch.cat([gate <= bound, value.abs() <= bound], -1)
        return gradient(shifted(x), dy) * within

    return lambda x: plain(shifted(x)), shifted_gradient


GATES = {
    "swiglu": Gated(F.silu, silu_gradient),
    "geglu": Gated(gelu, gelu_gradient),
    "geglu-tanh": Gated(gelu_tanh, partial(gelu_gradient, approximate="tanh")),
    # silu(1.702 x) / 1.702, which gpt-oss has for GELU (arXiv 2508.10925)
    "quick-geglu": Gated(lambda x: x * torch.sigmoid(QUICK * x), lambda x, dy: silu_gradient(QUICK * x, dy)),
}
ACTIVATIONS: dict[str, Activation] = {
    "gelu": (gelu, gelu_gradient),
    "gelu-tanh": (gelu_tanh, partial(gelu_gradient, approximate="tanh")),
    "squared-relu": (squared_relu, lambda x, dy: dy * F.relu(x) * 2),
    **{name: (gate, gate.backward) for name, gate in GATES.items()},
}


def activation_of(config: ModelConfig) -> Activation:
    """(Activation, its gradient) of a model's MLPs."""
    plain, gradient = ACTIVATIONS[config.activation]
    offset, most = config.glu_linear_offset, config.activation_func_clamp_value
    return (plain, gradient) if offset == 0.0 and most is None else clamped(plain, gradient, offset, most)
