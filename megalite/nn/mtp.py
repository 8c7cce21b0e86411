"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2): the last layer's result h_0, normalised, goes on through
blocks, each of which reads one token further and predicts the one behind it.

    h_k = N(block(W [N_e(e(t_{i+k})), N_h(h_{k-1})]))      logits of t_{i+k+1}: the output layer's, of h_k

The loss of a batch is that of the next token plus factor / D times the sum of the D further means. What is logged as
the loss is the first alone: the others reach the weights through the gradient.

They are a part of the head, so nothing but h_0 comes from elsewhere; word embeddings of their own are a copy of the
first stage's, tied to it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.inventory import vocabulary, whole
from megalite.microbatch import Microbatch
from megalite.nn.block import Block
from megalite.nn.norm import Norm
from megalite.nn.rope import Rotary
from megalite.parallel.tensor import LayerContext, ReplicatedLinear, VocabParallelEmbedding

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(h `[s, b, h]`, labels `[b, s]`, weights `[b, s]`) -> weighted sum of their cross entropy."""


class Prediction(nn.Module):
    """One of them: (e, h of the one before) -> h, `[s, b, h]` each (`[s/t, b, h]` under sequence parallelism)."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None) -> None:
        super().__init__()
        h, split = config.hidden_size, ctx.sequence_split
        self.e_norm = Norm(h, config, ctx, split_input=split)
        self.h_norm = Norm(h, config, ctx, split_input=split)
        self.proj = ReplicatedLinear(whole("proj", h, 2 * h, config), ctx)
        self.block = Block(config, index, ctx, rotary)
        self.norm = Norm(h, config, ctx, split_input=split)
        self.dtype = ctx.wide_dtype if config.fp32_residual_connection else ctx.dtype

    def forward(self, e: Tensor, h: Tensor, microbatch: Microbatch) -> Tensor:
        x = self.proj(torch.cat((self.e_norm(e), self.h_norm(h)), -1))
        y: Tensor = self.norm(self.block(x.to(self.dtype), microbatch))
        return y


class FurtherPredictions(nn.Module):
    """All of them. own: the configuration of the block that each has."""

    def __init__(self, config: ModelConfig, own: ModelConfig, ctx: LayerContext, rotary: Rotary | None) -> None:
        super().__init__()
        depth = config.further.depth
        self.share = config.further.mtp_loss_scaling_factor / depth
        self.word_embeddings = VocabParallelEmbedding(vocabulary("word_embeddings.weight", config), ctx)
        self.word_embeddings.weight.sink_uses = depth  # type: ignore[attr-defined]  # ours: contributions per micro-batch
        self.layers = nn.ModuleList(Prediction(own, config.num_layers + k, ctx, rotary) for k in range(depth))
        multiplier = config.embedding_multiplier
        self.multiplier = None if multiplier is None else float(torch.tensor(multiplier, dtype=ctx.dtype))

    def forward(self, h: Tensor, microbatch: Microbatch, loss_of: LossOf) -> Tensor:
        """The share of all further losses in that of the batch, times what makes its sum a mean."""
        tokens, labels, weights = microbatch.further_tokens, microbatch.further_labels, microbatch.further_weights
        assert tokens is not None and labels is not None and weights is not None
        total = None
        for k, layer in enumerate(self.layers):
            e = self.word_embeddings(tokens[:, k].t())
            h = layer(e if self.multiplier is None else e * self.multiplier, h, microbatch)
            loss = loss_of(h, labels[:, k], weights[:, k])
            if microbatch.further_losses is not None:
                microbatch.further_losses[k] = loss.detach()
            total = loss if total is None else total + loss
        assert total is not None
        return total * self.share
