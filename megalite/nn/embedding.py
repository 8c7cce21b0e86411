"""The first layer: turns tokens (and learned positions) into the residual stream."""

import torch
from torch import Tensor, nn

from megalite.comm import own_slice
from megalite.config import ModelConfig
from megalite.inventory import Parameter, vocabulary
from megalite.microbatch import Microbatch
from megalite.nn.dropout import HiddenDropout
from megalite.parallel.tensor import LayerContext, VocabParallelEmbedding, lookup, make_layer, parameter_of


class PositionEmbedding(nn.Module):
    """Learned vectors of absolute positions, `[P, h]`."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.weight_grads = ctx.weight_grads
        self.tp, self.split, self.begin = ctx.tp, ctx.sequence_split, config.lora.prefix
        shape = (config.max_positions, config.hidden_size)
        self.weight = parameter_of(Parameter("weight", shape, partial="sequence", init_std=config.init_method_std), ctx)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 `[s, b]` -> `[s, b, h]` (the rank's `[s/t, b, h]` under sequence parallelism)."""
        if self.split:
            positions = own_slice(positions, self.tp)
        return lookup(positions + self.begin if self.begin else positions, self.weight, self.weight_grads)


class Embedding(nn.Module):
    """Layer 'embedding': takes no activation, returns `[s, b, h]` (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.on_host = ctx.host_embedding is not None
        self.word_embeddings = (
            make_layer("words", VocabParallelEmbedding, vocabulary("word_embeddings.weight", config), ctx)
            if ctx.host_embedding is None
            else ctx.host_embedding(ctx)
        )
        learned = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = make_layer("positions", PositionEmbedding, config, ctx) if learned else None
        multiplier = config.embedding_multiplier
        self.multiplier = None if multiplier is None else float(torch.tensor(multiplier, dtype=ctx.dtype))
        self.dtype = ctx.wide_dtype if config.fp32_residual_connection else ctx.dtype
        self.dropout = HiddenDropout.of(config, ctx, "embedding")

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        x = self.word_embeddings(microbatch if self.on_host else microbatch.tokens.t())
        if self.multiplier is not None:
            x = x * self.multiplier
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(microbatch.positions.t())
        return self.dropout(x.to(self.dtype), microbatch.sample_ids, microbatch.places, training=self.training)
