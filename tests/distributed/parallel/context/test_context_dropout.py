"""Dropout of attention weights is keyed by places: the same elements are dropped at every context-parallel size."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.comm import ContextAxes, ParallelMesh
from megalite.comm.world import World
from megalite.microbatch import Microbatch
from megalite.nn import AttentionCore
from megalite.nn.attention.context import context_attention
from megalite.parallel.context import SequenceCut
from megalite.testing import run_ranks, run_single

S, B, G, R = 16, 2, 4, 2
MASKS = list(itertools.product((None, 5), (False, True)))


def weights(core: AttentionCore, starts: Tensor | None, world: World, kind: str) -> tuple[Tensor, Tensor]:
    """(places of this rank's queries, their weights `[s/c, b, g, r, s]` after dropout: values are unit vectors)."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(S, B, G, R, S, generator=generator, dtype=torch.float64)
    k = torch.randn(S, B, G, S, generator=generator, dtype=torch.float64)
    v = torch.eye(S, dtype=torch.float64)[:, None, None].expand(S, B, G, S)
    ids = torch.zeros(B, S, dtype=torch.int64)
    batch = Microbatch(ids, ids, ids, ids, torch.tensor([3, 8]), starts)
    traders = world.size if kind == "a2a" else 1
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, cp=world.size, cp_heads=traders)
    axes: ContextAxes = mesh.context(gathers=kind == "all_gather")
    if world.size == 1:
        y = core(q, k, v, document_starts=starts, sample_ids=batch.sample_ids, training=True)
        return torch.arange(S), y.view(S, B, G, R, S)
    cut = SequenceCut(world.rank, world.size, axes.ring.size)(batch)
    assert cut.places is not None
    own = cut.places
    y = context_attention(replace(core, axes=axes), q[own], k[own], v[own], cut, None, training=True)
    return own, y.view(len(own), B, G, R, S)


def all_weights(world: World, kind: str) -> list[tuple[Tensor, Tensor]]:
    """Of every window, with documents and without."""
    starts = torch.tensor([[0] * 7 + [7] * 9, [0] * 2 + [2] * 11 + [13] * 3])
    return [
        weights(AttentionCore(dropout=0.4, key=torch.tensor(7), window=w), starts if apart else None, world, kind)
        for w, apart in MASKS
    ]


@pytest.mark.parametrize(("kind", "size"), [("p2p", 2), ("p2p", 4), ("all_gather", 4), ("a2a", 4)])
def test_masks_do_not_know_the_layout(kind: str, size: int) -> None:
    expected = run_single(all_weights, kind)
    found = run_ranks(all_weights, size, kind)
    for case, (_, whole) in enumerate(expected):
        joined = torch.empty_like(whole)
        for rank in found:
            joined[rank[case][0]] = rank[case][1]
        assert torch.equal(joined == 0, whole == 0)
        torch.testing.assert_close(joined, whole, rtol=1e-12, atol=1e-13)
        visible = int((whole != 0).sum())
        assert 0 < visible < S * S // 2 * B * G * R  # the test drops something
