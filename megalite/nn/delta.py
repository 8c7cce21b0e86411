"""Gated DeltaNet (arXiv 2412.06464; Qwen3-Next, Qwen3.5): a block's tokens meet in a state, not in attention.

    q, k, v = silu(causal depthwise convolution of W x)      b = sigmoid(W_b x)     g = -e^a_log softplus(W_a x + dt)
    q, k over their lengths, q / sqrt(dk);  o by the gated delta rule (`delta_rule`);  y = W_o (w rms(o) silu(z))

The rows of the projection are grouped by key head, each with its query, key, values and z, as Qwen3-Next stores them; a
tensor-parallel rank holds whole groups. Where ranks share a sequence, tokens are traded for heads over all of them,
whatever `cp_comm_type` says of attention: each then has whole sequences of some heads.

A cache keeps the state and the last inputs of the convolution; its size does not grow.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import all_gather
from megalite.config import ModelConfig, hidden_std, residual_std
from megalite.inventory import ParameterPlacement
from megalite.microbatch import Microbatch
from megalite.nn.delta_rule import gated_delta
from megalite.nn.kv_cache import LayerCache
from megalite.nn.norm import Norm, widened
from megalite.nn.rope import Rotary
from megalite.nn.segment import MakeMessage, Segment
from megalite.parallel.context import trade_heads_for_tokens, trade_tokens_for_heads
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    LayerContext,
    Linear,
    RowParallelLinear,
    enter_parallel,
    new_parameter,
)

EPSILON = 1e-6


class GatedDeltaNet(nn.Module):
    """out(attend(mix(x), z)), `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None) -> None:
        super().__init__()
        given, h, std, tp = config.delta, config.hidden_size, hidden_std(config), ctx.tp
        self.given, self.tp, self.split, self.cp = given, tp, ctx.sequence_split, ctx.cp
        keys, values = given.linear_num_key_heads, given.linear_num_value_heads
        self.heads = keys // tp.size

        def vector(start: float) -> nn.Parameter:
            place = ParameterPlacement(
                (values,), (tp.rank * values // tp.size,), tp.names, decay=False, init_value=start
            )
            return new_parameter((values // tp.size,), place, ctx)

        shape = (keys, given.mixed, given.linear_conv_kernel_dim)
        place = ParameterPlacement(shape, (tp.rank * self.heads, 0, 0), tp.names, init_std=config.init_method_std)
        self.conv = new_parameter((self.heads, *shape[1:]), place, ctx)
        self.dt_bias, self.a_log = vector(1.0), vector(math.log(8.0))
        rows = keys * given.mixed + given.value_size
        self.qkvz = ColumnParallelLinear(h, rows, bias=False, init_std=std, ctx=ctx, enters=False)
        self.ba = ColumnParallelLinear(h, 2 * values, bias=False, init_std=std, ctx=ctx, enters=False)
        plain = replace(config, apply_layernorm_1p=False, normalization="RMSNorm")
        self.norm = Norm(given.linear_value_head_dim, plain, ctx, split_input=tp.size > 1)
        self.out = RowParallelLinear(
            given.value_size, h, bias=config.add_bias_linear, init_std=residual_std(config), ctx=ctx
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """As `Attention.linears`."""
        return self.qkvz, self.ba, self.out

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
        mixed, group, dv = self.given.mixed, self.given.group, self.given.linear_value_head_dim
        inputs, z = self.qkvz(x).view(s, b, self.heads, -1).split((mixed, group * dv), -1)
        packed = torch.cat((inputs, self.ba(x).view(s, b, self.heads, -1)), -1)
        order, starts = microbatch.order, microbatch.document_starts
        if order is None:
            o = self.run(packed, (self.conv, self.dt_bias, self.a_log), starts, cache)
            return self.attend(o, z)
        axes = self.cp
        places = order.argsort()
        packed = trade_tokens_for_heads(trade_tokens_for_heads(packed, axes.heads), axes.ring)[places]
        part = axes.heads.rank * axes.ring.size + axes.ring.rank
        own = tuple(p.chunk(axes.size)[part] for p in (self.conv, self.dt_bias, self.a_log))
        o = self.run(packed, own, None if starts is None else starts[:, places], cache)[order]
        if cache is not None:
            self._share(cache)
        return self.attend(trade_heads_for_tokens(trade_heads_for_tokens(o, axes.ring), axes.heads), z)

    def attend(self, o: Tensor, z: Tensor) -> Tensor:
        """w rms(o) silu(z): o `[s, b, H, r, dv]`, z `[s, b, H, r * dv]` -> `[s, b, H * r * dv]`."""
        gate = F.silu(widened(z)).view(o.shape)
        y: Tensor = (self.norm(o) * gate).to(z.dtype).flatten(2)
        return y

    def run(self, packed: Tensor, own: tuple[Tensor, ...], starts: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Convolution and rule over whole sequences of some heads: `[n, b, H, mixed + 2 r]` -> `[n, b, H, r, dv]`."""
        given, (conv, dt_bias, a_log) = self.given, own
        dk, dv, group = given.linear_key_head_dim, given.linear_value_head_dim, given.group
        n, b, heads = packed.shape[:3]
        offset = 0 if cache is None else cache.length
        inputs, beta, a = packed.split((given.mixed, group, group), -1)
        taps = conv.shape[-1]
        before, state = (None, None) if cache is None or cache.state is None else cache.state
        before = inputs.new_zeros(taps - 1, b, heads, given.mixed) if before is None else before
        line = torch.cat((before, inputs))
        y = torch.zeros_like(inputs)
        for tap in range(taps):
            seen = line[tap : tap + n] * conv[..., tap]
            lag = taps - 1 - tap
            if starts is not None and lag:
                at = torch.arange(offset - lag, offset - lag + n, device=starts.device)
                seen = seen * (at >= starts).t()[:, :, None, None]
            y = y + seen
        q, k, v = widened(F.silu(y)).split((dk, dk, group * dv), -1)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
        beta, a, rates = widened(beta), widened(a), widened(a_log).exp().view(heads, group)
        g = -rates * F.softplus(a + widened(dt_bias).view(heads, group))
        o, state = gated_delta(
            q * dk**-0.5, k, v.view(n, b, heads, group, dv), torch.sigmoid(beta), g, state, starts, offset
        )
        if cache is not None:
            cache.state, cache.length = (line[len(line) - taps + 1 :], state), offset + n
        return o.to(packed.dtype)

    def _share(self, cache: LayerCache) -> None:
        """Gives every rank that shares a sequence the state of all heads: a generated token is computed on all."""
        assert cache.state is not None
        inputs, state = cache.state
        for axis in (self.cp.ring, self.cp.heads):
            inputs = all_gather(inputs.movedim(2, 0).contiguous(), axis).movedim(0, 2)
            state = all_gather(state.movedim(1, 0).contiguous(), axis).movedim(0, 1)
        cache.state = inputs, state
