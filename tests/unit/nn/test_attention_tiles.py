"""Attention by tiles against one query at a time: documents, windows, parts of a sequence in any order, dropout."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megalite.nn.attention import tiles as attention_tiles
from megalite.nn.attention.core import AttentionCore
from megalite.nn.attention.tiles import tiled_attention, tiles
from megalite.nn.dropout import keyed_dropout
from megalite.visibility import Visibility


def heads(s: int, b: int, g: int, r: int, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(s)
    shapes = ((s, b, g, r, d), (s, b, g, d), (s, b, g, d))
    return tuple(torch.randn(x, generator=generator, dtype=torch.float64, requires_grad=True) for x in shapes)


def starts_of(lengths: list[list[int]]) -> Tensor:
    """`[b, s]` from the lengths of each sample's documents."""
    return torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in lengths])


def textbook(q: Tensor, k: Tensor, v: Tensor, window: int | None, starts: Tensor | None) -> Tensor:
    """One query after the other, over the list of keys that it may see."""
    s, b, g, r, d = q.shape
    rows = []
    for i in range(s):
        for sample in range(b):
            low = 0 if window is None else max(0, i - window + 1)
            low = low if starts is None else max(low, int(starts[sample, i]))
            scores = torch.einsum("grd,jgd->grj", q[i, sample], k[low : i + 1, sample]) / d**0.5
            rows.append(torch.einsum("grj,jgd->grd", scores.softmax(-1), v[low : i + 1, sample]))
    return torch.stack(rows).view(s, b, g * r * d)


def random_documents(s: int, b: int, rng: random.Random) -> list[list[int]]:
    rows = []
    for _ in range(b):
        cuts = [0, *sorted(rng.sample(range(1, s), rng.randint(0, min(6, s - 1)))), s]
        rows.append([high - low for low, high in zip(cuts, cuts[1:], strict=False)])
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_tiles_are_the_textbook(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any documents, window, groups; tiles small enough that there are many, whole keys or spans of them."""
    rng = random.Random(seed)
    monkeypatch.setattr(attention_tiles, "QUERY_TILE", rng.choice([4, 7, 64]))
    monkeypatch.setattr(attention_tiles, "KEY_SPAN", rng.choice([5, 16, 4096]))
    s, b = rng.choice([9, 33, 50]), rng.choice([1, 2])
    inputs = heads(s, b, 2, rng.choice([1, 3]), rng.choice([1, 8, 20]))
    window = rng.choice([None, 1, 3, 11, 100])
    starts = rng.choice([None, starts_of(random_documents(s, b, rng))])
    expected = textbook(*inputs, window, starts)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, inputs, dy)
    at = torch.arange(s)
    natural = Visibility.of(at, at, window=window, document_starts=starts)
    # the same keys and queries in another order of positions: pieces of a sequence that context parallelism cut
    order = torch.tensor([i for piece in rng.sample(list(at.split(4)), len(at.split(4))) for i in piece.tolist()])
    back = order.argsort()
    shuffled = Visibility.of(order, order, window=window, document_starts=None if starts is None else starts[:, order])
    ways = [tiled_attention(*inputs, natural), tiled_attention(*(x[order] for x in inputs), shuffled)[back]]
    for actual in ways:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
        for a, e in zip(torch.autograd.grad(actual, inputs, dy), gradients, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


def whole_matrices(q: Tensor, k: Tensor, v: Tensor, sight: Visibility, p: float, words: Tensor) -> Tensor:
    """Products of all queries and keys, a softmax, dropout of the matrix of weights."""
    s, b, g, r, d = q.shape
    scores = torch.einsum("sbgrd,kbgd->bgsrk", q, k) / d**0.5
    scores = scores.masked_fill(~sight.dense()[:, None, :, None], float("-inf"))
    weights = keyed_dropout(scores.softmax(-1), p, words.view(b, g, s, r), torch.arange(len(k)))
    return torch.einsum("bgsrk,kbgd->sbgrd", weights, v).reshape(s, b, g * r * d)


def test_dropout_in_tiles_is_that_of_whole_matrices() -> None:
    q, k, v = heads(50, 2, 2, 3)
    at, samples = torch.arange(50), torch.tensor([5, 9])
    starts = starts_of([[20, 30], [50]])
    sight = Visibility.of(at, at, window=None, document_starts=starts)
    core = AttentionCore(dropout=0.3, key=torch.tensor(7), first_head=6)
    dy = torch.randn(50, 2, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    words = core.weight_dropout(samples, sight.queries, q, fused=False).words
    found, expected = (
        (y, *torch.autograd.grad(y, (q, k, v), dy))
        for y in (
            core(q, k, v, document_starts=starts, sample_ids=samples, training=True),
            whole_matrices(q, k, v, sight, 0.3, words),
        )
    )
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


def area(sight: Visibility) -> int:
    return sum((t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in tiles(sight, 1, 1))


def test_what_nobody_sees_is_not_computed() -> None:
    """Products of scores, counted: eight documents cost an eighth of causal attention, a window its own width."""
    s = 2048
    at = torch.arange(s)
    causal = area(Visibility(at, at))
    documents = area(Visibility.of(at, at, window=None, document_starts=starts_of([[s // 8] * 8])))
    window = area(Visibility.of(at, at, window=s // 8, document_starts=None))
    assert causal < 0.53 * s * s
    assert documents < 0.16 * causal
    assert window < 0.30 * causal


@pytest.mark.parametrize("core", [AttentionCore(), AttentionCore(dropout=1e-15, key=torch.tensor(3))])
def test_documents_hide(core: AttentionCore) -> None:
    """A document's result does not move with what is before it, and with the mask off it does."""
    q, k, v = heads(40, 1, 2, 1)
    starts = starts_of([[25, 15]])
    other = [torch.cat((torch.randn_like(x[:25]), x[25:])) for x in (q, k, v)]

    def moved(starts: Tensor | None) -> float:
        more = {"document_starts": starts, "sample_ids": torch.arange(1), "training": True}
        return float((core(q, k, v, **more) - core(*other, **more))[25:].detach().abs().max())

    assert moved(starts) == 0.0
    assert moved(None) > 1e-3
