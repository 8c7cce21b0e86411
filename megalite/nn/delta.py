"""Gated DeltaNet (arXiv 2412.06464; Qwen3-Next, Qwen3.5): a block's tokens meet in a state, not in attention.

    q, k, v = silu(causal depthwise convolution of W x)      b = sigmoid(W_b x)     g = -e^a_log softplus(W_a x + dt)
    q, k over their lengths, q / sqrt(dk);  o by the gated delta rule (`delta_rule`);  y = W_o (w rms(o) silu(z))

The rows of the projection are grouped by key head, each with its query, key, values and z, as Qwen3-Next stores them; a
tensor-parallel rank holds whole groups. Where ranks share a sequence, what a piece of it does to a state is an affine
map: each rank computes those of its pieces, all exchange them, whatever `cp_comm_type` says of attention.

A cache keeps the state and the last inputs of the convolution; its size does not grow.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import gather_sequence
from megalite.config import ModelConfig
from megalite.gradient import widened
from megalite.inventory import column, delta_vectors, row
from megalite.microbatch import Microbatch
from megalite.nn.delta_rule import gated_delta
from megalite.nn.kv_cache import LayerCache
from megalite.nn.norm import Norm
from megalite.nn.rope import Rotary
from megalite.nn.segment import MakeMessage, Segment
from megalite.nn.short_convolution import convolved
from megalite.parallel.tensor import ColumnParallelLinear, LayerContext, RowParallelLinear, enter_parallel, parameter_of


class GatedDeltaNet(nn.Module):
    """out(attend(mix(x), z)), `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None) -> None:
        super().__init__()
        given, h, tp = config.delta, config.hidden_size, ctx.tp
        self.given, self.tp, self.split, self.cp = given, tp, ctx.sequence_split, ctx.cp
        keys, values = given.linear_num_key_heads, given.linear_num_value_heads
        self.heads, self.reach = keys // tp.size, given.linear_conv_kernel_dim - 1
        self.conv, self.dt_bias, self.a_log = (parameter_of(each, ctx) for each in delta_vectors(config))
        self.qkvz, self.ba = (
            ColumnParallelLinear(column(name, (rows,), h, config, bias=False), ctx, enters=False)
            for name, rows in (("qkvz", keys * given.mixed + given.value_size), ("ba", 2 * values))
        )
        plain = replace(config, apply_layernorm_1p=False, normalization="RMSNorm")
        self.norm = Norm(given.linear_value_head_dim, plain, ctx, split_input=tp.size > 1)
        self.out = RowParallelLinear(row("out", h, given.value_size, config, config.add_bias_linear), ctx)

    def segments(self, microbatch: Microbatch, cache: LayerCache | None, message: MakeMessage) -> list[Segment]:
        """Cut as attention is."""
        before, behind, tp, split = message(), message(), self.tp, self.split
        return [
            Segment(lambda x: before.send(x, tp, sequence=split)),
            Segment(lambda x: enter_parallel(x, before, tp, sequence=split)),
            Segment(lambda x: self.mix(x, microbatch, cache), (self, self.norm)),
            Segment(lambda o: self.out(o, behind)),
            Segment(lambda y: behind.receive(y, tp, sequence=split)),
        ]

    def mix(self, x: Tensor, microbatch: Microbatch, cache: LayerCache | None) -> Tensor:
        """`[s, b, h]` -> the normalised and gated results of this rank's heads, `[s, b, values / t]`."""
        s, b = x.shape[:2]
        mixed, value_size = self.given.mixed, self.given.group * self.given.linear_value_head_dim
        inputs, z = self.qkvz(x).view(s, b, self.heads, -1).split((mixed, value_size), -1)
        ba, starts = self.ba(x).view(s, b, self.heads, -1), microbatch.document_starts
        if microbatch.order is not None:
            return self.attend(self.over_ranks(inputs, ba, microbatch, cache), z)
        offset = 0 if cache is None else cache.length
        starts = None if starts is None else starts - offset
        before, state = (None, None) if cache is None or cache.state is None else cache.state
        before = inputs.new_zeros(self.reach, *inputs.shape[1:]) if before is None else before
        o, state = self.run(inputs, ba, before, state, starts)
        if cache is not None:
            cache.state, cache.length = (torch.cat((before, inputs))[s:], state), offset + s
        return self.attend(o.to(x.dtype), z)

    def over_ranks(self, inputs: Tensor, ba: Tensor, microbatch: Microbatch, cache: LayerCache | None) -> Tensor:
        """Results for this rank's tokens, `[s, b, H, r, dv]`, where others have those before.

        A rank of a ring has two pieces of the sequence (`sequence_order`), another one. The state behind a piece is
        N + M S, S that before it: the rule gives both by columns, N from values and no state, M from no values and the
        unit matrix, and each result likewise. The ranks exchange N, M and the last inputs of their pieces.
        """
        (n, b), dk = inputs.shape[:2], self.given.linear_key_head_dim
        pieces = 2 if self.cp.ring.size > 1 else 1
        order, starts, length = microbatch.order, microbatch.document_starts, n // pieces
        assert order is not None and microbatch.places is not None
        begins, rank = order[::length], self.cp.ring.rank * self.cp.heads.size + self.cp.heads.rank
        first, own = begins.argsort(), slice(pieces * rank, pieces * (rank + 1))
        place = first.argsort()[own]  # of this rank's pieces in the sequence

        line = inputs.new_zeros(self.reach, *inputs.shape[1:])
        reach = min(self.reach, length)
        if reach:
            tails = inputs.unflatten(0, (pieces, length))[:, length - reach :]
            line = torch.cat((line, self._exchanged(tails)[first].flatten(0, 1)))
        window = torch.arange(self.reach, device=order.device)
        before = line[(place * reach)[:, None] + window].transpose(0, 1).flatten(1, 2)
        if starts is not None:
            starts = starts[:, rank * n : (rank + 1) * n].unflatten(1, (pieces, length)) - begins[own][:, None]
            starts = starts.transpose(0, 1).flatten(0, 1)
        inputs, ba = (x.unflatten(0, (pieces, length)).transpose(0, 1).flatten(1, 2) for x in (inputs, ba))
        unit = torch.eye(dk, dtype=widened(inputs).dtype, device=inputs.device)
        o, ends = self.run(inputs, ba, before, unit, starts)
        dv = o.shape[-1] - dk
        state, states = torch.zeros_like(ends[:b, ..., :dv]), list[Tensor]()
        for end in self._exchanged(ends.unflatten(0, (pieces, b)))[first]:
            states.append(state)
            state = end[..., :dv] + end[..., dv:] @ state
        if cache is not None:
            cache.state, cache.length = (line[len(line) - self.reach :], state), len(order)
        own_states = torch.stack(states)[place].flatten(0, 1)  # [pieces * b, H, r, dk, dv]
        o = o[..., :dv] + (o[..., dv:].movedim(0, 3) @ own_states).movedim(3, 0)
        tokens: Tensor = o.unflatten(1, (pieces, b)).transpose(0, 1).flatten(0, 1).to(inputs.dtype)
        return tokens

    def _exchanged(self, x: Tensor) -> Tensor:
        """Those of all ranks that share a sequence, rank after rank."""
        return gather_sequence(gather_sequence(x.contiguous(), self.cp.heads), self.cp.ring)

    def attend(self, o: Tensor, z: Tensor) -> Tensor:
        """w rms(o) silu(z): o `[s, b, H, r, dv]`, z `[s, b, H, r * dv]` -> `[s, b, H * r * dv]`."""
        gate = F.silu(widened(z)).view(o.shape)
        y: Tensor = (self.norm(o) * gate).to(z.dtype).flatten(2)
        return y

    def run(
        self, inputs: Tensor, ba: Tensor, before: Tensor, state: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Convolution and rule: `[n, b, H, mixed]`, `[n, b, H, 2 r]` -> (o `[n, b, H, r, dv]`, the state behind it).

        before: the inputs in front. state: that in front, or a unit matrix: then the columns of the rule for it and no
        values follow those of the values. starts: of documents, counted from the first token.
        """
        dk, dv, group = self.given.linear_key_head_dim, self.given.linear_value_head_dim, self.given.group
        n, b, heads = inputs.shape[:3]
        q, k, v = convolved(inputs, before, self.conv, dk, starts)
        v = v.view(n, b, heads, group, dv)
        if state is not None and state.dim() == 2:
            v = F.pad(v, (0, dk))
            state = F.pad(state, (dv, 0)).expand(b, heads, group, dk, dv + dk)
        beta, a = widened(ba).split((group, group), -1)
        rates, shift = (widened(x).view(heads, group) for x in (self.a_log, self.dt_bias))
        return gated_delta(q, k, v, torch.sigmoid(beta), -rates.exp() * F.softplus(a + shift), state, starts)
