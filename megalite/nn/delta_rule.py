"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), chunk by chunk.

    S <- e^g S;  S <- S + k (b (v - S^T k))^T;  o = S^T q                     one token after the other

    within a chunk, G the sum of g from its begin on, A = 1 + strictly lower (b k k^T e^(G_i - G_j)):
    U = A^-1 b v;  W = A^-1 b k e^G;  v' = U - W S
    o = q e^G S + lower (q k^T e^(G_i - G_j)) v';  S <- e^(G_n) S + (k e^(G_n - G))^T v'

A token sees nothing before the begin of its document: not in A, not in the scores, and no state that began earlier.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


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
    n, size = len(q), min(chunk, len(q))
    count = -(-n // size)
    q, k = (_chunks(x, count, size)[:, :, None] for x in (q, k))  # [b, H, 1, N, C, dk]
    v = _chunks(v, count, size)  # [b, H, r, N, C, dv]
    beta, g = (_chunks(x[..., None], count, size)[..., 0] for x in (beta, g))  # [b, H, r, N, C]
    total = g.cumsum(-1)
    grown = total.exp()[..., None]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    carries = ends = None
    if starts is not None:
        decay, carries, ends = _within_documents(decay, starts - offset, count, size)
    inner = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    eye = torch.eye(size, dtype=q.dtype, device=q.device)
    read = beta[..., None] * k * grown
    queries = q * grown
    if carries is not None:
        read, queries = read * carries, queries * carries
    made = torch.linalg.solve_triangular(
        eye + inner, torch.cat((beta[..., None] * v, read), -1), upper=False, unitriangular=True
    )
    values, reads = made.split((v.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.mT) * decay
    last = total[..., -1:]
    written = k * (last - total).exp()[..., None]
    kept = last.exp()[..., None]
    if ends is not None and carries is not None:
        written, kept = written * ends, kept * carries[..., -1:, :]
    if state is None:
        state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    out = []
    # unbound at once: the backward of an index would fill a gradient as large as all chunks for each of them
    parts = (x.unbind(3) for x in (values, reads, queries, scores, kept, written))
    for value, read_, query, score, keep, write in zip(*parts, strict=True):
        new = value - read_ @ state
        out.append(query @ state + score @ new)
        state = keep * state + write.mT @ new
    return torch.cat(out, 3)[:, :, :, :n].permute(3, 0, 1, 2, 4), state


def _chunks(x: Tensor, count: int, size: int) -> Tensor:
    """`[n, ..., d]` -> `[..., N, C, d]`, zeros behind the last token."""
    x = F.pad(x.movedim(0, -2), (0, 0, 0, count * size - len(x)))
    parts: Tensor = x.unflatten(-2, (count, size))
    return parts


def _within_documents(decay: Tensor, starts: Tensor, count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(decay where a document sees it, tokens that see what was before their chunk, those that the last one sees)."""
    missing = count * size - starts.shape[1]
    starts = torch.cat((starts, starts[:, -1:].expand(-1, missing)), 1).view(-1, 1, 1, count, size)
    at = torch.arange(count * size, device=starts.device).view(count, size)
    seen = at[:, None] >= starts[..., None]
    return decay * seen, (starts < at[:, :1])[..., None], (at >= starts[..., -1:])[..., None]
