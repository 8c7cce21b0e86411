"""Sliding windows in every path of attention, parallel residuals, scaled rotary frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.inventory.tiling import BLOCKED_FROM
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.attention.core import AttentionCore
from megalite.nn.kv_cache import LayerCache
from megalite.nn.rope import slow_down
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor.context import LayerContext


def heads(s: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(s)
    q = torch.randn(s, 2, 2, 3, 4, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, s, 2, 2, 4, generator=generator, dtype=torch.float64)
    return q, k, v


def textbook(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None) -> Tensor:
    """One query at a time, over the list of keys that it may see."""
    s, b, g, r, d = q.shape
    out = torch.zeros(s, b, g, r, d, dtype=q.dtype)
    for i in range(s):
        for sample in range(b):
            seen = [j for j in range(s) if i - window < j <= i]
            if documents is not None:
                seen = [j for j in seen if documents[sample, j] == documents[sample, i]]
            scores = torch.einsum("grd,jgd->grj", q[i, sample], k[seen, sample]) / math.sqrt(d)
            out[i, sample] = torch.einsum("grj,jgd->grd", scores.softmax(-1), v[seen, sample])
    return out.reshape(s, b, -1)


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("s", [9, BLOCKED_FROM])
def test_window_in_both_kernels(window: int, documents: bool, s: int) -> None:
    q, k, v = heads(s)
    starts = torch.tensor([[0] * 4 + [4] * (s - 4), [0] * s]) if documents else None
    expected = textbook(q, k, v, window, starts)
    core = AttentionCore(window=window)
    torch.testing.assert_close(core(q, k, v, document_starts=starts), expected, rtol=1e-12, atol=1e-12)
    # dropout takes the path of products and a softmax; so little of it drops nothing here
    keyed = AttentionCore(window=window, dropout=1e-15, key=torch.tensor(7))
    plain = keyed(q, k, v, document_starts=starts, sample_ids=torch.arange(2), training=True)
    torch.testing.assert_close(plain, expected, rtol=1e-12, atol=1e-12)


def model(**changes: Any) -> Any:
    config = ModelConfig(
        **(
            dict(
                num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=12, vocab_size=30, init_method_std=0.4,
                position_embedding_type="rope",
            )
            | changes
        )
    )  # fmt: skip
    return build_stack(config, layer_specs(config), LayerContext(dtype=torch.float64), init_seed=1).eval()


def batch(tokens: Tensor, first: int = 0) -> Microbatch:
    positions = torch.arange(first, first + tokens.shape[1]).expand(tokens.shape)
    mask = torch.ones(tokens.shape)
    return Microbatch(
        tokens=tokens, labels=tokens, positions=positions, loss_mask=mask, sample_ids=torch.arange(len(tokens))
    )


@torch.no_grad()
def test_token_by_token_with_a_cache_is_the_whole_sequence() -> None:
    stack = model(window_size=3, use_parallel_residual=True)
    tokens = torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(0))
    whole = stack.body(None, batch(tokens))
    cache = [LayerCache(12) for _ in range(2)]
    pieces = [stack.body(None, batch(tokens[:, i : i + 1], i), cache) for i in range(12)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_window_forgets() -> None:
    """Two layers with a window of 3 see 4 tokens back: the fifth can change nothing."""
    stack = model(window_size=3)
    tokens = torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 30
    moved = (stack.body(None, batch(tokens)) != stack.body(None, batch(changed))).flatten(1).any(1)
    assert moved.nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("skips", "nope", "windows", "turned"),
    [
        ("3", None, "1101101", "1111111"),
        ("[0]*2+[1]*5", None, "0011111", "1111111"),
        (None, "7", "1111111", "1111110"),
        ("([1]*3+[0])+[1,0,1]", "[1]+[0]*6", "1110101", "0111111"),
    ],
)
@torch.no_grad()
def test_every_layer_sees_what_its_flags_say(skips: str | None, nope: str | None, windows: str, turned: str) -> None:
    """Block by block from models that have one kind of layer only; their weights are the same."""
    shape = dict(num_layers=7)
    mixed = model(**shape, window_size=3, window_attn_skip_freq=skips, no_rope_freq=nope)
    kinds = {
        (window, rope): model(
            **shape,
            window_size=3 if window == "1" else None,
            position_embedding_type="rope" if rope == "1" else "none",
        )
        for window in "01"
        for rope in "01"
    }
    tokens = batch(torch.randint(0, 30, (2, 12), generator=torch.Generator().manual_seed(0)))
    x = mixed.get_submodule("embedding")(None, tokens)
    for index, kind in enumerate(zip(windows, turned, strict=True)):
        x = kinds[kind].get_submodule(f"layers.{index}")(x, tokens)
    assert torch.equal(mixed.body(None, tokens), x)
    cache = [LayerCache(12) for _ in range(7)]
    parts = [(0, 5), (5, 6), *((i, i + 1) for i in range(6, 12))]  # the prompt, then token by token
    pieces = [stack_part(mixed, tokens.tokens[:, a:b], a, cache) for a, b in parts]
    torch.testing.assert_close(torch.cat(pieces), x, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_every_layer_has_the_sinks_and_the_cap_that_its_flags_say() -> None:
    """As above, learned sinks too: a layer without them has no such parameter."""
    shape = dict(num_layers=4)
    sinks, cap = dict(softmax_type="learnable"), dict(attn_logit_softcapping=0.3)
    skips = dict(softmax_type_skip_freq="2", attn_logit_softcapping_skip_freq="[1]*2+[0]*2")
    mixed = model(**shape, **sinks, **cap, **skips)
    assert [name.split(".")[1] for name in mixed.state_dict() if "softmax_offset" in name] == ["0", "2"]
    kinds = [model(**shape, **has) for has in (sinks | cap, cap, sinks, {})]
    tokens = batch(torch.randint(0, 30, (2, 12), generator=torch.Generator().manual_seed(0)))
    x = mixed.get_submodule("embedding")(None, tokens)
    for index, kind in enumerate(kinds):
        x = kind.get_submodule(f"layers.{index}")(x, tokens)
    assert torch.equal(mixed.body(None, tokens), x)


def stack_part(stack: LayerStack, tokens: Tensor, first: int, cache: list[LayerCache]) -> Tensor:
    return stack.body(None, batch(tokens, first), cache)


def test_llama3_scaling_keeps_fast_waves_and_divides_slow_ones() -> None:
    turns = torch.tensor([100.0, 4.0, 2.5, 1.0, 0.01], dtype=torch.float64)
    factor = slow_down(turns * 2 * math.pi / 8192, 8.0) / (turns * 2 * math.pi / 8192)
    torch.testing.assert_close(factor, torch.tensor([1, 1, (1 + 1 / 8) / 2, 1 / 8, 1 / 8], dtype=torch.float64))
