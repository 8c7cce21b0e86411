"""Ring attention: keys and values go round the ranks, each of which computes what its own queries see of them.

    step        0       1       2       3           forward: send on what is here, attend to it meanwhile
    rank 0    kv 0    kv 3    kv 2    kv 1          backward: the same again; the gradient of what others lent follows
    rank 1    kv 1    kv 0    kv 3    kv 2          it one hop behind, and comes home after the last step

Only this rank's own keys and values are kept from forward to backward. Partial results are merged by the logarithm of
their sums; backward uses the final ones, and `delta = rowsum(dO * O)` of the final result. Backward computes half of
what concerns its own keys first, while the first of the others' travel, and half last, while its gradient comes home:
every message has work to hide behind.

Instead they may be gathered (Llama 3, arXiv 2407.21783): one message of few groups. They are gathered again in
backward, so that no rank keeps them whole from forward to backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.comm import Axis, all_gather, reduce_scatter, start_shift
from megalite.gradient import Node
from megalite.visibility import Visibility

Operands = tuple[Tensor, Tensor, Tensor]


class AttentionKernel(Protocol):
    """Attention of queries to some of their keys, in a layout of its own: heads first, `[n, s, d]` and `[n, k, d]`.

    Outside, queries are `[s, b, g, r, d]`, keys and values `[k, b, g, d]`, results `[s, b, g * r * d]`.
    """

    def of_queries(self, rows: slice) -> AttentionKernel:
        """The kernel of these rows of its queries alone."""

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        """In its layout, queries scaled."""

    def result(self, out: Tensor, q: Tensor) -> Tensor:
        """Back from its layout, in the dtype of the queries."""

    def output_gradient(self, dy: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """(that of the result in its layout, delta `[n, s]` in fp32 or wider; the result `[n, s, d]` itself in place
        of delta for a kernel that computes it)."""

    def input_gradients(self, grads: Operands, inputs: Operands) -> Operands:
        """Back from its layout, in the dtypes of the inputs."""

    def forward(self, out: Tensor, lse: Tensor, operands: Operands, sight: Visibility) -> None:
        """Merges into out and lse `[n, s]` (0 and -inf in the beginning), both in fp32 or wider."""

    def backward(
        self, grads: Operands, dy: Tensor, delta: Tensor, lse: Tensor, operands: Operands, sight: Visibility
    ) -> None:
        """Adds to grads, in fp32 or wider. lse and delta are those of the whole result."""


Sights = Callable[[int], Visibility]
"""Rank of the axis -> which of its keys this rank's queries see."""


class Gathering(NamedTuple):
    """order: positions of the ranks' keys, rank after rank."""

    order: Tensor
    axis: Axis

    def whole(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """All ranks' `[k, b, g, d]` as `[size * k, b, g, d]` at rising positions."""
        return all_gather(torch.stack((k, v), 1), self.axis)[self.order.argsort()].unbind(1)

    def own_gradient(self, dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """The reverse: this rank's part of the sum over ranks."""
        return reduce_scatter(torch.stack((dk, dv), 1)[self.order], self.axis).unbind(1)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, sights: Sights, axis: Axis, kernel: AttentionKernel, sinks: Tensor | None = None
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks of the axis.

    sinks: a logit for each query, `[n, s]` like its log-sum, which joins its softmax and has no value.
    """
    return _RingAttention.apply(q, k, v, sights, axis, kernel, sinks, None)


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, sight: Visibility, by: Gathering, kernel: AttentionKernel, sinks: Tensor | None
) -> Tensor:
    """The same by gathered keys and values: a ring of one rank that has all. sight: of keys at rising positions."""
    return _RingAttention.apply(q, k, v, lambda _: sight, Axis.single("gathered"), kernel, sinks, by)


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) that nothing has been merged into, for queries in the kernel's layout."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    return out, torch.full(q.shape[:2], float("-inf"), dtype=wide, device=q.device)


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The log-sums with the sinks in them; scales out, the result of all keys, in place."""
    if sinks is None:
        return lse
    joined = torch.logaddexp(lse, sinks)
    out.mul_((lse - joined).exp_()[..., None])
    return joined


def sink_gradient(lse: Tensor, dy: Tensor, delta: Tensor, sinks: Tensor | None) -> Tensor | None:
    """P (0 - delta): as of any other score, with a value of zero. lse: joined. dy, delta: of `output_gradient`."""
    if sinks is None:
        return None
    delta = delta if delta.dim() == 2 else (dy.to(lse.dtype) * delta.to(lse.dtype)).sum(-1)
    return (sinks - lse).exp_().mul_(delta).neg_()


class _RingAttention(Node):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sights: Sights,
        axis: Axis,
        kernel: AttentionKernel,
        sinks: Tensor | None,
        gathers: Gathering | None,
    ) -> Tensor:
        queries, *here = kernel.operands(q, *((k, v) if gathers is None else gathers.whole(k, v)))
        out, lse = empty_result(queries)
        for step in range(axis.size):
            coming = start_shift(torch.stack(here), axis) if step + 1 < axis.size else None
            kernel.forward(out, lse, (queries, here[0], here[1]), sights((axis.rank - step) % axis.size))
            here = here if coming is None else list(coming.wait())
        lse = join_sinks(out, lse, sinks)
        y = kernel.result(out, q)
        ctx.save_for_backward(q, k, v, y, lse, sinks)
        ctx.sights, ctx.axis, ctx.kernel, ctx.gathers = sights, axis, kernel, gathers
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, sinks = ctx.saved_tensors
        axis, kernel, gathers = ctx.axis, ctx.kernel, ctx.gathers
        inputs = (q, k, v) if gathers is None else (q, *gathers.whole(k, v))
        queries, *own = kernel.operands(*inputs)
        rows = (torch.zeros(queries.shape, dtype=lse.dtype, device=q.device), *kernel.output_gradient(dy, y, q), lse)
        coming, returning = start_shift(torch.stack(own), axis) if axis.size > 1 else None, None
        half = len(q) // 2 if axis.size > 1 else 0

        def gradient(keys: Sequence[Tensor], rank: int, part: slice, kept: Tensor) -> None:
            sight = ctx.sights(rank).of_queries(part)
            r = queries.shape[1] // len(q)
            at = slice(part.start * r, part.stop * r)
            dq, dresult, delta, sums = (x[:, at] for x in rows)
            own_kernel = kernel.of_queries(at)
            own_kernel.backward((dq, kept[0], kept[1]), dresult, delta, sums, (queries[:, at], keys[0], keys[1]), sight)

        dkv = torch.zeros((2, *own[0].shape), dtype=lse.dtype, device=q.device)
        if half:
            gradient(own, axis.rank, slice(0, half), dkv)
        for step in range(1, axis.size):
            assert coming is not None
            here = coming.wait()
            coming = start_shift(here, axis) if step + 1 < axis.size else None
            lent = torch.zeros_like(dkv)
            gradient(here.unbind(), (axis.rank - step) % axis.size, slice(0, len(q)), lent)
            if returning is not None:
                lent += returning.wait()
            returning = start_shift(lent, axis, gradient=True)
        gradient(own, axis.rank, slice(half, len(q)), dkv)
        if returning is not None:
            dkv += returning.wait()
        dq, *dkeys = kernel.input_gradients((rows[0], dkv[0], dkv[1]), inputs)
        dk, dv = dkeys if gathers is None else gathers.own_gradient(*dkeys)
        return dq, dk, dv, None, None, None, sink_gradient(lse, rows[1], rows[2], sinks), None
