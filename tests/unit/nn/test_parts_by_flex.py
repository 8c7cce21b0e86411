"""Flex attention over a sequence in parts, against tiles over all of it: windows, documents, caps and sinks of a ring.

A CPU has no gradient of flex attention: there its documented formula is in its place. A GPU tries the kernel itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from equivalence.layouts import TINY
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megalite.nn.attention import masked
from megalite.nn.attention.flash import merge
from megalite.nn.attention.parts import FlexKernel, shares, shares_of_kept
from megalite.nn.attention.tiles import WeightDropout, tiled_attention
from megalite.nn.attention.trials import flex_parts_work
from megalite.parallel.context import sequence_order
from megalite.parallel.context.ring import empty_result
from megalite.rehearsal import rehearse_run, rehearsed
from megalite.visibility import Visibility

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = [
    pytest.param("cpu", torch.float64, 1e-11, id="cpu fp64"),
    pytest.param("cuda", torch.bfloat16, 2e-2, id="cuda bf16", marks=CUDA),
    pytest.param("cuda", torch.float32, 1e-2, id="cuda fp32", marks=CUDA),
]


def by_formula(
    query: Tensor, key: Tensor, value: Tensor, *, score_mod: Any, block_mask: Any, scale: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """What flex_attention is documented to compute; who sees nothing has a result of 0 and a log-sum of -inf."""
    n, heads, s, k = *query.shape[:3], key.shape[2]
    samples, of_heads = torch.arange(n)[:, None, None, None], torch.arange(heads)[:, None, None]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * scale
    at, keys = torch.arange(s), torch.arange(k)
    scores = scores if score_mod is None else score_mod(scores, samples, of_heads, at[:, None], keys)
    shown = block_mask.mask_mod(torch.arange(n)[:, None, None], at, at[:, None], keys).expand(n, s, k)[:, None]
    sums = scores.masked_fill(~shown, -torch.inf).logsumexp(-1)
    weights = (scores - sums.masked_fill(sums.isinf(), 0)[..., None]).exp().masked_fill(~shown, 0)
    return weights @ value, sums


@contextmanager
def flex_by(attend: Any) -> Iterator[None]:
    with patch.object(masked, "flex", lambda: (attend, masked.seen_blocks)):
        yield


def in_parts(
    tensors: list[Tensor],
    size: int,
    starts: Tensor | None,
    window: int | None,
    cap: float | None,
    drop: WeightDropout | None = None,
) -> Any:
    """(result, dq, dk, dv) by what each of `size` ranks computes of the keys of each."""
    q, k, v, dy = tensors
    order, r = sequence_order(len(q), size, q.device).chunk(size), q.shape[3]
    y, grads = torch.empty_like(dy), [torch.zeros_like(x) for x in (q, k, v)]
    for own in order:
        own_drop = None if drop is None else WeightDropout(drop.p, drop.words.unflatten(1, (-1, r))[:, own].flatten(1))
        kernel = FlexKernel(q.shape[2], own_drop, cap)
        begins = None if starts is None else starts[:, own]
        seen = [(Visibility.of(own, keys, window=window, document_starts=begins), keys) for keys in order]
        pieces = [(kernel.operands(q[own], k[keys], v[keys]), sight, keys) for sight, keys in seen]
        out, lse = empty_result(pieces[0][0][0])
        for operands, sight, _ in pieces:
            kernel.forward(out, lse, operands, sight)
        y[own] = kernel.result(out, q[own])
        given = kernel.output_gradient(dy[own], y[own], q[own])
        for operands, sight, keys in pieces:
            a, b, c = (torch.zeros(x.shape, dtype=lse.dtype, device=q.device) for x in operands)
            kernel.backward((a, b, c), *given, lse, operands, sight)
            for whole, at, part in zip(
                grads, (own, keys, keys), kernel.input_gradients((a, b, c), (q[own], k[keys], v[keys])), strict=True
            ):
                whole[at] += part
    return y, *grads


def difference(found: Any, expected: Any) -> float:
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(found, expected, strict=True))


def drawn(s: int, r: int, d: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(s + r)
    shapes = ((s, 2, 2, r, d), (s, 2, 2, d), (s, 2, 2, d), (s, 2, 2 * r * d))
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(device, dtype) for x in shapes]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize(
    ("size", "window", "documents", "cap", "p"),
    [
        *((1, 70, True, None, 0.0), (2, 5, False, None, 0.0), (2, None, True, 1.5, 0.0), (4, 40, True, None, 0.0)),
        *((4, None, False, 2.0, 0.0), (1, None, False, None, 0.3), (2, 5, True, 1.5, 0.8), (4, None, True, None, 0.1)),
    ],
)
def test_parts_are_the_whole(
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    r: int,
    size: int,
    window: int | None,
    documents: bool,
    cap: Any,
    p: float,
) -> None:
    s = 140 * size
    tensors, at = drawn(s, r, 16, device, dtype), torch.arange(s, device=device)
    starts = torch.stack((at // 90 * 90, at // 300 * 300)) if documents else None
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    sight = Visibility.of(at, at, window=window, document_starts=starts)
    words = torch.randint(1 << 32, (4, s * r), generator=torch.Generator().manual_seed(s)).to(device)
    drop = WeightDropout(p, words) if p else None
    y = tiled_attention(leaves[0], leaves[1], leaves[2], sight, drop, softcap=cap)
    expected = y.detach(), *torch.autograd.grad(y, leaves, tensors[3].double())
    with flex_by(by_formula) if device == "cpu" else nullcontext():
        found = in_parts(tensors, size, starts, window, cap, drop)
    assert difference(found, expected) < tolerance


def test_the_formula_is_the_librarys() -> None:
    """Where a query sees nothing of a part, too; blocks beside those that the library makes of a mask."""
    q, k, v, _ = drawn(300, 2, 16, "cpu", torch.float64)
    own, keys = torch.cat((torch.arange(50), torch.arange(250, 300))), torch.arange(100, 300)
    starts = torch.stack((own // 90 * 90, own * 0))
    kernel = FlexKernel(2, softcap=1.5)
    operands = kernel.operands(q[own], k[keys], v[keys])
    results, masks = [], []

    def keeps(*given: Any, **named: Any) -> Any:
        masks.append(named["block_mask"])
        return flex_attention(*given, **named)

    for attend in (by_formula, keeps):
        out, lse = empty_result(operands[0])
        with flex_by(attend):
            kernel.forward(out, lse, operands, Visibility.of(own, keys, window=60, document_starts=starts))
        results.append((out, lse))
    assert bool((results[0][1] == -torch.inf).any())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # its log-sums are fp32
    (mask,) = masks
    by_keys = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    by_library = BlockMask.from_kv_blocks(*by_keys, 128, mask.mask_mod, (100, 200))
    for name in ("q_num_blocks", "full_q_num_blocks", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(mask, name), getattr(by_library, name)), name
        assert getattr(mask, name).is_contiguous(), name


@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
def test_a_ring_launches_one_kernel_a_part_and_the_host_waits_for_none(kind: str) -> None:
    """In tiles there were 7,337 launches a layer at 8,192 tokens, and reads of positions and of documents."""
    flags = (
        f"--no-fp64 --bf16 --context-parallel-size 2 --cp-comm-type {kind} --reset-attention-mask --window-size 3000,0 "
        "--attn-logit-softcapping 30 --hidden-size 64 --seq-length 8192 --global-batch-size 1 --num-layers"
    )
    launches = []
    for layers in ("1", "3"):
        found = rehearse_run(rehearsed([*TINY, *flags.split(), layers, "--micro-batch-size", "1"], 2, steps=1), [0])
        record = found.records[0]
        assert [str(fault) for fault in found.faults] == [] and record.problem is None
        assert not any("attention/" in text for which, _, _, _, text in record.log if which == "sync")
        launches.append(record.launches)
    assert launches[1] - launches[0] <= 2 * {"p2p": 119, "all_gather": 104}[kind]


@pytest.mark.parametrize("kind", ["p2p", pytest.param("all_gather", marks=pytest.mark.landing)])
def test_dropout_of_a_ring_is_no_tiles_and_the_host_waits_for_none(kind: str) -> None:
    flags = (
        f"--no-fp64 --bf16 --context-parallel-size 2 --cp-comm-type {kind} --reset-attention-mask --hidden-size 64 "
        "--softmax-type learnable --attention-dropout 0.1 --micro-batch-size 1 --num-layers 2"
    )
    found = rehearse_run(rehearsed([*TINY, *flags.split()], 2, steps=1), [0])
    assert [str(fault) for fault in found.faults] == [] and found.records[0].problem is None
    assert not any("attention/" in text for which, _, _, _, text in found.records[0].log if which == "sync")


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_what_is_compiled_beside_the_kernel_is_what_it_says(p: float) -> None:
    """As the compiler traces it, where it writes into a part of a tensor, too."""
    generator = torch.Generator().manual_seed(1)
    part, dy = (torch.randn(4, 2, 30, 16, generator=generator) for _ in range(2))
    sums, delta, lse = (torch.randn(4, 2, 30, generator=generator) for _ in range(3))
    rows, kept = (dy, delta[..., None], lse[..., None], part), (sums - 1 if p else None)
    results = []
    for trace in (lambda call: call, partial(torch.compile, backend="aot_eager")):
        whole, logs = torch.zeros(4, 80, 16), torch.full((4, 60), -torch.inf)
        for more in (0, 1):
            trace(merge)(whole[:, 10:70], logs, part, sums + more, kept, p)
        y, sinks = (x.clone().requires_grad_() for x in (part, sums[0, :, 0]))
        scaled = trace(masked.scaled)(y, kept, sums, sinks, p)
        shared = trace(shares)(*rows, sums) if kept is None else trace(shares_of_kept)(*rows, kept, sums, p)
        results.append((whole, logs, scaled, *torch.autograd.grad(scaled.sin().sum(), (y, sinks)), *shared))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_kernel_that_is_wrong_in_parts_is_not_chosen() -> None:
    place = torch.device("cpu"), torch.float64
    with flex_by(by_formula):
        assert flex_parts_work.__wrapped__(*place) and flex_parts_work.__wrapped__(*place, drops=True)

    def unmerged(*given: Any, **named: Any) -> Any:
        y, sums = by_formula(*given, **named)
        return y, sums * 0.9

    with flex_by(unmerged):
        assert not flex_parts_work.__wrapped__(*place) and not flex_parts_work.__wrapped__(*place, drops=True)
    with flex_by(lambda *given, **named: by_formula(*given, **{**named, "score_mod": None})):
        assert not flex_parts_work.__wrapped__(*place)


@pytest.mark.landing
def test_further_kinds_of_attention_are_compiled_too() -> None:
    """torch's own limit is eight: the ninth would run uncompiled, with all scores at once, and say so to nobody."""
    masked.flex.cache_clear()
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        attend, _ = masked.flex()
    masked.flex.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        for heads in range(1, 11):
            q = torch.randn(1, heads, 16, 16)
            attend(q, q, q, return_lse=True)
    assert counters["frames"]["ok"] == 10


