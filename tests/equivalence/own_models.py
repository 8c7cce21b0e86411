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
