"""Which kernel is chosen for what is needed: written down here once more, by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from megalite.nn.attention import choose as choosing
from megalite.nn.attention import context, masked, trials
from megalite.nn.attention.choose import Need, choose
from megalite.nn.attention.core import AttentionCore
from megalite.nn.attention.tiles import WeightDropout, tiled_attention
from megalite.visibility import Documents, Visibility

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLAIN = Need(CPU, torch.float32, queries=512, keys=512, channels=64, hides=False, rewrites=False)


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "blocked"),
        ({"keeps_weights": False}, "fused"),
        ({"queries": 4096, "keys": 4096}, "fused"),
        ({"queries": 1}, "fused"),  # a token of a generation
        ({"queries": 7}, "tiled"),  # a part of a prompt
        ({"hides": True}, "tiled"),
        ({"rewrites": True}, "tiled"),
        ({"in_parts": True}, "flash"),
        ({"in_parts": True, "channels": 60}, "tiled"),
        ({"device": GPU, "in_parts": True, "channels": 60}, "flex"),
        ({"device": GPU, "in_parts": True, "channels": 12, "hides": True}, "tiled"),
        ({"device": GPU, "in_parts": True, "hides": True}, "flex"),
        ({"device": GPU, "in_parts": True, "rewrites": True}, "tiled"),
        ({"in_parts": True, "channels": 264}, "tiled"),
        ({"in_parts": True, "hides": True}, "tiled"),
        ({"in_parts": True, "rewrites": True}, "tiled"),
        ({"device": GPU}, "fused"),
        ({"device": GPU, "hides": True, "dtype": torch.bfloat16}, "varlen"),
        ({"device": GPU, "hides": True, "dtype": torch.float16}, "flex"),
        ({"device": GPU, "hides": True}, "flex"),
        ({"device": GPU, "hides": True, "dtype": torch.float64}, "flex"),
        ({"device": GPU, "hides": True, "queries": 7}, "tiled"),
        ({"device": GPU, "hides": True, "rewrites": True}, "tiled"),
        ({"drops": True}, "tiled"),
        ({"in_parts": True, "drops": True}, "tiled"),
        ({"device": GPU, "drops": True}, "flex"),
        ({"device": GPU, "drops": True, "hides": True, "bends": True}, "flex"),
        ({"device": GPU, "drops": True, "channels": 8}, "tiled"),
        ({"device": GPU, "drops": True, "queries": 7}, "tiled"),
        ({"device": GPU, "drops": True, "in_parts": True}, "flex"),
        ({"bends": True}, "tiled"),
        ({"device": GPU, "bends": True}, "flex"),
        ({"device": GPU, "bends": True, "hides": True}, "flex"),
        ({"device": GPU, "bends": True, "queries": 1}, "tiled"),
        ({"device": GPU, "bends": True, "rewrites": True}, "tiled"),
        ({"device": GPU, "bends": True, "channels": 8}, "tiled"),
        ({"device": GPU, "bends": True, "in_parts": True}, "flex"),
    ],
)
def test_the_first_kernel_that_can_and_works(changes: dict[str, object], kernel: str) -> None:
    def tried(name: str, need: Need) -> bool:
        return name != "varlen" or need.dtype != torch.float16  # as if it had failed there

    table = tuple(row._replace(works=partial(tried, row.name)) if row.works else row for row in choosing.KERNELS)
    with patch.object(choosing, "KERNELS", table):
        assert choose(replace(PLAIN, **changes)) == kernel  # type: ignore[arg-type]
        with torch.inference_mode():  # nobody waits for a compiler before a text
            found = choose(replace(PLAIN, **changes))  # type: ignore[arg-type]
            assert found != "flex" and (kernel == "flex" or found == kernel)


def test_a_kernel_that_nobody_calls_is_no_tiles() -> None:
    """A row of the table whose call is missing ends the run; tiles do not run under its name."""
    q, k = torch.randn(8, 1, 2, 1, 4), torch.randn(8, 1, 2, 4)
    microbatch: Any = SimpleNamespace(order=torch.arange(8), document_starts=None)
    core = AttentionCore()
    with patch.object(choosing, "KERNELS", (choosing.Kernel("new", lambda need: True), *choosing.KERNELS)):
        with pytest.raises(AssertionError, match="attention by new"):
            core(q, k, k)
        with pytest.raises(AssertionError, match="attention by new"):
            context._over_ring(core, q, k, k, microbatch, None, training=False)


def test_a_kernel_that_is_wrong_is_not_chosen() -> None:
    """Of a kernel whose results are off by a tenth the probe says no."""
    place = torch.device("cpu"), torch.float32
    right = trials.tiled_attention
    wrong = {"varlen": lambda *given, **more: right(*given, **more) * 1.1, "flex": right}
    with patch.dict(trials.MASKED, wrong):
        assert not trials.masked_works.__wrapped__("varlen", *place)
        assert trials.masked_works.__wrapped__("flex", *place)
    assert trials.flash_works(*place) and not trials.flash_works(torch.device("cpu"), torch.int32)


@pytest.mark.parametrize("where", ["recomputed", "scoring", "generating"])
def test_a_trial_is_none_of_its_callers_business(where: str) -> None:
    """The first attention of a run may be recomputed later, whose hooks take what is saved, or have no gradients: the
    trial failed there, and tiles were used from then on."""
    place, found = (torch.device("cpu"), torch.float32), []
    right = trials.tiled_attention

    def attend(x: Tensor) -> Tensor:
        parts = {"FlexKernel": lambda r, drop, cap: trials.TileKernel(r, drop, cap)}
        with patch.dict(trials.MASKED, {"varlen": right, "flex": right}), patch.multiple(trials, **parts):
            tried = [trials.masked_works.__wrapped__(name, *place) for name in ("varlen", "flex")]
            found.extend((*tried, trials.flex_parts_work.__wrapped__(*place)))
        return x * x

    x = torch.ones(3, requires_grad=True)
    if where == "recomputed":
        checkpoint(attend, x, use_reentrant=False).sum().backward()
    else:
        with torch.no_grad() if where == "scoring" else torch.inference_mode():
            attend(x)
    assert found and all(found)


def plain_flex(
    query: Tensor, key: Tensor, value: Tensor, *, score_mod: Any, block_mask: Any, enable_gqa: bool, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """What flex_attention is documented to compute, with gradients, which it has on no CPU."""
    b, heads, s, d = query.shape
    samples, of_heads = torch.arange(b)[:, None, None, None], torch.arange(heads)[:, None, None]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / d**0.5
    at = torch.arange(s)
    scores = scores if score_mod is None else score_mod(scores, samples, of_heads, at[:, None], at)
    shown = block_mask.mask_mod(torch.arange(b)[:, None, None], at, at[:, None], at)
    scores = scores.masked_fill(~shown.expand(b, s, s)[:, None], -torch.inf)
    sums = scores.logsumexp(-1)
    return (scores - sums.masked_fill(sums.isinf(), 0)[..., None]).exp() @ value, sums


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
@pytest.mark.parametrize("s", [64, 300, 512])
def test_blocks_are_those_that_somebody_sees(s: int, window: int | None, documents: bool) -> None:
    at = torch.arange(s)
    starts = torch.stack((at // 70 * 70, at // 200 * 200, at * 0)) if documents else None
    sight = Visibility.of(at, at, window=window, document_starts=starts, at=0)
    found = masked.block_mask(sight, 3, masked.seen_blocks)
    expected = create_block_mask(found.mask_mod, 3, None, s, s, device="cpu")
    assert torch.equal(found.to_dense().expand_as(expected.to_dense()), expected.to_dense())
    dense = torch.ones(3, s, s, dtype=torch.bool) & sight.dense()
    shown = found.mask_mod(torch.arange(3)[:, None, None], 0, at[:, None], at)
    assert torch.equal(dense & (at <= at[:, None]), shown.expand_as(dense))
    whole = torch.zeros(3, -(-s // 128), -(-s // 128), dtype=torch.int64)
    for sample in range(len(found.full_kv_num_blocks)):
        for row, count in enumerate(found.full_kv_num_blocks[sample, 0].tolist()):
            whole[sample, row, found.full_kv_indices[sample, 0, row, :count]] = 1
    for sample, row, column in whole.nonzero().tolist():
        assert dense[sample, row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128].all()
    assert s < 512 or window is not None or documents or int(whole[0].sum()) == 6  # below the diagonal of 4 x 4


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    "bends",
    [
        *({"softcap": 1.5}, {"sinks": True}, {"softcap": 3.0, "sinks": True}),
        *({"drop": 0.6}, {"drop": 0.1, "softcap": 3.0, "sinks": True}),
    ],
    ids=str,
)
def test_caps_and_sinks_of_flex_are_those_of_tiles(bends: dict[str, Any], window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, dy = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((150, 2, 2, 2, 16), (150, 2, 2, 16), (150, 2, 2, 16), (150, 2, 64))
    )
    at = torch.arange(150)
    starts = torch.stack((at // 60 * 60, at * 0))
    inputs = [q, k, v]
    if bends.get("sinks"):
        inputs.append(torch.linspace(-1, 3, 4, dtype=torch.float64).requires_grad_())
        bends = bends | {"sinks": inputs[-1]}
    if "drop" in bends:
        words = torch.randint(1 << 32, (4, 300), generator=generator)
        bends = bends | {"drop": WeightDropout(bends["drop"], words)}
    sight = Visibility.of(at, at, window=window, document_starts=starts, at=0)
    with patch.object(masked, "flex", lambda: (plain_flex, masked.seen_blocks)):
        found = masked.MASKED["flex"](q, k, v, sight, **bends)
        results = found, *torch.autograd.grad(found, inputs, dy)
    with torch.no_grad(), patch.object(masked, "flex", lambda: (flex_attention, masked.seen_blocks)):
        theirs = masked.MASKED["flex"](*(x.detach() for x in (q, k, v)), sight, **bends)
    torch.testing.assert_close(theirs, found, rtol=1e-6, atol=1e-6)  # its log-sums are fp32
    expected = tiled_attention(q, k, v, sight, **bends)
    for one, other in zip(results, (expected, *torch.autograd.grad(expected, inputs, dy)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_documents_are_told_as_the_host_counts_them() -> None:
    """Beside a plain loop; a half is told as if it were alone."""
    rng = torch.Generator().manual_seed(3)
    begins = torch.rand(4, 13, generator=rng) < 0.3
    begins[:, 0] = True
    starts = torch.where(begins, torch.arange(13), 0).cummax(1)[0]

    def counted(rows: Tensor) -> tuple[list[int], int]:
        bounds = [i for i, start in enumerate(rows.flatten().tolist()) if start == i % 13] + [rows.numel()]
        return bounds, max(b - a for a, b in zip(bounds, bounds[1:], strict=False))

    whole = Documents.of(starts, "cpu")
    assert (whole.bounds.tolist(), whole.longest) == counted(starts) and whole.bounds.dtype == torch.int32
    for half in (slice(2), slice(2, None)):
        part = whole.part(half, 13)
        assert part.bounds.tolist() == counted(starts[half])[0] and part.longest >= counted(starts[half])[1]
        assert part.counts == Documents.of(starts[half], "cpu").counts
