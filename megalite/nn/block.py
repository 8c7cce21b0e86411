"""One transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

With a parallel residual (GPT-J, GPT-NeoX; arXiv 2204.06745): x + attention(norm(x)) + mlp(other_norm(x)). The norms
may stand elsewhere: x + norm(attention(x)) (post; OLMo 2, arXiv 2501.00656), or x + norm(attention(other_norm(x)))
(sandwich; Gemma 3, arXiv 2503.19786).

A block is cut into segments at its messages over the tensor axis, and runs them one after the other:

    norm, qkv  |  attention  |  proj  |  add, norm, fc1  |  activation, fc2, add
    gather                        sum    gather                        sum

With experts (`nn.experts`) the last two are: add, norm, route, to the experts | their GEMMs | back, sum, add.

Two micro-batches can alternate between them, so that one computes while a message of the other is in flight.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig, depth_ratio
from megalite.microbatch import Microbatch
from megalite.nn.adapters import adapt
from megalite.nn.attention.blocked import register_operator
from megalite.nn.attention.latent import LatentAttention
from megalite.nn.attention.layer import Attention
from megalite.nn.delta import GatedDeltaNet
from megalite.nn.dropout import HiddenDropout
from megalite.nn.experts import MoE
from megalite.nn.kv_cache import LayerCache
from megalite.nn.mlp import MLP
from megalite.nn.norm import Norm
from megalite.nn.rope import Rotary
from megalite.nn.segment import MakeMessage, Segment, present
from megalite.nn.uncompiled import Uncompiled
from megalite.parallel.tensor import LayerContext, Message, make_layer

Mixer = Attention | LatentAttention | GatedDeltaNet
"""What lets tokens see each other: `segments`, from a normalised x to what is added to it; `attend` is compiled."""

MIXERS: Mapping[str, Callable[..., Mixer]] = {"attention": Attention, "latent": LatentAttention, "delta": GatedDeltaNet}


class Block(nn.Module):
    """Layer `index` of the model, `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism).

    The residual stream keeps the dtype it arrives in: the parameters', or fp32 with `--fp32-residual-connection`.
    """

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None = None) -> None:
        super().__init__()
        split = ctx.sequence_split
        self.parallel_residual = config.use_parallel_residual
        self.dtype, self.branch = ctx.dtype, 1 / depth_ratio(config)

        def norm(*, there: bool) -> Norm | None:
            return make_layer("norm", Norm, config.hidden_size, config, ctx=ctx, split_input=split) if there else None

        before, behind = config.norm_placement != "post", config.norm_placement != "pre"
        self.input_norm = norm(there=before)
        self.attention = MIXERS[config.mixer](config, index, ctx, rotary)
        self.post_attention_norm = norm(there=behind)
        self.mlp_norm = norm(there=before)
        self.mlp = MLP(config, ctx) if config.experts.num_experts is None else MoE(config, index, ctx)
        self.post_mlp_norm = norm(there=behind)
        self.adapters: nn.ModuleDict | None = None
        if config.adapted_parts:
            adapt(self, self.mlp, config, ctx)
        self.attention_dropout, self.mlp_dropout = (
            HiddenDropout.of(config, ctx, "layers", index, site) for site in ("after_attention", "after_mlp")
        )

    def forward(self, x: Tensor, microbatch: Microbatch, cache: LayerCache | None = None) -> Tensor:
        values: tuple[Any, ...] = (x,)
        for segment in self.segments(microbatch, cache):
            values = segment.run(*values)
        y: Tensor = values[0]
        return y

    def segments(
        self, microbatch: Microbatch, cache: LayerCache | None = None, message: MakeMessage = Message
    ) -> list[Segment]:
        """The block for one micro-batch. The first segment takes x, those between (x, what the one before made), the
        last returns `(x,)`."""
        attention = self.attention.segments(microbatch, cache, message)
        mlp = self.mlp.segments(microbatch, message)
        if not isinstance(self.mlp, MoE):
            mix, proj = attention[2:4]
            attention[2:4] = [Segment(lambda x: proj.run(mix.run(x)), (*mix.owners, *proj.owners))]
        enter, *attention, attended = attention
        begin, *mlp, made = mlp
        middle, last = ((), ()) if self.adapters is None else (each.children() for each in self.adapters.values())

        def norm(x: Tensor) -> tuple[Any, ...]:
            return x, enter.run(x.to(self.dtype) if self.input_norm is None else self.input_norm(x))

        def add_and_norm(x: Tensor, y: Tensor) -> tuple[Any, ...]:
            x, normed = self.after_attention(x, attended.run(y), microbatch)
            return x, begin.run(normed)

        return [
            Segment(norm, (*present(self.input_norm), *enter.owners)),
            *(part.beside() for part in attention),
            Segment(add_and_norm, (*present(*middle, self.post_attention_norm, self.mlp_norm), *begin.owners)),
            *(part.beside() for part in mlp),
            Segment(lambda x, y: (self.after_mlp(x, made.run(y), microbatch),), present(*last, self.post_mlp_norm)),
        ]

    def after_attention(self, x: Tensor, y: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(x with the attention's result y added, the MLP's input)."""
        if self.adapters is not None:
            y = self.adapters["attention"](y)
        if self.post_attention_norm is not None:
            y = self.post_attention_norm(y)
        y = self.attention_dropout(y, microbatch.sample_ids, microbatch.places, training=self.training)
        attended = torch.add(x, y, alpha=self.branch)
        if self.mlp_norm is None:
            return attended, attended.to(self.dtype)
        return attended, self.mlp_norm(x if self.parallel_residual else attended)

    def after_mlp(self, x: Tensor, y: Tensor, microbatch: Microbatch) -> Tensor:
        """x with the MLP's result y added."""
        if self.adapters is not None:
            y = self.adapters["mlp"](y)
        if self.post_mlp_norm is not None:
            y = self.post_mlp_norm(y)
        y = self.mlp_dropout(y, microbatch.sample_ids, microbatch.places, training=self.training)
        return torch.add(x, y, alpha=self.branch)

    def compile_segments(self, backend: str = "inductor") -> None:
        """`torch.compile` for everything between the linear layers.

        The linear layers themselves stay eager: they compute weight gradients when the schedule says so, add them to
        the main gradients, and hide their messages behind GEMMs (a bias's gradient is one sum, which torch's kernel
        reads 1.2 to 1.9 times as fast on an H100 as a compiled one). So do the messages of experts and what sorts their
        rows, of which another number comes each time.
        """
        register_operator()
        mlp = self.mlp.shared_experts if isinstance(self.mlp, MoE) else self.mlp
        places = (
            *((norm, "forward") for norm in present(self.input_norm)),
            (self.attention, "attend"),
            (self, "after_attention"),
            *([] if mlp is None else [(mlp.fc2, "activation")]),
            # else one addition
            *([(self, "after_mlp")] if self.mlp_dropout.p > 0 or self.post_mlp_norm is not None else []),
        )
        Uncompiled.settle()
        if isinstance(self.mlp, MoE):
            self.mlp.compile_parts(backend)
        for owner, name in places:
            setattr(owner, name, torch.compile(getattr(owner, name), backend=backend))
        if mlp is not None:
            mlp.fc2.keeps_activated = True
