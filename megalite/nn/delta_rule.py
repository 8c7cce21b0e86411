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

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.gradient import Node

CHUNK = 64
CACHED = 1 << 17
"""Elements of a tensor that a CPU computes at a time."""


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    offset: int = 0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(o `[n, b, H, r, dv]`, the state behind the last token `[b, H, r, dk, dv]`).

    q, k: `[n, b, H, dk]`; v: `[n, b, H, r, dv]`; beta, g: `[n, b, H, r]`; all in fp32 or wider. state: before the
    first token. starts: int64 `[b, n]`, where documents begin, counted from `offset` tokens before the first.
    """
    if state is None:
        state = v.new_zeros(*v.shape[1:4], k.shape[-1], v.shape[-1])
    made: Any = _GatedDelta.apply(q, k, v, beta, g, state, None if starts is None else starts - offset, chunk)
    o, state = made
    return o, state


class _Gates(NamedTuple):
    """What decays within chunks, `[b, H, r, N, C]` and decay `[..., C, C]`; last: of whole chunks `[..., 1, 1]`."""

    decay: Tensor
    from_state: Tensor
    to_state: Tensor
    last: Tensor

    @classmethod
    def of(cls, g: Tensor, begin: int, starts: Tensor | None) -> _Gates:
        """g: `[b, H, r, N, C]`, of tokens from `begin` on. starts: `[b, N * C]`."""
        count, size = g.shape[-2:]
        total = g.cumsum(-1)
        later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
        from_state, to_state = total.exp(), (total[..., -1:] - total).exp_()
        if starts is not None:
            starts = starts.view(-1, 1, 1, count, size)
            at = torch.arange(begin, begin + count * size, device=g.device).view(count, size)
            decay *= at[:, None] >= starts[..., None]
            from_state *= starts < at[:, :1]
            to_state *= at >= starts[..., -1:]
        return cls(decay, from_state, to_state, from_state[..., -1:, None])


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
        ctx.size, ctx.starts = min(chunk, len(q)), starts
        o, kept = torch.empty(v.shape, dtype=v.dtype, device=v.device), []
        for begin, end in _groups(v, ctx.size):
            (query, key, value), (b, gates) = _part(ctx, (q, k, v), beta, g, begin, end)
            inner = (key @ key.mT) * gates.decay
            eye = torch.eye(ctx.size, dtype=q.dtype, device=q.device).expand(inner.shape)
            solved = torch.linalg.solve_triangular(inner.mul_(b), eye, upper=False, unitriangular=True)
            reads = solved @ (key * (b * gates.from_state[..., None]))
            new, written = solved @ (value * b), (key * gates.to_state[..., None]).mT
            seen = new.new_empty(*new.shape[:4], *state.shape[-2:])
            line = (_line(x) for x in (seen, new, reads, written, gates.last))
            for before, values, read, write, last in zip(*line, strict=True):
                before.copy_(state.flatten(0, 2))
                values.baddbmm_(read, before, alpha=-1)
                state = torch.baddbmm(before * last, write, values).view(state.shape)
            out = (query * gates.from_state[..., None]) @ seen
            out += (query @ key.mT * gates.decay) @ new
            o[begin:end] = _tokens(out, end - begin)
            kept += [solved, reads, new, seen]
        ctx.save_for_backward(q, k, v, beta, g, *kept)
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> Any:
        q, k, v, beta, g, *kept = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, beta, g)]
        for begin, end in reversed(_groups(v, ctx.size)):
            (query, key, value, dmade), (b, gates) = _part(ctx, (q, k, v, do), beta, g, begin, end)
            solved, reads, new, seen = kept[-4:]
            del kept[-4:]
            made, dstate = _gradients(query, key, value, b, gates, solved, reads, new, seen, dmade, dstate)
            for grad, part in zip(grads, made, strict=True):
                grad[begin:end] = _tokens(part, end - begin).view(end - begin, *grad.shape[1:])
        return *grads, dstate, None, None


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: _Gates,
    solved: Tensor,
    reads: Tensor,
    new: Tensor,
    seen: Tensor,
    do: Tensor,
    dstate: Tensor,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(Gradients of q, k, v, beta and g of some chunks, that of the state before them)."""
    decay, from_state, to_state = gates.decay, gates.from_state[..., None], gates.to_state[..., None]
    scores, alike = (x @ k.mT * decay for x in (q, k))
    dnew, dseen, written = scores.mT @ do, (q * from_state).mT @ do, k * to_state
    after = torch.empty_like(seen)
    line = (_line(x)[::-1] for x in (after, dseen, dnew, written, reads.mT, gates.last))
    for behind, query, dvalues, write, read, last in zip(*line, strict=True):
        behind.copy_(dstate.flatten(0, 2))
        dvalues.baddbmm_(write, behind)
        dstate = query.addcmul_(behind, last).baddbmm_(read, dvalues, alpha=-1).view(dstate.shape)
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
    dq, dk, dinner, dscores = (_over_group(x) for x in (dq, dk, dinner, dscores))
    dq += dscores @ k
    dk += (dinner + dinner.mT) @ k + dscores.mT @ q
    wrote *= to_state
    dtotal = flow.sum(-1, keepdim=True) - flow.sum(-2)[..., None] + (asked - beta * read) * from_state - wrote
    dtotal[..., -1:, :] += wrote.sum(-2, keepdim=True) + gates.last * (after * seen).sum((-2, -1))[..., None, None]
    dg = dtotal.flip(-2).cumsum(-2).flip(-2)
    return (dq, dk, dx * beta, dbeta, dg), dstate


