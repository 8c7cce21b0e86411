"""The reference model of the peers: the GPT that one writes with torch.nn on an afternoon, and its training step.

Pre-norm blocks, learned positions, biases, tanh GELU, the library's attention and cross entropy, fused AdamW: the same
arithmetic as megalite's `gpt` family. It can be cut into equal stages, which torch's pipelines need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalite.config import ModelConfig


class Attention(nn.Module):
    """Causal self-attention; `apart`: three projections in place of one, which DTensor's plans need."""

    def __init__(self, h: int, heads: int, *, apart: bool) -> None:
        super().__init__()
        self.d, self.apart = h // heads, apart
        if apart:
            self.q, self.k, self.v = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        else:
            self.qkv = nn.Linear(h, 3 * h)
        self.proj = nn.Linear(h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        parts = (self.q(x), self.k(x), self.v(x)) if self.apart else self.qkv(x).chunk(3, -1)
        q, k, v = (part.view(b, s, -1, self.d).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.proj(y.transpose(1, 2).reshape(b, s, -1))
        return result


class Block(nn.Module):
    """x + attention, x + MLP."""

    def __init__(self, model: ModelConfig, *, apart: bool) -> None:
        super().__init__()
        h = model.hidden_size
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attention = Attention(h, model.num_attention_heads, apart=apart)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return result


class PlainGPT(nn.Module):
    """Stage `stage` of `stages` equal ones: tokens or activations -> activations or logits."""

    def __init__(self, model: ModelConfig, stage: int = 0, stages: int = 1, *, apart: bool = False) -> None:
        super().__init__()
        h, vocabulary = model.hidden_size, model.vocab_size
        assert vocabulary is not None
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.words, self.positions = nn.Embedding(vocabulary, h), nn.Embedding(model.seq_length, h)
        self.blocks = nn.ModuleList(Block(model, apart=apart) for _ in range(model.num_layers // stages))
        if self.last:
            self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
        if stages == 1 and not model.untie_embeddings_and_output_weights:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of `[b, s, V]` and `[b, s]`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def adamw(parameters: Iterable[Any], lr: float = 1e-4) -> torch.optim.Optimizer:
    """The update that megalite's step makes with the same numbers."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)


def batch(model: ModelConfig, sequences: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and labels `[b, s]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.vocab_size or 2, (sequences, model.seq_length + 1), generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain_step(
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    labels: Tensor,
    *,
    clip: Iterable[nn.Parameter] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of,
    bf16: bool = False,
    num_microbatches: int = 1,
) -> Callable[[], None]:
    """The step of a training script: forward, loss of logits and labels, backward, clipping to norm 1 of `clip`,
    update."""
    parameters = list(clip) if clip is not None else []

    def step() -> None:
        for x, y in zip(tokens.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True):
            with torch.autocast(tokens.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
                logits = forward(x)
            (loss(logits, y) / num_microbatches).backward()
        if parameters:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
