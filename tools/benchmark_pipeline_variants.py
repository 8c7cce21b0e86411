"""What `benchmark_pipeline.py` compares: one training step of the same GPT by megalite's schedules, by those of
torch.distributed.pipelining, and without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench_adapter_pipe import run as run_megalite

Step = Callable[[], Any]
LR = 1e-4
CHUNKS_A_RANK = {"interleaved": 2, "zb-v": 2}


@dataclass(frozen=True)
class Setting:
    """cfg: L layers, h hidden, heads, s tokens, V symbols. batches: of one sample of an asynchronous schedule."""

    cfg: dict[str, int]
    num_microbatches: int
    batch_size: int
    rank: int
    world: int
    batches: int

    @property
    def device(self) -> torch.device:
        cuda = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels `[b, s]`."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.cfg["V"], (self.batch_size, self.cfg["s"] + 1), generator=generator)
        tokens = tokens.to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build_variant(name: str, setting: Setting) -> Step:
    """The step of a variant: all micro-batches forward and backward, and fused AdamW."""
    if name == "ideal":
        return without_pipeline(setting)
    if name.startswith("torch-"):
        return torch_pipeline(name.removeprefix("torch-"), setting)
    x, y = setting.batch()
    ctx = {"cfg": setting.cfg, "x": x, "y": y, "m": setting.num_microbatches, "rank": setting.rank}
    ctx |= {"world": setting.world, "lr": LR, "prec": "fp32", "batches": setting.batches}
    return run_megalite(ctx, name)


class PlainBlock(nn.Module):
    """A transformer block in plain PyTorch (pre-norm, GELU, biases)."""

    def __init__(self, cfg: dict[str, int]) -> None:
        super().__init__()
        h, self.heads = cfg["h"], cfg["heads"]
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class PlainEmbedding(nn.Module):
    """Tokens `[b, s]` -> `[b, s, h]`, with learned positions."""

    def __init__(self, cfg: dict[str, int]) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(cfg["V"], cfg["h"]), nn.Embedding(cfg["s"], cfg["h"])

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.positions.weight


def plain_stage(cfg: dict[str, int], stage: int, stages: int, device: torch.device) -> nn.Sequential:
    """Stage `stage` of `stages` equal ones."""
    layers: list[nn.Module] = [PlainEmbedding(cfg)] if stage == 0 else []
    layers += [PlainBlock(cfg) for _ in range(cfg["L"] // stages)]
    if stage == stages - 1:
        layers += [nn.LayerNorm(cfg["h"]), nn.Linear(cfg["h"], cfg["V"], bias=False)]
    return nn.Sequential(*layers).to(device)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def without_pipeline(setting: Setting) -> Step:
    """The whole model here, micro-batch after micro-batch."""
    model = plain_stage(setting.cfg, 0, 1, setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    x, y = setting.batch()
    m = setting.num_microbatches

    def step() -> None:
        for tokens, labels in zip(x.chunk(m), y.chunk(m), strict=True):
            (loss_of(model(tokens), labels) / m).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_pipeline(name: str, setting: Setting) -> Step:
    """A schedule of torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, schedules

    chunks, world, rank = CHUNKS_A_RANK.get(name, 1), setting.world, setting.rank
    numbers = [rank, 2 * world - 1 - rank] if name == "zb-v" else [rank + world * chunk for chunk in range(chunks)]
    modules = [plain_stage(setting.cfg, number, world * chunks, setting.device) for number in numbers]
    stages = [
        PipelineStage(module, number, world * chunks, setting.device)
        for module, number in zip(modules, numbers, strict=True)
    ]
    kinds: dict[str, Any] = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb-v": schedules.ScheduleZBVZeroBubble,
    }
    schedule = kinds[name](stages if chunks > 1 else stages[0], setting.num_microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=LR, fused=True)
    x, y = setting.batch()
    is_first, is_last = 0 in numbers, world * chunks - 1 in numbers

    def step() -> None:
        schedule.step(*([x] if is_first else []), **({"target": y, "losses": []} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step
