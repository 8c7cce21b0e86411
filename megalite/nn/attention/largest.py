"""The largest score of each head, for `--qk-clip`: by products of its own, since fused kernels do not return it.

It costs the scores once more (a third of the attention's forward) and memory for some queries against all keys, nothing
for the backward. Entered only where somebody asks for it.
"""

import math

import torch
from torch import Tensor

from megalite.comm import ContextAxes, all_gather
from megalite.microbatch import Microbatch
from megalite.visibility import Visibility

AT_ONCE = 1 << 22
"""Scores that exist at the same time."""


@torch.no_grad()
def largest_scores(q: Tensor, k: Tensor, microbatch: Microbatch, cp: ContextAxes, window: int | None) -> Tensor:
    """Over the samples and this rank's queries, each against all keys that it sees: `[g, r]` in fp32 or wider.

    q: `[s, b, g, r, d]`; k: `[s, b, g, d]`; of a ring of ranks each has its part of both.
    """
    starts = microbatch.document_starts
    positions = keys = torch.arange(len(k), device=k.device)
    if cp.ring.size > 1:
        assert microbatch.order is not None, "the micro-batch has not been cut"
        k, keys = all_gather(k.contiguous(), cp.ring), microbatch.order
        positions = keys.chunk(cp.ring.size)[cp.ring.rank]
        starts = None if starts is None else starts.chunk(cp.ring.size, 1)[cp.ring.rank]
    sight = Visibility.of(positions, keys, window=window, document_starts=starts)
    s, b, g, r, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    found = torch.full((g, r), -math.inf, dtype=wide, device=q.device)
    columns = k.permute(1, 2, 3, 0).to(wide)  # [b, g, d, k]
    step = max(1, AT_ONCE // (b * g * r * len(k)))
    for begin in range(0, s, step):
        part = slice(begin, begin + step)
        rows = q[part].permute(1, 2, 3, 0, 4).to(wide)  # [b, g, r, n, d]
        scores = (rows.flatten(2, 3) @ columns).unflatten(2, rows.shape[2:4])  # [b, g, r, n, k]
        seen = sight.of_queries(part).dense()
        seen = seen if seen.dim() == 2 else seen[:, None, None]
        found = torch.maximum(found, scores.masked_fill_(~seen, -math.inf).amax((0, 3, 4)))
    return found / math.sqrt(d)
