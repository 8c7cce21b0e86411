"""The library's kernels over a sequence in parts, against tiles over all of it: on a GPU, and those that a CPU has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.nn.attention.choose import flash_works
from megalite.nn.attention.flash import FlashKernel, rectangles
from megalite.nn.attention.tiles import tiled_attention
from megalite.parallel.context import sequence_order
from megalite.parallel.context.ring import empty_result
from megalite.visibility import Visibility

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = [
    pytest.param("cpu", torch.float64, 1e-12, id="cpu fp64"),
    pytest.param("cuda", torch.bfloat16, 2e-2, id="cuda bf16", marks=CUDA),
    pytest.param("cuda", torch.float16, 5e-3, id="cuda fp16", marks=CUDA),
]


def in_parts(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, size: int, *, final: bool = True) -> tuple[Tensor, ...]:
    """(result, dq, dk, dv) by what each of `size` ranks computes of the keys of each; with the mistake of a part's own
    result and log-sums in backward if not `final`."""
    kernel, parts = FlashKernel(q.shape[2]), sequence_order(len(q), size).chunk(size)
    y, grads = torch.empty_like(dy), [torch.zeros_like(x) for x in (q, k, v)]
    for own in parts:
        pieces = [(kernel.operands(q[own], k[keys], v[keys]), Visibility(own, keys), keys) for keys in parts]
        out, lse = empty_result(pieces[0][0][0])
        for operands, sight, _ in pieces:
            kernel.forward(out, lse, operands, sight)
        y[own] = kernel.result(out, q[own])
        dresult, result = kernel.output_gradient(dy[own], y[own], q[own])
        for operands, sight, keys in pieces:
            if not final:
                out, lse = empty_result(operands[0])
                kernel.forward(out, lse, operands, sight)
                lse, result = lse.nan_to_num(neginf=0.0), out.to(q.dtype)
            found = tuple(torch.zeros(x.shape, dtype=lse.dtype, device=q.device) for x in operands)
            kernel.backward(found, dresult, result, lse, operands, sight)
            dq, dk, dv = kernel.input_gradients(found, (q[own], k[keys], v[keys]))
            grads[0][own] += dq
            grads[1][keys] += dk
            grads[2][keys] += dv
    return y, *grads


def difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(found, expected, strict=True))


def case(s: int, r: int, d: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """([q, k, v, dy], what tiles over the whole sequence give)."""
    generator = torch.Generator().manual_seed(s + r + d)
    shapes = ((s, 2, 2, r, d), (s, 2, 2, d), (s, 2, 2, d), (s, 2, 2 * r * d))
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64).to(device, dtype) for x in shapes]
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    at = torch.arange(s, device=device)
    y = tiled_attention(*leaves, Visibility(at, at))
    return tensors, (y.detach(), *torch.autograd.grad(y, leaves, tensors[3].double()))


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize(("size", "r", "d"), [(1, 1, 64), (2, 1, 8), (2, 3, 40), (4, 2, 64), (4, 1, 128)])
def test_parts_are_the_whole(device: str, dtype: torch.dtype, tolerance: float, size: int, r: int, d: int) -> None:
    tensors, expected = case(32 * size, r, d, device, dtype)
    q, k, v, dy = tensors
    found = in_parts(q, k, v, dy, size)
    assert difference(found, expected) < tolerance
    if size > 1:
        assert difference(in_parts(q, k, v, dy, size, final=False), expected) > 5 * tolerance, "went unseen"


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
def test_it_is_found_to_work(device: str, dtype: torch.dtype, tolerance: float) -> None:
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    assert flash_works(place, dtype)
    assert not flash_works(place, torch.int32)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_rectangles_are_what_is_seen(size: int) -> None:
    """Every pair of a query and a key that it sees, once, and one call of a kernel for the keys of a rank."""
    order = sequence_order(4 * size, size).chunk(size)
    everywhere = torch.arange(4 * size)
    for own in order:
        for keys in (*order, everywhere):
            sight = Visibility(own, keys)
            count = torch.zeros(len(own), len(keys), dtype=torch.int64)
            found = list(rectangles(sight))
            for rows, columns, causal in found:
                block = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.int64)
                count[rows, columns] += block.tril() if causal else block
            assert torch.equal(count, sight.dense().to(torch.int64))
            assert len(found) <= (4 if keys is everywhere else 1)
