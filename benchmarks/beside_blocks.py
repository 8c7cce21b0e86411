"""Blocks that `beside.py` counts: a Llama of ours, one of torchtitan's published structure, operands in float8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.counted_launches import MODEL, SEQUENCES, Counting, Graphs, blocks_of
from megalite.config import Experts, Float8, ModelConfig
from megalite.parallel.tensor import LayerContext

HIDDEN, HEADS, GROUPS, FFN, LENGTH = MODEL["hidden_size"], 4, 1, 896, MODEL["seq_length"]
"""The proportions of Llama 3 8B: four heads share a key, and an MLP is 3.5 times as wide."""


def llama(blocks: int, graphs: Graphs, sequences: int = SEQUENCES) -> tuple[Callable[[], Tensor], nn.Module]:
    """(A forward, the model) of so many blocks of ours: bf16 weights, fp32 main gradients."""
    return _ours(blocks, graphs, sequences, num_attention_heads=HEADS, num_query_groups=GROUPS, ffn_hidden_size=FFN)


def qwen(blocks: int, graphs: Graphs, sequences: int = SEQUENCES) -> tuple[Callable[[], Tensor], nn.Module]:
    """The same with the proportions of Qwen3-30B-A3B: queries twice as wide as the model, 8 heads a key, a token
    takes 8 experts, each 3/8 as wide. Products are those of a CPU, one expert after the other; bytes are the same if
    all have as many rows as the one that is compiled: there are no more than these 8."""
    experts = Experts(num_experts=8, moe_router_topk=8, moe_ffn_hidden_size=3 * HIDDEN // 8)
    return _ours(
        blocks, graphs, sequences, num_attention_heads=8, num_query_groups=1, kv_channels=HIDDEN // 4,
        qk_layernorm=True, experts=experts,
    )  # fmt: skip


def _ours(blocks: int, graphs: Graphs, sequences: int, **fields: Any) -> tuple[Callable[[], Tensor], nn.Module]:
    given = ModelConfig(
        **{**MODEL, "num_layers": blocks, **fields}, activation="swiglu", normalization="RMSNorm",
        position_embedding_type="rope", add_bias_linear=False,
    )  # fmt: skip
    return blocks_of(given, graphs, sequences)


class TitanBlock(nn.Module):
    """A Llama block as torchtitan's: three projections, rotation in fp32, grouped keys, three matrices of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.width = HIDDEN // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2))
        sizes = {"wq": HIDDEN, "wk": GROUPS * self.width, "wv": GROUPS * self.width, "wo": HIDDEN}
        self.attention = nn.ModuleDict({name: nn.Linear(HIDDEN, n, bias=False) for name, n in sizes.items()})
        self.w1, self.w3 = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        normed = self.norms[0](x)
        q, k, v = (self.attention[name](normed).view(b, s, -1, self.width) for name in ("wq", "wk", "wv"))
        q, k = (rotated(each, cos, sin) for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attention["wo"](y.transpose(1, 2).contiguous().view(b, s, -1))
        normed = self.norms[1](x)
        result: Tensor = x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return result


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring channels are a plane; in fp32."""
    one, other = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((one * cos - other * sin, one * sin + other * cos), -1).flatten(-2).type_as(x)


def titan(blocks: int, graphs: Graphs, sequences: int = SEQUENCES) -> tuple[Callable[[], Tensor], nn.Module]:
    """(A forward, the model) of so many such blocks, each compiled, with the bf16 weights that FSDP has gathered. What
    FSDP itself does (casts, copies into and out of its buffers) is not counted."""
    model = nn.ModuleList(TitanBlock() for _ in range(blocks)).bfloat16()
    compiled = [torch.compile(block, backend=graphs) for block in model]
    angles = torch.arange(LENGTH)[:, None, None] * torch.ones(HIDDEN // HEADS // 2)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(sequences, LENGTH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Tensor:
        y = x
        for block in compiled:
            y = block(y, cos, sin)
        return y

    return forward, model


def of_an_operand() -> float:
    """Bytes that the compiled passes of x and dy move for each element, forward and backward, where a tensor has one
    scale; the weight is kept."""
    torch._dynamo.reset()
    graphs, size = Graphs(), 256
    context = LayerContext(dtype=torch.bfloat16, float8=Float8(fp8_format="hybrid"), keeps_float8=True)
    products = context.products()
    x, weight, dy = (torch.randn(size, size).bfloat16() for _ in range(3))
    y = torch.zeros(size, size).bfloat16()

    def three() -> None:
        _, kept = products.forward(x, weight, None)
        products.begin_backward(dy, weight, kept)
        products.input_gradient(dy, weight, kept)
        products.weight_gradient(dy, x, weight, kept)

    patched: Any = patch("megalite.parallel.tensor.float8_kernels.kernels_on")
    eager = patched.get_original()[0]("cpu")
    kernels = type(eager)(*(torch.compile(function, backend=graphs, dynamic=True) for function in eager))
    patched.new = lambda device_type: kernels
    with patched:
        three()
        graphs.counting = counting = Counting()
        with patch("megalite.parallel.tensor.float8.product", lambda a, b, *more, **how: y), counting:
            three()
    return counting.nbytes / (2 * size * size)
