"""What `benchmark_dp.py` compares: one training step of the same GPT by megalite and by torch's own data
parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench_adapter_dp import build, microbatch, model_config
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor import LayerContext

Step = Callable[[], Any]
LR = 1e-4


def build_variant(name: str, cfg: dict[str, int], sequences: int, rank: int, world: int) -> Step:
    """The step of a variant: forward, backward, reduction, fused AdamW."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, cfg["V"], (sequences, cfg["s"] + 1), generator=generator).to(device)
    context = {"cfg": cfg, "x": tokens[:, :-1], "y": tokens[:, 1:], "rank": rank, "world": world, "lr": LR}
    if name.startswith("zero") and name[4:].isdigit():
        return build(context, int(name[4:]))
    if name == "alone":
        return build({**context, "rank": 0, "world": 1}, 0)
    return build_peer(name, context, device)


def build_peer(name: str, context: dict[str, Any], device: torch.device) -> Step:
    """DDP, DDP with ZeroRedundancyOptimizer, or FSDP2 around the same layers."""
    config = model_config(context["cfg"])
    stack = build_stack(config, layer_specs(config), LayerContext(device=device), init_seed=1)
    model: nn.Module = stack
    if name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (context["world"],))
        for layer in stack.ordered():
            fully_shard(layer, mesh=mesh)
        fully_shard(stack, mesh=mesh)
    else:
        static = name == "ddp"
        model = nn.parallel.DistributedDataParallel(stack, static_graph=static, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if name == "zero-redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, weight_decay=0.0, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    batch = microbatch(context["x"], context["y"])
    factor = 1.0 / batch.tokens.numel()  # DDP and FSDP average over ranks themselves

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(None, batch) * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    dist.barrier()
    return step
