"""Output layer and cross entropy in one, over vocabulary shards and chunk by chunk, so that all logits never exist at
once.

For a token with logits z, label y and weight w the loss is `w * (logsumexp(z) - z_y)`, its gradient `w * (softmax(z)
- onehot(y))`. Every rank holds the rows `V_r` of the output matrix. It computes the logits of its rows, their maximum
m_r and their sum S_r = sum exp(z - m_r); two numbers per token are gathered over the axis and give the logsumexp of
the whole vocabulary, in the order of the ranks and hence with the same rounding everywhere. Padding rows follow the
last real one. On a CPU the GEMMs leave them out. On a GPU they take part: without them the leading dimension of all
three GEMMs is odd (V = 50,257), and tensor cores read unaligned rows several times slower.

With z-loss (PaLM, arXiv 2204.02311; `--z-loss-coeff`) the gradient is that of `w * (logsumexp(z) - z_y + c
logsumexp(z)^2)`, which is `w * (softmax(z) (1 + 2 c logsumexp(z)) - onehot(y))`. The loss stays the cross entropy,
so that curves can be compared.

With a soft cap c (Gemma 2, arXiv 2408.00118) z is c tanh(a / c) of what the GEMM makes, a, and its gradient reaches a
times 1 - (z / c)^2.

Gradients are computed in the forward, while a chunk's logits exist, so that nothing is computed twice and nothing of
size tokens x V is kept. Backward only scales them by the gradient of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.comm import Axis, Done, Handle, all_gather
from megalite.gradient import Node, WeightGradQueue, accumulates_wide, add_product, sink_of
from megalite.inventory import chunk_length
from megalite.parallel.tensor.linear import start_sum
from megalite.parallel.tensor.loss_kernels import LossKernels
from megalite.parallel.tensor.products import product_dtype


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the vocabulary: they begin at `start`, and the first `valid` of them are true tokens.

    kernels: compiled ones for what lies between the GEMMs; None: eager ones. z_loss: its coefficient. softcap: c.
    """

    axis: Axis
    start: int
    valid: int
    kernels: LossKernels | None = None
    z_loss: float = 0.0
    softcap: float = 0.0

    def rows(self, weight: Tensor) -> Tensor:
        """The rows of the weight, `[V/t, h]`, that take part in the GEMMs: all, or on a CPU those without padding."""
        return weight[: self.valid] if weight.device.type == "cpu" and self.kernels is None else weight

    def steepened(self, scale: Tensor, logsum: Tensor) -> Tensor:
        """The factor of the softmax in the gradient, with z-loss. logsum: over the whole vocabulary."""
        return scale * (1 + 2 * self.z_loss * logsum) if self.z_loss else scale


@dataclass
class _Chunk:
    """The results of one chunk of n tokens."""

    log_probabilities: Tensor  # [n, columns], log-softmax over the rank's own rows
    scale: Tensor | None  # [n], the factor from this softmax to the one over all rows, and of z-loss; None: 1
    losses: Tensor  # [n]
    slope: Tensor | None = None  # [n, columns], of the soft cap


