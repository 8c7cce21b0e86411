"""Chunks of the gated delta rule are its recurrence, token by token; documents see nothing of each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.nn.delta_rule import gated_delta


def drawn(n: int, b: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = [(n, b, 2, 3), (n, b, 2, 3), (n, b, 2, 2, 4), (n, b, 2, 2), (n, b, 2, 2)]
    q, k, v, beta, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in (q, k / 2, v, beta.sigmoid(), -g.exp())]


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition."""
    n, b, heads, group, dv = v.shape
    out, states = [], []
    for row in range(b):
        state = torch.zeros(heads, group, q.shape[-1], dv, dtype=q.dtype)
        line = []
        for i in range(n):
            if starts is not None and int(starts[row, i]) == i:
                state = torch.zeros_like(state)
            state = state * g[i, row].exp()[..., None, None]
            key, query = k[i, row][:, None, :, None], q[i, row][:, None, :, None]
            state = state + key * (beta[i, row][..., None] * (v[i, row] - (state * key).sum(-2)))[..., None, :]
            line.append((state * query).sum(-2))
        out.append(torch.stack(line))
        states.append(state)
    return torch.stack(out, 1), torch.stack(states)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("n", "chunk"), [(1, 64), (13, 4), (16, 4), (7, 64)])
def test_chunks_are_the_recurrence(n: int, chunk: int, documents: bool) -> None:
    given = drawn(n)
    begins = torch.tensor([[0, 3, 4, 11], [0, 1, 8, 12]])
    places = torch.arange(n)
    starts = torch.where(begins[:, None] <= places[:, None], begins[:, None], 0).amax(-1) if documents else None
    found, state = gated_delta(*given, starts=starts, chunk=chunk)
    expected, last = one_by_one(*given, starts)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    theirs = torch.autograd.grad((expected * weights).sum(), given)
    for ours, other in zip(torch.autograd.grad((found * weights).sum(), given), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_state_goes_on_where_it_was_left(cut: int) -> None:
    given = [x.detach() for x in drawn(13)]
    starts = torch.tensor([[0] * 6 + [6] * 7, [0] * 3 + [3] * 10])
    whole, last = gated_delta(*given, starts=starts, chunk=4)
    first, state = gated_delta(*(x[:cut] for x in given), starts=starts[:, :cut], chunk=4)
    rest, end = gated_delta(*(x[cut:] for x in given), state=state, starts=starts[:, cut:] - cut, chunk=4)
    torch.testing.assert_close(torch.cat((first, rest)), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=1e-12, atol=1e-12)


class Elements(TorchDispatchMode):
    """Counts those of what operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += sum(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor))
        return out


def test_twice_the_tokens_are_twice_the_work() -> None:
    """The backward of an index into all chunks would fill a gradient of all for each of them."""
    counts = []
    for n in (512, 1024):
        tensors = drawn(n, 1)
        with Elements() as elements:
            gated_delta(*tensors, chunk=8)[0].sum().backward()
        counts.append(elements.count)
    assert counts[1] <= 2.05 * counts[0]


def test_decays_of_a_start_make_no_denormal_numbers() -> None:
    """At e^-10 a token a chunk would be full of them, and each takes a CPU as long as a hundred other numbers."""
    given = [x.detach().float().requires_grad_() for x in drawn(130)]
    with torch.no_grad():
        given[4].copy_(-10 - given[3])
    found, _ = gated_delta(*given)
    kept = [*found.grad_fn.saved_tensors, found, *torch.autograd.grad(found.sum(), given)]
    assert not any(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any() for x in kept)
    expected, _ = one_by_one(*(x.detach().double() for x in given), None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
