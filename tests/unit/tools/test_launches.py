"""Kernels and bytes of a compiled block beside nanoGPT's, counted without a GPU."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.counted_launches import Traffic, estimate, nanogpt, of_a_block, of_a_logit, ours

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="counts with torch 2.13"),
]


def test_a_block_launches_no_more_than_nanogpts() -> None:
    forward, backward = (sum(part.values()) for part in of_a_block(ours))
    assert (forward, backward) == (9, 31)
    theirs = [sum(part.values()) for part in of_a_block(nanogpt)]
    assert forward <= theirs[0] and backward <= theirs[1]


def test_a_step_is_estimated_no_slower_than_nanogpts() -> None:
    counts = {
        name: (Traffic.of_a_block(make), of_a_logit(name)) for name, make in (("nanoGPT", nanogpt), ("megalite", ours))
    }
    for vocabulary in (50304, 50257):
        ms = {name: estimate(name, vocabulary, *counted)["all"] for name, counted in counts.items()}
        assert ms["megalite"] <= ms["nanoGPT"], vocabulary