class _Workspace:
    """Memory for the logits of one chunk, `[step, columns]`, allocated once for all chunks of a call.

    products: in the dtype of the GEMMs. wide: in that of the softmax; the same memory where that is the same dtype.
    """

    def __init__(self, x: Tensor, step: int, columns: int, *, fused: bool) -> None:
        self.products = self.wide = x.new_empty(step, columns)
        if not fused and wide(x.dtype) != x.dtype:
            self.wide = x.new_empty(step, columns, dtype=wide(x.dtype))

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """x @ rows.t() in the wide dtype."""
        products = torch.mm(x, rows.t(), out=self.products[: len(x)])
        return products if self.wide is self.products else self.wide[: len(x)].copy_(products)

    def narrowed(self, gradient: Tensor) -> Tensor:
        """A gradient of logits in the dtype of the GEMMs."""
        return gradient if self.wide is self.products else self.products[: len(gradient)].copy_(gradient)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The wider of fp32 and `dtype`: what logits and losses are computed in."""
    return torch.promote_types(dtype, torch.float32)


def fused_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    *,
    shard: VocabShard,
    sequence_parallel: bool,
    queue: WeightGradQueue,
    token_losses_to: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of loss_mask * cross entropy, a scalar in fp32 (fp64 for fp64), the same on every rank of the
    axis.

    x: `[n, h]`, the same on every rank (this rank's `[n/t, h]` under sequence parallelism: it is gathered here);
    weight: `[V_padded/t, h]`; labels: int64 `[n]`; loss_mask: float `[n]`. The gradient of x is complete (summed over
    the axis). token_losses_to: `[n]`, where the cross entropy of each token is written, too.

    The formula is implemented twice: eagerly by `_chunk` and `_logit_gradient`, and for compilation by `statistics` and
    `gradient` of `loss_kernels`. `token_losses` uses `_chunk`. A new loss changes both.
    """
    if not torch.is_grad_enabled():
        x = all_gather(x, shard.axis) if sequence_parallel else x
        losses = token_losses(x, weight, labels, shard=shard)
        if token_losses_to is not None:
            token_losses_to.copy_(losses)
        return _weighted_sum(losses, loss_mask.to(wide(x.dtype)))
    return _FusedCrossEntropy.apply(x, weight, labels, loss_mask, shard, sequence_parallel, queue, token_losses_to)


@torch.no_grad()
def token_losses(x: Tensor, weight: Tensor, labels: Tensor, *, shard: VocabShard) -> Tensor:
    """The cross entropy of each token, `[n, h]` -> `[n]`, without gradient."""
    dtype = product_dtype(x.dtype, x.device.type)
    x, rows = x.to(dtype), shard.rows(weight).to(dtype)
    step = chunk_length(len(x), len(rows), on_cpu=x.device.type == "cpu")
    workspace = _Workspace(x, step, len(rows), fused=False)
    parts = [
        _chunk(x[i : i + step], rows, labels[i : i + step], shard, workspace).losses for i in range(0, len(x), step)
    ]
    return torch.cat(parts)


class _FusedCrossEntropy(Node):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        shard: VocabShard,
        sequence: bool,
        queue: WeightGradQueue,
        token_losses_to: Tensor | None,
    ) -> Tensor:
        ctx.sequence = sequence and shard.axis.size > 1
        if ctx.sequence:
            x = all_gather(x, shard.axis)
        ctx.axis, ctx.queue, ctx.sink = shard.axis, queue, sink_of(weight)
        ctx.weight_dtype = weight.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        narrow, dtype = x.dtype, product_dtype(x.dtype, x.device.type)
        x, rows = x.to(dtype), shard.rows(weight).to(dtype)
        weights = loss_mask.to(wide(x.dtype))
        dx = torch.empty_like(x) if needs_x else None
        dweight = torch.empty_like(weight, dtype=wide(x.dtype)) if needs_weight else None
        product = None
        if dweight is not None:
            dweight[len(rows) :].zero_()
            apart = dtype != dweight.dtype and not accumulates_wide(x, dweight)
            product = torch.empty_like(rows) if apart else None
        total = weights.new_zeros((), dtype=torch.float64)
        fused = shard.kernels is not None
        step = chunk_length(len(x), len(rows), on_cpu=x.device.type == "cpu", compiled=fused)
        workspace = _Workspace(x, step, len(rows), fused=fused)
        for begin in range(0, len(x), step):
            part = slice(begin, begin + step)
            losses, dlogits = _losses_and_gradient(x[part], rows, labels[part], weights[part], shard, workspace)
            total += _weighted_sum(losses, weights[part])
            if token_losses_to is not None:
                token_losses_to[part] = losses
            if dx is not None:
                torch.mm(dlogits, rows, out=dx[part])
            if dweight is not None:
                add_product(dweight[: len(rows)], dlogits.t(), x[part], fresh=begin == 0, scratch=product)
        ctx.save_for_backward(None if dx is None else dx.to(narrow), dweight)
        return total.to(weights.dtype)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        reducing: Handle = Done()
        if dx is not None:
            dx, reducing = start_sum(dx * dtotal, ctx.axis, sequence=ctx.sequence)
        if dweight is not None and ctx.sink is not None:
            sink = ctx.sink
            ctx.queue.put(lambda: sink.add_scaled(dweight, dtotal), sink)
        elif dweight is not None:
            dweight = (dweight * dtotal).to(ctx.weight_dtype)
        reducing.wait()
        return dx, None if ctx.sink is not None else dweight, None, None, None, None, None, None


