"""Modules for `--model-module` in tests: one of our own with everything that is awkward, and models of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mixer(nn.Module):
    """Tied embeddings, a skip from the first layer to the last, a mask, a saved buffer, a parameter that does not
    learn, another that nothing is computed with."""

    def __init__(self, vocab_size: int, dropout: float) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(vocab_size, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
        )
        self.last, self.out, self.unused = nn.Linear(12, 6), nn.Linear(6, vocab_size, bias=False), nn.Linear(2, 2)
        self.out.weight = self.words.weight
        self.blocks[2][1].weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        begin: Tensor = self.first(self.words(tokens))
        seen = torch.arange(tokens.shape[1], device=tokens.device) < 5
        y = begin
        for block in self.blocks:
            y = y + self.scale * block(y) * seen[:, None]
        logits: Tensor = self.out(self.last(torch.cat([begin, y], -1)).relu_())
        return logits


class Gated(nn.Module):
    """Linear layers that a table of names cuts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(torch.tanh(self.gate(y)) * self.up(y))
        return out


def mixer(vocab_size: int) -> nn.Module:
    return Mixer(vocab_size, 0.0)


def dropping(vocab_size: int) -> nn.Module:
    return Mixer(vocab_size, 0.3)


def untied(vocab_size: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab_size, 6), *(Gated(6) for _ in range(3)), nn.Linear(6, vocab_size))


class Averaging(nn.Module):
    """Every position reads all of them, as attention without its mask."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def averaging(vocab_size: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab_size, 6), Averaging(), nn.Linear(6, vocab_size))


def two_dimensional(vocab_size: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab_size, 6), nn.Flatten())


def too_few() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 6), nn.Linear(6, 8))


def wants_width(width: int) -> nn.Module:
    return nn.Linear(width, width)


def broken() -> nn.Module:
    raise RuntimeError("no weights here")


def no_module() -> int:
    return 3


def depends(vocab_size: int) -> nn.Module:
    class Depends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(vocab_size, vocab_size)

        def forward(self, tokens: Tensor) -> Tensor:
            x: Tensor = self.words(tokens)
            return x if x.sum() > 0 else -x

    return Depends()


def gpt2(vocab_size: int, seq_length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=vocab_size, n_positions=seq_length)
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **still))


def llama(vocab_size: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=vocab_size))


class Attending(nn.Module):
    """A block whose attention is torch's, with rotated positions. mask: `[b, 1, s, s]` in place of a causal one."""

    mask: Tensor | None = None

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.heads, self.up, self.down = heads, nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("rates", 0.3 ** torch.arange(width // heads).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        angles = torch.arange(s, device=x.device)[:, None] * self.rates
        kv = width // 2
        q, k, v = (
            part.view(b, s, -1, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split([width, kv, kv], -1)
        )
        q, k = ((y * angles.cos() + y.roll(1, -1) * angles.sin()).to(v.dtype) for y in (q, k))
        seen = dict(is_causal=True) if self.mask is None else dict(attn_mask=self.mask)
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.4, enable_gqa=True, **seen)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, width))
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Positioned(nn.Module):
    """Words and their places, a row of a table each."""

    def __init__(self, vocab_size: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return found


def attending(vocab_size: int, seq_length: int) -> nn.Module:
    blocks = (Attending(16, 4) for _ in range(2))
    return nn.Sequential(Positioned(vocab_size, seq_length, 16), *blocks, nn.Linear(16, vocab_size))


SMALL: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=8, experts_implementation="batched_mm")


def gemma3(vocab_size: int) -> nn.Module:
    """A sliding window in two layers of three."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    own: dict[str, Any] = dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=16, layer_types=kinds)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL | own | {"num_hidden_layers": 3, "vocab_size": vocab_size}))


def olmo2(vocab_size: int) -> nn.Module:
    """Norms behind attention and MLP."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**SMALL, vocab_size=vocab_size))


def mamba2(vocab_size: int) -> nn.Module:
    """State-space layers, in chunks of 4 tokens."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    own: dict[str, Any] = dict(num_heads=4, head_dim=8, state_size=8, n_groups=1, chunk_size=4, hidden_size=16)
    return Mamba2ForCausalLM(Mamba2Config(**own, num_hidden_layers=2, vocab_size=vocab_size))


def deepseek3(vocab_size: int) -> nn.Module:
    """Latent attention; experts in groups behind a dense layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent: dict[str, Any] = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
    routed: dict[str, Any] = dict(n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1)
    sizes = SMALL | latent | EXPERTS | routed | {"num_key_value_heads": 2}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, vocab_size=vocab_size))


def qwen3_moe(vocab_size: int) -> nn.Module:
    """Experts in every layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, head_dim=8, vocab_size=vocab_size))


def qwen3_next(vocab_size: int) -> nn.Module:
    """Gated delta rule in three layers of four, experts beside a shared one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear: dict[str, Any] = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_conv_kernel_dim=2)
    heads: dict[str, Any] = dict(linear_key_head_dim=4, linear_value_head_dim=4, head_dim=8)
    own = SMALL | EXPERTS | linear | heads | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 8}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**own, num_experts=4, vocab_size=vocab_size))
