"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of one small vector.

    c_q = N(W_qd x)                  or x itself           [s, b, rq]
    c, k_r = W_kvd x;  c = N(c)                            [s, b, r], [s, b, dr]
    q = W_qu c_q                     each head [q_n, q_r]  [s, b, a, dn + dr]
    W_kvu c                          each head [k_n, v]    [s, b, a, dn + dv]
    o = softmax(s (q_n k_n + rot(q_r) rot(k_r))) v         s = (dn + dr)^-1/2, times YaRN's temperature twice

Every rank of the tensor axis has c_q, c and k_r whole (`enter_parallel` sums their gradients over heads: each rank's
heads see the same k_r), and its heads' rows of the matrices up. Under sequence parallelism the small vectors are
gathered, not x.

A cache keeps c and rot(k_r), r + dr numbers a token. One token is attended to without making keys and values again:
q_n k_n = (W_k^T q_n) c, and W_v stands behind the sum over c.

Kernels want as many channels of values as of keys: the fewer are padded with zeros.
"""

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.inventory import column, row, whole
from megalite.microbatch import Microbatch
from megalite.nn.attention.cached import attend_token, with_token
from megalite.nn.attention.context import context_attention
from megalite.nn.attention.core import AttentionCore, new_sinks
from megalite.nn.kv_cache import LayerCache
from megalite.nn.norm import Norm
from megalite.nn.rope import Rotary, rotate
from megalite.nn.segment import MakeMessage, Segment, present
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    LayerContext,
    ReplicatedLinear,
    RowParallelLinear,
    enter_parallel,
)


class LatentAttention(nn.Module):
    """proj(mix(project(x))), `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None) -> None:
        super().__init__()
        given, h, a = config.latent, config.hidden_size, config.num_attention_heads
        self.given, self.heads, self.rotary = given, a // ctx.tp.size, rotary
        self.tp, self.split, self.cp = ctx.tp, ctx.sequence_split, ctx.cp
        self.width, self.query_multiplier = config.kernel_dim, config.query_multiplier
        made, rank, split = given.q_lora_rank, given.kv_lora_rank, ctx.sequence_split
        self.query_width = made or h

        def norm(size: int) -> Norm | None:
            epsilon = given.latent_norm_epsilon
            return Norm(size, config, ctx, split_input=split, epsilon=epsilon) if config.qk_layernorm else None

        self.softmax_type, self.softmax_offset = config.softmax_type, new_sinks(config, ctx)
        self.q_down = None if made is None else ReplicatedLinear(whole("q_down", made, h, config), ctx)
        self.q_down_norm = None if made is None else norm(made)
        self.kv_down = ReplicatedLinear(whole("kv_down", given.compressed, h, config), ctx)
        self.kv_down_norm = norm(rank)
        self.queries = "q" if made is None else "q_up"
        queries = column(self.queries, (config.query_size,), self.query_width, config, bias=False)
        self.add_module(self.queries, ColumnParallelLinear(queries, ctx, enters=False))
        up = column("kv_up", (a * (given.qk_head_dim + given.v_head_dim),), rank, config, bias=False)
        self.kv_up = ColumnParallelLinear(up, ctx, enters=False)
        self.proj = RowParallelLinear(row("proj", h, config.value_size, config, config.add_bias_linear), ctx)
        self.core = AttentionCore.of(config, index, ctx)

    def segments(self, microbatch: Microbatch, cache: LayerCache | None, message: MakeMessage) -> list[Segment]:
        """Cut as attention is: the small vectors travel in place of x."""
        before, behind, tp, split = message(), message(), self.tp, self.split
        norms = present(self.q_down_norm, self.kv_down_norm)
        return [
            Segment(lambda x: before.send(self.project(x), tp, sequence=split), norms),
            Segment(lambda small: enter_parallel(small, before, tp, sequence=split)),
            Segment(lambda small: self.mix(small, microbatch, cache), (self,)),
            Segment(lambda context: self.proj(context, behind)),
            Segment(lambda y: behind.receive(y, tp, sequence=split)),
        ]

    def project(self, x: Tensor) -> Tensor:
        """What queries, keys and values are made of, side by side: `[s, b, h]` -> `[s, b, rq + r + dr]`."""
        made = x if self.q_down is None else self.q_down(x)
        made = made if self.q_down_norm is None else self.q_down_norm(made)
        c, k_r = self.kv_down(x).split((self.given.kv_lora_rank, self.given.qk_pos_emb_head_dim), -1)
        return torch.cat((made, c if self.kv_down_norm is None else self.kv_down_norm(c), k_r), -1)

    def mix(self, small: Tensor, microbatch: Microbatch, cache: LayerCache | None) -> Tensor:
        """Attention of this rank's heads, `[s, b, rq + r + dr]` -> `[s, b, a dv / t]`."""
        rank, dr = self.given.kv_lora_rank, self.given.qk_pos_emb_head_dim
        made, c, k_r = small.split((self.query_width, rank, dr), -1)
        q = self.get_submodule(self.queries)(made)
        if self.rotary is not None:
            rotation = self.rotary(microbatch.positions, k_r.dtype)
            k_r = rotate(k_r[:, :, None, None], rotation).view(k_r.shape)
        if cache is None:
            return self.attend(q, self.kv_up(c), k_r, microbatch, alone=self.cp.size == 1)
        alone, places, stored = microbatch.order is None, microbatch.places, torch.cat((c, k_r), -1)[:, :, None]
        if alone and len(q) == 1 and places is not None:
            return self.attend_token(q, stored, microbatch, cache)
        if alone:
            stored, _ = cache.append(stored, stored[..., :0])
        else:
            cache.append(stored, stored[..., :0], places)
        c, k_r = stored[:, :, 0].split((rank, dr), -1)
        return self.attend(q, self.kv_up(c), k_r, microbatch, alone=alone)

    def attend(self, q: Tensor, kv: Tensor, k_r: Tensor, microbatch: Microbatch, *, alone: bool) -> Tensor:
        """The same from queries `[s, b, a (dn + dr) / t]`, keys and values `[n, b, a (dn + dv) / t]` of n >= s tokens
        and the rotated part of keys `[n, b, dr]`. alone: whether no other rank has a part of the sequence."""
        dn, dv, samples = self.given.qk_head_dim, self.given.v_head_dim, q.shape[1]
        k_n, v = kv.view(len(kv), samples, self.heads, -1).split((dn, dv), -1)
        queries = self._columns(*self.turned(q, microbatch))
        stored = (*self._columns(k_n, k_r[:, :, None].expand(-1, -1, self.heads, -1)), *self._columns(v))
        packed = None
        if len(q) == len(kv):  # one copy makes what kernels read
            packed = torch.cat((*queries, *stored), -1).unflatten(-1, (3, self.width))
            q, k, v = packed[:, :, :, :1], packed[:, :, :, 1], packed[:, :, :, 2]
        else:
            q, (k, v) = torch.cat(queries, -1)[:, :, :, None], torch.cat(stored, -1).split(self.width, -1)
        sinks, training = self.sinks(q), self.training
        if alone:
            seen = {"packed": packed, "values": None if dv == self.width else dv, **microbatch.of_attention}
            y = self.core(q, k, v, sinks=sinks, training=training, **seen)
        else:
            y = context_attention(self.core, q, k, v, microbatch, sinks, training)
        return y if y.shape[-1] == self.heads * dv else y.view(len(q), samples, self.heads, -1)[..., :dv].flatten(2)

    def attend_token(self, q: Tensor, stored: Tensor, microbatch: Microbatch, cache: LayerCache) -> Tensor:
        """The same of one token, `stored` `[1, b, 1, r + dr]`, without keys and values of the others."""
        dn, dv, rank = self.given.qk_head_dim, self.given.v_head_dim, self.given.kv_lora_rank
        w_k, w_v = self.kv_up.weight.view(self.heads, dn + dv, rank).split((dn, dv), 1)
        stored, _, hidden = with_token(self.core, stored, stored[..., :0], microbatch, cache)
        q_n, q_r = self.turned(q, microbatch)
        small = torch.cat((torch.einsum("sbad,adr->sbar", q_n, w_k), q_r), -1)
        small = small * (small.shape[-1] / self.width) ** 0.5  # the scale is that of other channels
        y = attend_token(self.core, small[:, :, None], stored, stored[..., :rank], hidden, self.sinks(q))
        return torch.einsum("sbar,avr->sbav", y.view(*q.shape[:2], self.heads, rank), w_v).flatten(2)

    def turned(self, q: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(q_n, rotated q_r) of queries `[s, b, a (dn + dr) / t]`, `[s, b, a / t, dn]` and `[s, b, a / t, dr]`."""
        q = q.view(*q.shape[:2], self.heads, -1)
        q = q if self.query_multiplier is None else q * self.query_multiplier
        q_n, q_r = q.split((self.given.qk_head_dim, self.given.qk_pos_emb_head_dim), -1)
        if self.rotary is None:
            return q_n, q_r
        return q_n, rotate(q_r[:, :, :, None], self.rotary(microbatch.positions, q.dtype))[:, :, :, 0]

    def sinks(self, q: Tensor) -> Tensor | None:
        """As `Attention.sinks`."""
        return q.new_zeros(self.heads) if self.softmax_type == "off-by-one" else self.softmax_offset

    def _columns(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """What stands side by side in a kernel's channels, zeros last."""
        missing = self.width - sum(part.shape[-1] for part in parts)
        return (*parts, parts[0].new_zeros(1).expand(*parts[0].shape[:-1], missing)) if missing else parts
