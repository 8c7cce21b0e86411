"""Causal self-attention with grouped queries (GQA, arXiv 2305.13245), optional query/key norms and rotary positions.

The projection's rows are grouped as Megatron stores them: for each key/value head its r query heads, then its key,
then its value. A tensor-parallel rank therefore holds whole groups, and its slice of the weight is contiguous. Where
there are fewer key/value heads than ranks, neighbours share one: each has an even part of the group's rows, all gather
what these make, and each attends with its own queries. Backward, the gradients of the key and of the value are summed
over the ranks that share them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.comm import gather_sequence
from megalite.config import ModelConfig
from megalite.inventory import column, row
from megalite.microbatch import Microbatch
from megalite.nn.adapters import Prefix
from megalite.nn.attention.cached import cached_attention
from megalite.nn.attention.context import context_attention
from megalite.nn.attention.core import AttentionCore, new_sinks
from megalite.nn.kv_cache import LayerCache
from megalite.nn.norm import head_norm
from megalite.nn.rope import Rotary, rotate
from megalite.nn.segment import MakeMessage, Segment, present
from megalite.parallel.tensor import LayerContext, Message, column_linear, row_linear


class Attention(nn.Module):
    """proj(attend(qkv(x))), `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None) -> None:
        super().__init__()
        h, d, g = config.hidden_size, config.head_dim, config.query_groups
        self.tp, self.split, self.cp = ctx.tp, ctx.sequence_split, ctx.cp
        self.d, self.r, self.rotary = d, config.num_attention_heads // max(g, ctx.tp.size), rotary
        self.sharers = ctx.sharers
        assert self.sharers.size == max(1, ctx.tp.size // g), "ranks that share a key have to be known"
        self.query_multiplier, self.gated = config.query_multiplier, config.attention_output_gate
        self.qkv = column_linear(column("qkv", (config.qkv_size,), h, config, config.has_qkv_bias), ctx)
        self.proj = row_linear(row("proj", h, config.query_size, config, config.add_bias_linear), ctx)
        self.q_norm = head_norm(config.query_size, config, ctx) if config.qk_layernorm else None
        self.k_norm = head_norm(config.kv_size, config, ctx) if config.qk_layernorm else None
        self.softmax_type, self.softmax_offset = config.softmax_type, new_sinks(config, ctx)
        self.core = AttentionCore.of(config, index, ctx)
        self.adapters = Prefix(config, ctx) if config.lora.prefix else None
        # is told of queries and keys
        self.scores: Callable[[Attention, Tensor, Tensor, Microbatch], None] | None = None

    def segments(self, microbatch: Microbatch, cache: LayerCache | None, message: MakeMessage) -> list[Segment]:
        """Cut behind its messages, and in front of the last product."""
        before, behind, tp, split = message(), message(), self.tp, self.split
        owners = present(self, self.q_norm, self.k_norm, self.adapters)
        return [
            Segment(lambda x: before.send(x, tp, sequence=split)),
            Segment(lambda x: self.project(x, before)),
            Segment(lambda qkv: self.attend(qkv, microbatch, cache), owners),
            Segment(lambda context: self.proj(context, behind)),
            Segment(lambda y: behind.receive(y, tp, sequence=split)),
        ]

    def project(self, x: Tensor, message: Message) -> Tensor:
        """Queries, keys and values of this rank's heads."""
        qkv: Tensor = self.qkv(x, message)
        if self.sharers.size == 1:
            return qkv
        group, keys = gather_sequence(qkv.movedim(-1, 0).contiguous(), self.sharers).movedim(0, -1), 2 * self.d
        width = (group.shape[-1] - keys) // self.sharers.size
        return torch.cat((group.narrow(-1, self.sharers.rank * width, width), group[..., -keys:]), -1)

    def sinks(self, qkv: Tensor) -> Tensor | None:
        """Attention sinks: a further logit per head, `[h_q / d / t]`, which joins the softmax and has no value."""
        return qkv.new_zeros(qkv.shape[2] * self.r) if self.softmax_type == "off-by-one" else self.softmax_offset

    def attend(self, qkv: Tensor, microbatch: Microbatch, cache: LayerCache | None = None) -> Tensor:
        """Attention of this rank's heads, `[s, b, (h_q + 2 h_kv) / t]` -> `[s, b, h_q / t]`."""
        if self.gated:
            qkv, gate = ungated(qkv, self.r, self.d)
            return self._attend(qkv, microbatch, cache) * torch.sigmoid(gate)
        return self._attend(qkv, microbatch, cache)

    def _attend(self, qkv: Tensor, microbatch: Microbatch, cache: LayerCache | None) -> Tensor:
        s, b = qkv.shape[:2]
        qkv = qkv.view(s, b, -1, self.r + 2, self.d)
        q, k, v = qkv.split((self.r, 1, 1), 3)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            rotation = self.rotary(microbatch.positions, q.dtype)
            q, k = rotate(q, rotation), rotate(k, rotation)
        if self.query_multiplier is not None:
            q = q * self.query_multiplier
        untouched = self.rotary is None and self.q_norm is None and self.query_multiplier is None
        k, v, sinks = k.squeeze(3), v.squeeze(3), self.sinks(qkv)
        if self.adapters is not None:
            k, v = self.adapters(k, v, cache)
            untouched = False
        if self.scores is not None:
            self.scores(self, q, k, microbatch)
        if cache is not None:
            return cached_attention(self.core, q, k, v, microbatch, cache, sinks)
        if self.cp.size > 1:
            return context_attention(self.core, q, k, v, microbatch, sinks, self.training)
        packed = qkv if untouched else None
        return self.core(q, k, v, packed=packed, sinks=sinks, training=self.training, **microbatch.of_attention)


def ungated(qkv: Tensor, r: int, d: int) -> tuple[Tensor, Tensor]:
    """(Queries, keys, values; gates) of groups of r query heads of d channels; a gate follows its head (Qwen3-Next)."""
    groups = qkv.view(*qkv.shape[:2], -1, 2 * r + 2, d)
    pairs, rest = groups.split((2 * r, 2), 3)
    queries, gates = pairs.unflatten(3, (r, 2)).unbind(4)
    return torch.cat((queries, rest), 3).flatten(2), gates.flatten(2)
