"""megalite for the peer benchmarks of one device and of tensor parallelism.

Each function takes the bench's `ctx`, builds its GPT (learned positions, biases; tied for one device, untied for tensor
parallelism) and returns `step()`: forward, backward, clip where the bench clips, fused AdamW on all parameters.

    b_single.py --extra megalite=tools.bench_adapter:single --extra megalite-compile=tools.bench_adapter:single_compiled
    b_tp.py --extra megalite=tools.bench_adapter:tp --extra megalite-sp=tools.bench_adapter:tp_sequence
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megalite.comm import ParallelMesh, share_axis
from megalite.config import ModelConfig
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.optim import OPTIMIZERS, OptimizerSettings
from megalite.parallel.tensor import LayerContext
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer, ZeroOptions

Step = Callable[[], torch.Tensor]


def single(ctx: dict[str, Any]) -> Step:
    """One process, eager."""
    return build(ctx, ParallelMesh.single(), tied=True, weight_decay=0.1, activation="gelu")


def single_compiled(ctx: dict[str, Any]) -> Step:
    """One process, `--compile`."""
    return build(ctx, ParallelMesh.single(), tied=True, weight_decay=0.1, activation="gelu", compiled=True)


def tp(ctx: dict[str, Any]) -> Step:
    """Tensor parallelism over all ranks."""
    return build(ctx, _tensor_mesh(ctx), tied=False, weight_decay=0.01, activation="gelu-tanh")


def tp_sequence(ctx: dict[str, Any]) -> Step:
    """Tensor and sequence parallelism over all ranks."""
    return build(ctx, _tensor_mesh(ctx), tied=False, weight_decay=0.01, activation="gelu-tanh", sequence=True)


def tp_one(ctx: dict[str, Any]) -> Step:
    """The same model on one process: what tensor parallelism is to be compared with."""
    return build(ctx, ParallelMesh.single(), tied=False, weight_decay=0.01, activation="gelu-tanh")


def build(
    ctx: dict[str, Any],
    mesh: ParallelMesh,
    *,
    tied: bool,
    weight_decay: float,
    activation: str,
    sequence: bool = False,
    compiled: bool = False,
) -> Step:
    """The step of one layout; `prec`: fp32, fp32dnn (with oneDNN's products) or bf16 (weights and activations)."""
    cfg, prec, tokens, labels = ctx["cfg"], ctx["prec"], ctx["x"], ctx["y"]
    config = model_config(cfg, tied=tied, activation=activation)
    layers = LayerContext(
        tp=mesh["tp"],
        sequence_parallel=sequence,
        dtype=torch.bfloat16 if prec == "bf16" else torch.float32,
        device=tokens.device,
    )
    stack = build_stack(config, layer_specs(config), layers, init_seed=1)
    if compiled:
        stack.compile_blocks()
    buffers = ParameterBuffers([stack.logical_parameters()], axes=mesh.family(), options=ZeroOptions())
    settings = OptimizerSettings(adam_beta1=0.9, adam_beta2=0.95)
    optimizer = ShardedOptimizer(
        [buffers], make_optimizer=lambda groups: OPTIMIZERS["adam"](groups, settings), norm_axis=mesh["tp"]
    )
    b, s = tokens.shape
    batch = Microbatch(
        tokens, labels, torch.arange(s).expand(b, s), torch.ones(b, s), torch.arange(b)
    ).to(tokens.device)  # fmt: skip
    mean = torch.tensor(1.0 / (b * s), device=tokens.device)
    clip = ctx.get("clip")

    def step() -> torch.Tensor:
        torch.set_float32_matmul_precision("medium" if prec == "fp32dnn" else "highest")
        buffers.begin_batch(1)
        loss = stack(None, batch) * mean
        loss.backward()
        buffers.start_reduce()
        buffers.start_tied_reduce()
        buffers.finish_reduce()
        scale: float | torch.Tensor = 1.0
        if clip is not None:  # stays on the device
            scale = (clip / (optimizer.grad_norm() + 1e-6)).clamp(max=1.0)
        optimizer.step(lr=ctx["lr"], weight_decay=weight_decay, grad_scale=scale)
        return loss.detach()

    return step


def model_config(cfg: dict[str, int], *, tied: bool, activation: str) -> ModelConfig:
    """The bench's preset in our terms."""
    return ModelConfig(
        num_layers=cfg["L"],
        hidden_size=cfg["h"],
        num_attention_heads=cfg["heads"],
        seq_length=cfg["s"],
        vocab_size=cfg["V"],
        activation=activation,
        untie_embeddings_and_output_weights=not tied,
    )


def _tensor_mesh(ctx: dict[str, Any]) -> ParallelMesh:
    mesh = ParallelMesh.build(rank=ctx["rank"], size=ctx["world"], tp=ctx["world"])
    mesh.adopt(share_axis(mesh["tp"]))
    return mesh
