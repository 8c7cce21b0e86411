"""One transformer block, pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).

With a parallel residual (GPT-J, GPT-NeoX; arXiv 2204.06745): x + attention(norm(x)) + mlp(other_norm(x)).
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.microbatch import Microbatch
from megalite.nn.attention import Attention
from megalite.nn.context import LayerContext
from megalite.nn.dropout import HiddenDropout, site_key
from megalite.nn.kv_cache import LayerCache
from megalite.nn.mlp import MLP
from megalite.nn.norm import Norm
from megalite.nn.rope import Rotary


class Block(nn.Module):
    """Layer `index` of the model, `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism).

    The residual stream keeps the dtype it arrives in: the parameters', or fp32 with `--fp32-residual-connection`.
    """

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None = None) -> None:
        super().__init__()
        split = ctx.sequence_split
        self.parallel_residual = config.use_parallel_residual
        self.input_norm = Norm(config.hidden_size, config, ctx, split_input=split)
        self.attention = Attention(config, index, ctx, rotary)
        self.mlp_norm = Norm(config.hidden_size, config, ctx, split_input=split)
        self.mlp = MLP(config, ctx)
        self.attention_dropout, self.mlp_dropout = (
            HiddenDropout(
                config.hidden_dropout,
                key=site_key(ctx.seed, "layers", index, site),
                part=ctx.tp.rank if split else 0,
            )
            for site in ("after_attention", "after_mlp")
        )

    def forward(self, x: Tensor, batch: Microbatch, cache: LayerCache | None = None) -> Tensor:
        y = self.attention(self.input_norm(x), batch, cache)
        attended = x + self.attention_dropout(y, batch.sample_ids, training=self.training)
        y = self.mlp(self.mlp_norm(x if self.parallel_residual else attended))
        return attended + self.mlp_dropout(y, batch.sample_ids, training=self.training)