def _line(x: Tensor) -> tuple[Tensor, ...]:
    """The chunks of all heads, `[b, H, r, N, ...]` -> N of `[b * H * r, ...]`."""
    parts: tuple[Tensor, ...] = x.flatten(0, 2).unbind(1)
    return parts


def _rows(a: Tensor, b: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(a, b)
    return products.unsqueeze(-1)


def _over_group(x: Tensor) -> Tensor:
    """The sum over value heads of a key head."""
    return x if x.shape[2] == 1 else x.sum(2, keepdim=True)


def _groups(v: Tensor, size: int) -> list[tuple[int, int]]:
    """[begin, end) of tokens that are computed together."""
    n = len(v)
    step = n if v.device.type != "cpu" else size * max(1, CACHED // (size * v[0].numel()))
    return [(begin, min(n, begin + step)) for begin in range(0, n, step)]


def _part(
    ctx: Any, tensors: tuple[Tensor, ...], beta: Tensor, g: Tensor, begin: int, end: int
) -> tuple[list[Tensor], tuple[Tensor, _Gates]]:
    """Those tokens in chunks, `[b, H, r or 1, N, C, d]`; beta `[..., 1]` and what g makes."""
    found = [_chunks((x if x.dim() == 5 else x[:, :, :, None])[begin:end], ctx.size) for x in tensors]
    beta, g = (_chunks(x[begin:end, ..., None], ctx.size) for x in (beta, g))
    starts: Tensor | None = ctx.starts
    if starts is not None:
        starts = starts[:, begin:end]
        starts = torch.cat((starts, starts[:, -1:].expand(-1, g[0, 0, 0].numel() - starts.shape[1])), 1)
    return found, (beta, _Gates.of(g[..., 0], begin, starts))


def _chunks(x: Tensor, size: int) -> Tensor:
    """`[n, b, H, r, d]` -> `[b, H, r, N, C, d]`, zeros behind the last token."""
    n, missing = len(x), -len(x) % size
    if missing:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    parts: Tensor = x.movedim(0, -2).unflatten(-2, ((n + missing) // size, size)).contiguous()
    return parts


def _tokens(x: Tensor, n: int) -> Tensor:
    """Back: `[b, H, r, N, C, d]` -> `[n, b, H, r, d]`."""
    return x.flatten(3, 4)[:, :, :, :n].movedim(3, 0)
