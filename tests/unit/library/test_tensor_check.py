"""Between a `col` and its `row` nothing may work along a dimension that is cut: the numbers would be wrong, unsaid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import Axis
from megalite.errors import ConfigError
from megalite.library import Sequences, layers_over

WIDTH, HEAD = 16, 4
TABLE = {"col": ["up"], "row": ["down"]}
Between = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        self.words, self.up, self.between = nn.Embedding(8, 8), nn.Linear(8, WIDTH), between
        with torch.device("meta"):
            self.down = nn.Linear(between(torch.zeros(2, 4, WIDTH)).shape[-1], 8)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.down(self.between(self.up(self.words(tokens))))
        return out


def heads(y: Tensor) -> Tensor:
    return y.view(*y.shape[:2], -1, HEAD).transpose(1, 2)


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)


def attention(y: Tensor) -> Tensor:
    h = F.layer_norm(heads(y), (HEAD,))
    return joined((h @ h.transpose(-1, -2)).softmax(-1) @ h)


def batched(y: Tensor) -> Tensor:
    h = heads(y).reshape(-1, y.shape[1], HEAD)
    h = torch.bmm(torch.bmm(h, h.transpose(1, 2)).softmax(-1), h)
    return joined(h.view(y.shape[0], -1, y.shape[1], HEAD))


def normed(y: Tensor) -> Tensor:
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)


def fused(y: Tensor) -> Tensor:
    q, k = y.view(*y.shape[:2], 2, -1).unbind(2)
    return q * k


RIGHT: dict[str, Between] = {
    "nothing": lambda y: y,
    "elementwise": lambda y: torch.tanh(y) * y[:, :, :] + 1,
    "attention": attention,
    "batched": batched,
    "sdpa": lambda y: joined(F.scaled_dot_product_attention(heads(y), heads(y), heads(y), is_causal=True)),
    "norm over tokens": lambda y: y - y.mean(1, keepdim=True),
}
WRONG: dict[str, tuple[Between, str]] = {
    "rms norm": (lambda y: F.rms_norm(y, y.shape[-1:]), "rms_norm works along 16 values, of which each rank has 8"),
    "layer norm": (lambda y: F.layer_norm(y, y.shape[-1:]), "layer_norm works along 16 values"),
    "norm by hand": (normed, "mean works along 16 values"),
    "softmax": (lambda y: y.softmax(-1), "softmax works along 16 values"),
    "normalize": (lambda y: F.normalize(y, dim=-1), "linalg_vector_norm works along 16 values"),
    "all of it": (lambda y: y - y.mean(), "mean works along 16 values"),
    "product": (lambda y: y @ y.transpose(1, 2) @ y, "matmul works along 16 values"),
    "halves": (lambda y: y.chunk(2, -1)[0] * y.chunk(2, -1)[1], "chunk works along 16 values"),
    "glu": (lambda y: F.glu(y), "glu works along 16 values"),
    "fused": (fused, r"view of \[2, 4, 16\] as \[2, 4, 2, 8\] puts a dimension before the one that is cut"),
}


def cut(between: Between) -> None:
    tokens = torch.empty(2, 4, dtype=torch.int64, device="meta")
    layers_over(Axis("tp", 2, 0, (0, 1)), Model(between), (tokens,), TABLE, Sequences(), ids=None)


@pytest.mark.parametrize("name", RIGHT)
def test_what_works_on_parts_is_cut(name: str) -> None:
    cut(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    between, line = WRONG[name]
    with pytest.raises(ConfigError, match=line):
        cut(between)
