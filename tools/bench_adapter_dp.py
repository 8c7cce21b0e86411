"""megalite's data parallelism for the peer benchmark of data-parallel steps: one function a ZeRO stage.

Each `FUNC(ctx)` builds the model of `ctx["cfg"]` (GPT-2 style: learned positions, biases, tanh-GELU, untied output) and
returns `step()`: forward, backward, reduction over all ranks, fused AdamW on all parameters without weight decay or
clipping. torch.distributed is initialised when it is called.

    b_dp.py --extra zero0=tools.bench_adapter_dp:dp --extra zero1=tools.bench_adapter_dp:zero1 ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megalite.comm import ParallelMesh
from megalite.config import ModelConfig
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn import fill
from megalite.optim import OPTIMIZERS, OptimizerSettings
from megalite.parallel.tensor import LayerContext
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer, ZeroOptions

Step = Callable[[], torch.Tensor]


def dp(ctx: dict[str, Any]) -> Step:
    """Stage 0: everything replicated."""
    return build(ctx, 0)


def zero1(ctx: dict[str, Any]) -> Step:
    """Stage 1: optimizer state sharded."""
    return build(ctx, 1)


def zero2(ctx: dict[str, Any]) -> Step:
    """Stage 2: gradients sharded too."""
    return build(ctx, 2)


def zero3(ctx: dict[str, Any]) -> Step:
    """Stage 3: weights sharded too."""
    return build(ctx, 3)


def model_config(cfg: dict[str, int]) -> ModelConfig:
    """The bench's preset in our terms."""
    return ModelConfig(
        num_layers=cfg["L"],
        hidden_size=cfg["h"],
        num_attention_heads=cfg["heads"],
        seq_length=cfg["s"],
        vocab_size=cfg["V"],
        activation="gelu-tanh",
        untie_embeddings_and_output_weights=True,
    )


def microbatch(x: torch.Tensor, y: torch.Tensor) -> Microbatch:
    """Tokens and labels `[b, s]`, every position counted."""
    b, s = x.shape
    return Microbatch(
        tokens=x,
        labels=y,
        positions=torch.arange(s, device=x.device).expand(b, s),
        loss_mask=torch.ones(b, s, device=x.device),
        sample_ids=torch.arange(b, device=x.device),
        document_ids=None,
    )


def build(ctx: dict[str, Any], stage: int) -> Step:
    """A data-parallel training step at one ZeRO stage."""
    mesh = ParallelMesh.build(rank=ctx["rank"], size=ctx["world"])
    config = model_config(ctx["cfg"])
    layer_context = LayerContext(tp=mesh["tp"], device=ctx["x"].device, deferred=True)
    stack = build_stack(config, layer_specs(config), layer_context)
    buffers = ParameterBuffers(
        [stack.logical_parameters()],
        axes=mesh.family(),
        options=ZeroOptions(stage, overlap_grad_reduce=True, overlap_param_gather=True),
        fill=partial(fill, seed=1),
        device=ctx["x"].device,
        keep_gradients=False,
    )
    buffers.attach(stack.ordered())
    optimizer = ShardedOptimizer(
        [buffers],
        make_optimizer=lambda groups: OPTIMIZERS["adam"](groups, OptimizerSettings()),
        norm_axis=mesh.world,
    )
    batch = microbatch(ctx["x"], ctx["y"])
    factor = 1.0 / (batch.tokens.numel() * mesh.size("dp"))

    def step() -> torch.Tensor:
        buffers.begin_batch(1)
        loss: torch.Tensor = stack(None, batch) * factor
        loss.backward()
        buffers.start_reduce()
        buffers.finish_reduce()
        optimizer.step(lr=ctx["lr"], weight_decay=0.0)
        return loss.detach()

    return step