@pytest.mark.landing
@pytest.mark.parametrize("learns", [True, False], ids=["training", "scoring"])
def test_a_second_cap_window_or_probability_is_compiled_too(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are those of the trial. Of a number that the compiler makes a symbol flex attention has no
    gradient: a run with a cap of its own ended there."""
    monkeypatch.setattr(importlib.import_module("torch.nn.attention.flex_attention"), "_validate_device", print)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    for cached in (masked.flex, masked.compiled):
        cached.cache_clear()
    for s, r, cap, window, p in ((256, 2, 2.0, 70, 0.5), (384, 1, 30.0, 90, 0.1), (300, 4, 50.0, 40, 0.2)):
        q, k, v, dy = drawn(s, r, 16, "cpu", torch.float32)
        leaves, at = [x.requires_grad_(learns) for x in (q, k, v)], torch.arange(s)
        sight = Visibility.of(at, at, window=window, document_starts=None, at=0)
        words = torch.randint(1 << 32, (4, r * s), generator=torch.Generator().manual_seed(s))
        for drop in (None, WeightDropout(p, words)):
            found = []
            for attend in (masked._flexible, tiled_attention):
                with torch.set_grad_enabled(learns):
                    y = attend(q, k, v, sight, softcap=cap, drop=drop)
                found.append((y, *(torch.autograd.grad(y, leaves, dy) if learns else ())))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for cached in (masked.flex, masked.compiled):
        cached.cache_clear()
