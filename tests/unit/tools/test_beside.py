"""Steps beside those of peers, by hand and on the page."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu_page
from benchmarks.beside import Counts, cases, counts, fused_sparse_bytes, held, operands_of, rows, step_of, table
from benchmarks.roofline import config_of


def test_a_step_of_llama_by_hand() -> None:
    """32 layers of width 4,096, 8 of 32 heads for keys, an MLP of 14,336; 8,192 tokens, 128,256 words."""
    _, llama, _ = cases()
    tokens, h, f, v = 8192, 4096, 14336, 128256
    step = step_of(llama, 32, v, 1e9, 2.8e9, 5.0)
    weights = h * (h + 2 * 1024) + h * h + 3 * h * f
    assert step.products == pytest.approx(32 * 6 * tokens * weights / 680e12, rel=1e-12)
    assert step.attention == pytest.approx(32 * 3.5 * tokens * 2 * tokens * h / 372e12, rel=1e-12)
    assert step.beside == pytest.approx(32e-3, rel=1e-12)
    assert step.head == pytest.approx(6 * tokens * h * v / 680e12 + 5 * tokens * v / 2.8e12, rel=1e-12)
    assert step.update == pytest.approx(42e9 / 2.8e12, rel=1e-12)
    assert step.rate == pytest.approx(tokens / sum(step[1:]), rel=1e-12)
    operands = tokens * (h + h + h + f + (h + 2048) + h + 2 * f + h)
    assert operands_of(config_of(llama)) == operands
    narrow = step_of(llama, 32, v, 1e9, 2.8e9, 5.0, float8=7.0)
    assert narrow.products == pytest.approx(step.products * 680 / 1200, rel=1e-12)
    assert narrow.beside - step.beside == pytest.approx(32 * 7 * operands / 2.8e12, rel=1e-12)
    assert narrow[2:3] + narrow[4:] == step[2:3] + step[4:]


def test_fused_kernels_by_hand() -> None:
    """Width 2,048, 32 + 4 heads of 128, 8 experts of 768 a token, of the 16 of a GPU."""
    h, heads, rows_, scores = 2048, 36 * 128, 8, 16
    numbers = 22 * h + 9 * heads + 4 * (rows_ + 1) * h + 8 * 768 * rows_ + 8 * scores
    assert fused_sparse_bytes(config_of(cases()[2])) == 2 * 4096 * numbers


def test_the_page_shows_what_was_counted() -> None:
    assert gpu_page.written("beside") == table(held())


def test_what_is_asked_of_dense_models_is_kept() -> None:
    found = {row.what: row.ours.rate / row.theirs.rate - row.asked for row in rows(held())[:3]}
    assert min(found.values()) >= 0, found
    more = held()._replace(blocks={**held().blocks, "Llama": 200.0})
    assert min(row.ours.rate / row.theirs.rate - row.asked for row in rows(more)[:3]) < 0


@pytest.mark.full
@pytest.mark.skipif(not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="counts with torch 2.13")
def test_it_counts_the_same_again() -> None:
    assert isinstance(held(), Counts) and counts()._asdict() == held()._asdict()
