"""Attention sinks and soft caps against a softmax with one column more, in fp64."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.config.model_parts import Latent
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn import LayerStack
from megalite.nn.attention import tiles as attention_tiles
from megalite.nn.attention.core import AttentionCore
from megalite.parallel.context import ring
from megalite.parallel.tensor import LayerContext


def textbook(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, cap: float | None, window: int | None, starts: Tensor | None
) -> Tensor:
    """Whole matrices; the sink is a column of logits, dropped after the softmax."""
    (s, b, g, r, d), length = q.shape, len(k)
    scores = torch.einsum("sbgrd,kbgd->bgrsk", q, k) / d**0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(length)
    queries = at[length - s :]
    hidden = at > queries[:, None]
    if window is not None:
        hidden = hidden | (at <= queries[:, None] - window)
    hidden = hidden.expand(b, s, length)
    if starts is not None:
        hidden = hidden | (at < starts[..., None])
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if z is not None:
        scores = torch.cat((scores, z.view(1, g, r, 1, 1).expand(b, g, r, s, 1)), -1)
    return torch.einsum("bgrsk,kbgd->sbgrd", scores.softmax(-1)[..., :length], v).reshape(s, b, g * r * d)


def gap(seed: int, *, kind: str, cap: float | None) -> float:
    """Largest difference of the result and of all gradients, that of the sinks included."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    s, b, g, r, d = rng.choice([9, 40, 80]), rng.choice([1, 2]), 2, rng.choice([1, 3]), 8
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v, z = draw(s, b, g, r, d), draw(s, b, g, d), draw(s, b, g, d), draw(g * r)
    window = rng.choice([None, 1, 5, 100])
    starts = torch.tensor([[0] * 4 + [4] * (s - 4), [0] * s][:b]) if rng.random() < 0.5 else None
    sinks = {"vanilla": None, "off-by-one": torch.zeros(g * r, dtype=torch.float64), "learnable": z}[kind]
    leaves = (q, k, v, z) if kind == "learnable" else (q, k, v)
    expected = textbook(q, k, v, sinks, cap, window, starts)
    found = AttentionCore(window=window, softcap=cap)(q, k, v, sinks=sinks, document_starts=starts, training=True)
    dy = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    pairs = zip(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True)
    return max(float((a - e).detach().abs().max()) for a, e in [(found, expected), *pairs])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_sinks_and_caps_are_the_textbook(kind: str, cap: float | None, seed: int) -> None:
    """Documents, windows, groups; several tiles where there are more than a few queries."""
    with patch.object(attention_tiles, "QUERY_TILE", 16), patch.object(attention_tiles, "KEY_SPAN", 24):
        assert gap(seed, kind=kind, cap=cap) < 1e-12


def test_the_last_token_of_a_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64) for x in ((1, 2, 2, 3, 4), *[(7, 2, 2, 4)] * 2))
    z = torch.arange(6.0, dtype=torch.float64)
    found = AttentionCore(softcap=0.5)(q, k, v, sinks=z)
    torch.testing.assert_close(found, textbook(q, k, v, z, 0.5, None, None), rtol=1e-12, atol=1e-12)


MLA = Latent(
    multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5
)


@pytest.mark.parametrize("fields", [dict(num_query_groups=2), dict(latent=MLA)], ids=["attention", "latent"])
@torch.no_grad()
def test_layers_hand_each_head_its_sink(fields: dict[str, Any]) -> None:
    """A sink without end takes all that its head would say, one of minus infinity nothing, one of 0 is off-by-one."""
    shape = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=12, vocab_size=30)
    tokens = torch.randint(0, 30, (2, 13), generator=torch.Generator().manual_seed(0))
    data = Microbatch(tokens[:, :-1], tokens[:, 1:], torch.arange(12).expand(2, 12), torch.ones(2, 12), torch.arange(2))

    def made(kind: str) -> LayerStack:
        config = ModelConfig(**shape, **fields, position_embedding_type="rope", softmax_type=kind)
        return build_stack(config, layer_specs(config), LayerContext(dtype=torch.float64), init_seed=1)

    vanilla, learnable = made("vanilla"), made("learnable")
    attentions = [learnable.get_submodule(f"layers.{index}.attention") for index in (0, 1)]
    plain = vanilla.body(None, data)
    for sink, expected in ((-1e9, plain), (0.0, made("off-by-one").body(None, data))):
        for attention in attentions:
            attention.softmax_offset.fill_(sink)
        torch.testing.assert_close(learnable.body(None, data), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(expected, plain)
    for head in range(4):
        for attention in attentions:
            attention.softmax_offset.copy_(torch.where(torch.arange(4) == head, 1e9, -1e9))
        silent = made("vanilla")
        for index in (0, 1):
            silent.get_submodule(f"layers.{index}.attention.proj").weight.unflatten(1, (4, -1))[:, head] = 0
        torch.testing.assert_close(learnable.body(None, data), silent.body(None, data), rtol=1e-12, atol=1e-12)


# ---- ways to be quietly wrong ----------------------------------------------------------------------------------------


def test_a_backward_that_forgets_the_sinks_is_seen() -> None:
    """The log-sums of the keys alone, in backward: the weights are too large."""

    def keys_alone(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        right(out, lse, sinks)
        return lse

    right = ring.join_sinks
    with patch.object(ring, "join_sinks", keys_alone):
        assert gap(0, kind="learnable", cap=None) > 1e-3


def test_a_sink_without_a_gradient_is_seen() -> None:
    with patch.object(ring, "sink_gradient", lambda lse, delta, sinks, *_: torch.zeros_like(sinks)):
        assert gap(0, kind="learnable", cap=None) > 1e-3
