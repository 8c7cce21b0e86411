"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), chunk by chunk.

    S <- e^g S;  S <- S + k (b (v - S^T k))^T;  o = S^T q                     one token after the other

    within a chunk, G the sum of g from its begin on, D = e^(G_i - G_j) for j <= i, e = e^G, w = e^(G_n - G):
    A = 1 + strictly lower (b k k^T D);  T = A^-1;  W = T b e k;  N = T b v - W S
    o = e q S + (q k^T D) N;  S <- e^(G_n) S + (w k)^T N

A token sees nothing before the begin of its document: D is 0 there, e is 0 where the document began in this chunk, w
where it ends in it. The backward is written out: the reverse recurrence of the state's gradient, products for all else.
It keeps T, W, N and the states. On a CPU a few chunks at a time, so that what is between products stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.gradient import Node
from megalite.nn.short_convolution import blocks

CHUNK = 64


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(o `[n, b, H, r, dv]`, the state behind the last token `[b, H, r, dk, dv]`).

    q, k: `[n, b, H, dk]`; v: `[n, b, H, r, dv]`; beta, g: `[n, b, H, r]`; all in fp32 or wider. state: before the
    first token. starts: int64 `[b, n]`, where documents begin, counted from the first.
    """
    if state is None:
        state = v.new_zeros(*v.shape[1:4], k.shape[-1], v.shape[-1])
    made: Any = _GatedDelta.apply(q, k, v, beta, g, state, starts, chunk)
    o, state = made
    return o, state


class _Gates:
    """What decays within chunks, `[N, b, H, r, C]` and decay `[..., C, C]`; last: of whole chunks `[..., 1, 1]`."""

    def __init__(self, g: Tensor, begin: int, starts: Tensor | None) -> None:
        """g: `[N, b, H, r, C]`, of tokens from `begin` on. starts: `[b, N * C]`."""
        count, size = len(g), g.shape[-1]
        total = g.cumsum(-1)
        later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
        decay = _decayed((total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf))
        from_state, to_state = _decayed(total.clone()), _decayed(total[..., -1:] - total)
        if starts is not None:
            starts = starts.unflatten(1, (count, size)).transpose(0, 1)[:, :, None, None]
            at = torch.arange(begin, begin + count * size, device=g.device).view(count, 1, 1, 1, size)
            decay *= at[..., None, :] >= starts[..., None]
            from_state *= starts < at[..., :1]
            to_state *= at >= starts[..., -1:]
        self.decay, self.from_state, self.to_state = decay, from_state, to_state
        self.last = from_state[..., -1:, None]


class _GatedDelta(Node):
    """`gated_delta` and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor,
        state: Tensor,
        starts: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        size = min(chunk, len(q))
        ctx.size, ctx.starts = size, starts
        o, kept = _empty(v, size), list[Tensor]()
        states = state.new_empty(len(o) // size + 1, *state.shape)
        states[0] = state
        for begin, end in blocks(v, size):
            (query, key, value), (b, gates) = _part(ctx, (q, k, v), beta, g, begin, end)
            inner = (key @ key.mT) * gates.decay
            eye = torch.eye(size, dtype=q.dtype, device=q.device).expand(inner.shape)
            solved = torch.linalg.solve_triangular(inner.mul_(b), eye, upper=False, unitriangular=True)
            solved = F.hardshrink(solved, _negligible(solved))
            reads = solved @ (key * (b * gates.from_state[..., None]))
            new, written = solved @ (value * b), (key * gates.to_state[..., None]).mT
            seen = _seen(states, begin, len(new), size)
            line = (_line(x) for x in (seen, new, reads, written, gates.last))
            for before, after, values, read, write, last in _steps(*line):
                values.baddbmm_(read, before, alpha=-1)
                torch.mul(before, last, out=after).baddbmm_(write, values)
            out = (query * gates.from_state[..., None]) @ seen[:-1]
            _put(o, begin, _plus(out, query @ key.mT * gates.decay, new))
            kept += [solved, reads, new]
        ctx.save_for_backward(q, k, v, beta, g, states, *kept)
        return o[: len(v)], states[-1].clone()

    @staticmethod
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> Any:
        q, k, v, beta, g, states, *kept = ctx.saved_tensors
        grads = [_empty(x, ctx.size) for x in (q, k, v, beta, g)]
        for begin, end in reversed(blocks(v, ctx.size)):
            (*qkv, dmade), (b, gates) = _part(ctx, (q, k, v, do), beta, g, begin, end)
            seen = _seen(states, begin, len(b), ctx.size)[:-1]
            made, dstate = _gradients(qkv, b, gates, kept[-3:], seen, dmade, dstate)
            del kept[-3:]
            for grad, part in zip(grads, made, strict=True):
                _put(grad, begin, part)
        return *(grad[: len(v)] for grad in grads), dstate, None, None


def _gradients(
    qkv: list[Tensor], beta: Tensor, gates: _Gates, kept: list[Tensor], seen: Tensor, do: Tensor, dstate: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(Gradients of q, k, v, beta and g of some chunks, that of the state before them). kept: T, W and N."""
    (q, k, v), (solved, reads, new) = qkv, kept
    decay, from_state, to_state = gates.decay, gates.from_state[..., None], gates.to_state[..., None]
    scores, alike = (x @ k.mT * decay for x in (q, k))
    dnew, written = scores.mT @ do, k * to_state
    dstates = torch.cat(((q * from_state).mT @ do, dstate[None]))  # before each chunk, behind the last
    line = (_line(x) for x in (dstates, dnew, reads.mT, written, gates.last))
    for before, behind, dvalues, read, write, last in reversed(list(_steps(*line))):
        dvalues.baddbmm_(write, behind)
        before.addcmul_(behind, last).baddbmm_(read, dvalues, alpha=-1)
    after = dstates[1:]
    dx = solved.mT @ dnew
    dq, dk_read, dk_write = do @ seen.mT, dx @ seen.mT, new @ after.mT
    asked, read, wrote = (_rows(a, b) for a, b in ((q, dq), (k, dk_read), (k, dk_write)))
    dinner, dscores = (dx @ new.mT).tril_(-1).neg_(), do @ new.mT
    own = dinner * alike
    dbeta = _rows(dx, v) - from_state * read + own.sum(-1, keepdim=True)
    flow = own.mul_(beta).addcmul_(dscores, scores)
    dinner *= beta * decay
    dscores *= decay
    dq, dk = dq.mul_(from_state), dk_write.mul_(to_state) - dk_read.mul_(beta * from_state)
    # the value heads of a key head
    dq, dk, dinner, dscores = (x if x.shape[3] == 1 else x.sum(3, keepdim=True) for x in (dq, dk, dinner, dscores))
    dq, dk = _plus(dq, dscores, k), _plus(_plus(dk, dinner + dinner.mT, k), dscores.mT, q)
    wrote *= to_state
    dtotal = flow.sum(-1, keepdim=True) - flow.sum(-2)[..., None] + (asked - beta * read) * from_state - wrote
    held = _rows(after.flatten(-2), seen.flatten(-2))[..., None]
    dtotal[..., -1:, :] += wrote.sum(-2, keepdim=True) + gates.last * held
    dg = dtotal.flip(-2).cumsum(-2).flip(-2)
    return (dq, dk, dx * beta, dbeta, dg), dstates[0]


def _negligible(x: Tensor) -> float:
    """The square of the rounding error. What is smaller is 0 where decays multiply each other: products of them would
    soon be denormal numbers, each of which takes a CPU as long as a hundred others."""
    return float(torch.finfo(x.dtype).eps ** 2)


def _decayed(x: Tensor) -> Tensor:
    """e^x in place, 0 where that is negligible."""
    kept: Tensor = torch.threshold_(x, math.log(_negligible(x)), -torch.inf)
    return kept.exp_()


def _line(x: Tensor) -> tuple[Tensor, ...]:
    """The chunks of all heads, `[N, b, H, r, ...]` -> N of `[b * H * r, ...]`."""
    parts: tuple[Tensor, ...] = x.flatten(1, 3).unbind()
    return parts


def _steps(states: tuple[Tensor, ...], *others: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """For each chunk the state before it, that behind it, and the others."""
    return zip(states[:-1], states[1:], *others, strict=True)


def _plus(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, in place."""
    x.view(-1, *x.shape[4:]).baddbmm_(a.flatten(0, 3), b.flatten(0, 3))
    return x


def _rows(a: Tensor, b: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(a, b)
    return products.unsqueeze(-1)


def _part(
    ctx: Any, tensors: tuple[Tensor, ...], beta: Tensor, g: Tensor, begin: int, end: int
) -> tuple[list[Tensor], tuple[Tensor, _Gates]]:
    """Those tokens in chunks, `[N, b, H, r or 1, C, d]`; beta `[..., 1]` and what g makes."""
    found = [_chunks((x if x.dim() == 5 else x[:, :, :, None])[begin:end], ctx.size) for x in tensors]
    beta, g = (_chunks(x[begin:end, ..., None], ctx.size) for x in (beta, g))
    starts: Tensor | None = ctx.starts
    if starts is not None:
        starts = starts[:, begin:end]
        starts = torch.cat((starts, starts[:, -1:].expand(-1, len(g) * ctx.size - starts.shape[1])), 1)
    return found, (beta, _Gates(g[..., 0], begin, starts))


def _chunks(x: Tensor, size: int) -> Tensor:
    """`[n, b, H, r, d]` -> `[N, b, H, r, C, d]`, zeros behind the last token."""
    missing = -len(x) % size
    if missing:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    parts: Tensor = x.unflatten(0, (-1, size)).movedim(1, -2).contiguous()
    return parts


def _empty(x: Tensor, size: int) -> Tensor:
    """For results of whole chunks: `[N * C, ...]`."""
    return torch.empty((-(-len(x) // size) * size, *x.shape[1:]), dtype=x.dtype, device=x.device)


def _put(whole: Tensor, begin: int, x: Tensor) -> None:
    """Writes results of chunks `[N, b, H, r, C, d]` into `[N * C, b, H, ...]`, from token `begin` on."""
    tokens = x.movedim(-2, 1)
    whole[begin : begin + tokens[..., 0, 0, 0, 0].numel()].view(tokens.shape).copy_(tokens)


def _seen(states: Tensor, begin: int, count: int, size: int) -> Tensor:
    """The states before and behind `count` chunks from token `begin` on, `[N + 1, b, H, r, dk, dv]`."""
    return states[begin // size : begin // size + count + 1]
