"""The last layer: final norm, output projection and cross entropy over the vocabulary's shards."""

import torch
from torch import Tensor, nn

from megalite.comm import all_gather
from megalite.config import ModelConfig, width_ratio
from megalite.inventory import WORD_EMBEDDINGS, vocabulary
from megalite.microbatch import Microbatch
from megalite.nn.mtp import FurtherPredictions
from megalite.nn.norm import Norm
from megalite.nn.router import Attach
from megalite.parallel.tensor import (
    LayerContext,
    LossKernels,
    VocabShard,
    fused_cross_entropy,
    parameter_of,
    product_dtype,
    token_losses,
)


class OutputLayer(nn.Module):
    """Holds `[V_padded/t, h]`; with tied embeddings the word embedding's parameter, or this stage's copy of it."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.weight = parameter_of(vocabulary("output.weight", config), ctx)
        if not config.untie_embeddings_and_output_weights:
            self.weight.logical_name = WORD_EMBEDDINGS  # type: ignore[attr-defined]  # ours, on a tensor of torch's


class Head(nn.Module):
    """Layer 'head'. `forward` gives the loss; `token_losses` and `logits` serve evaluation and generation."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, further: FurtherPredictions | None = None) -> None:
        super().__init__()
        self.tp, self.weight_grads = ctx.tp, ctx.weight_grads
        self.split, self.vocab_size = ctx.sequence_split, config.vocab_size
        self.final_norm = Norm(config.hidden_size, config, ctx, split_input=self.split)
        self.output = OutputLayer(config, ctx)
        self.kernels: LossKernels | None = None
        self.z_loss, self.width = config.z_loss_coeff, width_ratio(config)
        self.softcap = config.final_logit_softcapping or 0.0
        self.mtp, depth = further, config.further.depth
        self.copies: list[nn.Module] = [] if config.untie_embeddings_and_output_weights else [self.output]
        """Modules whose weight is the word embedding."""
        if further is not None:
            uses = 1 + depth
            if self.copies:
                further.word_embeddings.weight, uses = self.output.weight, uses + depth
            self.output.weight.sink_uses = uses  # type: ignore[attr-defined]  # ours: contributions per micro-batch
            self.copies.append(further.word_embeddings)

    @property
    def weight(self) -> Tensor:
        """Of the products: rows of the vocabulary."""
        return self.output.weight

    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        """`[s, b, h]` (`[s/t, b, h]`) -> sum over tokens of loss_mask * cross entropy: a scalar in fp32 or wider."""
        x = self.final_norm(x)
        wanted = microbatch.token_losses
        losses = None if wanted is None else torch.empty_like(wanted.t(), memory_format=torch.contiguous_format)
        loss = self.loss_of(x, microbatch.labels, microbatch.loss_mask, losses)
        if wanted is not None and losses is not None:
            wanted.copy_(losses.t())
        if self.mtp is None or microbatch.further_tokens is None or not torch.is_grad_enabled():
            return loss
        return Attach.apply(loss, self.mtp(x, microbatch, self.loss_of), None)

    def loss_of(self, x: Tensor, labels: Tensor, weights: Tensor, token_losses_to: Tensor | None = None) -> Tensor:
        """The same of a normalised x and labels and weights `[b, s]`. token_losses_to: `[s, b]`."""
        weight = self.weight
        return fused_cross_entropy(
            self._narrowed(x).flatten(0, 1),
            weight,
            labels.t().reshape(-1),
            weights.t().reshape(-1),
            shard=self._shard(weight),
            sequence_parallel=self.split,
            queue=self.weight_grads,
            token_losses_to=None if token_losses_to is None else token_losses_to.view(-1),
        )

    @torch.no_grad()
    def token_losses(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        """The cross entropy of every token, unweighted, `[b, s]` in fp32 or wider; no gradient."""
        weight = self.weight
        x = self._normalised(x)
        losses = token_losses(x.flatten(0, 1), weight, microbatch.labels.t().reshape(-1), shard=self._shard(weight))
        return losses.view(x.shape[0], x.shape[1]).t()

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """`[s, b, h]` (`[s/t, b, h]`) -> `[s, b, V]` with the true vocabulary, gathered, fp32 or wider; no gradient."""
        whole = all_gather(self.local_logits(x).permute(2, 0, 1).contiguous(), self.tp).permute(1, 2, 0)
        return whole[..., : self.vocab_size]

    @torch.no_grad()
    def local_logits(self, x: Tensor) -> Tensor:
        """Logits of this rank's part of the padded vocabulary, `[s, b, V_padded/t]`, from id rank * V_padded/t on."""
        weight = self.weight
        x = self._normalised(x)
        dtype = product_dtype(x.dtype, x.device.type)
        local = torch.matmul(x.to(dtype), weight.to(dtype).t())
        local = local.to(torch.promote_types(local.dtype, torch.float32))
        return torch.tanh(local / self.softcap) * self.softcap if self.softcap else local

    def _normalised(self, x: Tensor) -> Tensor:
        x = self._narrowed(self.final_norm(x))
        return all_gather(x, self.tp) if self.split else x

    def _narrowed(self, x: Tensor) -> Tensor:
        """What the logits are made of: under muP they do not grow with the width."""
        return x if self.width == 1.0 else x / self.width

    def _shard(self, weight: Tensor) -> VocabShard:
        start = self.tp.rank * weight.shape[0]
        valid = max(0, min(weight.shape[0], self.vocab_size - start))
        return VocabShard(self.tp, start, valid, self.kernels, self.z_loss, self.softcap)