def _weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """sum_i losses_i weights_i. `torch.dot` adds up one by one on a CPU and loses 1e-4 of 300,000 tokens."""
    return torch.mul(losses, weights).sum()


def _losses_and_gradient(
    x: Tensor, rows: Tensor, labels: Tensor, weights: Tensor, shard: VocabShard, workspace: _Workspace
) -> tuple[Tensor, Tensor]:
    """(losses `[n]`, gradient of their weighted sum w.r.t. the logits `[n, columns]`, in the dtype of the GEMMs)."""
    if shard.kernels is None:
        chunk = _chunk(x, rows, labels, shard, workspace)
        return chunk.losses, workspace.narrowed(_logit_gradient(chunk, labels, weights, shard))
    products = torch.mm(x, rows.t(), out=workspace.products[: len(x)])
    column, own = _own_labels(labels, shard)
    logsum, picked = shard.kernels.statistics(products, column, own, shard.valid, shard.softcap)
    everyone = all_gather(torch.stack((logsum, picked))[None], shard.axis)  # [t, 2, n]
    total = torch.logsumexp(everyone[:, 0], 0)
    gradient = shard.kernels.gradient(products, total, column, own, weights, shard.valid, shard.z_loss, shard.softcap)
    return total - everyone[:, 1].sum(0), gradient


def _chunk(x: Tensor, rows: Tensor, labels: Tensor, shard: VocabShard, workspace: _Workspace) -> _Chunk:
    """`[n, h]` tokens against this rank's rows `[columns, h]`."""
    logits, slope = workspace.logits(x, rows), None
    if shard.softcap:
        capped = logits.div_(shard.softcap).tanh_()
        slope = 1 - capped.square()
        logits.mul_(shard.softcap)
    if shard.valid < len(rows):
        logits[:, shard.valid :] = float("-inf")
    if shard.axis.size == 1:
        logit = logits.gather(1, labels[:, None])[:, 0] if shard.z_loss else None  # a CPU overwrites the logits
        local = _log_softmax(logits)
        losses = -local.gather(1, labels[:, None])[:, 0]
        scale = None if logit is None else shard.steepened(torch.ones_like(logit), logit + losses)
        return _Chunk(local, scale, losses, slope)
    if shard.valid:
        column, own = _own_labels(labels, shard)
        picked = logits.gather(1, column[:, None])[:, 0]
        local = _log_softmax(logits)
        # z - log_softmax(z) is the same in every column
        logsum = picked - local.gather(1, column[:, None])[:, 0]
        picked = picked * own
    else:
        local, picked = logits, logits.new_zeros(len(x))
        logsum = torch.full_like(picked, float("-inf"))
    everyone = all_gather(torch.stack((logsum, picked))[None], shard.axis)  # [t, 2, n]
    total = torch.logsumexp(everyone[:, 0], 0)
    scale = (logsum - total).exp()
    return _Chunk(local, shard.steepened(scale, total), total - everyone[:, 1].sum(0), slope)


def _log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension; in place on a CPU, where touching new memory would take most of the time."""
    return torch.log_softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)


def _own_labels(labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """(The label's column of this rank's logits, whether this rank has one; if not, the column is arbitrary)."""
    column = labels - shard.start
    return column.clamp(0, max(0, shard.valid - 1)), (column >= 0) & (column < shard.valid)


def _logit_gradient(chunk: _Chunk, labels: Tensor, weights: Tensor, shard: VocabShard) -> Tensor:
    """weights * (softmax - onehot) over this rank's rows, `[n, valid]`; overwrites the chunk's log-probabilities."""
    scale = weights if chunk.scale is None else chunk.scale * weights
    gradient = chunk.log_probabilities.exp_().mul_(scale[:, None])
    if shard.axis.size == 1:
        gradient.scatter_add_(1, labels[:, None], -weights[:, None])
    elif shard.valid:
        column, own = _own_labels(labels, shard)
        gradient.scatter_add_(1, column[:, None], -(weights * own)[:, None])
    return gradient if chunk.slope is None else gradient.mul_(chunk.slope)
