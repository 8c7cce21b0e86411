"""megalite for the peer benchmark of pipeline parallelism, and for `benchmark_pipeline.py`.

Each function takes the bench's `ctx` and returns `step()`: all m micro-batches of a batch and one fused AdamW step
(no clipping), cut into stages by the partitioner of megalite itself. An asynchronous schedule runs several batches in a
call without draining between them and says so in `step.batches_per_call`.

    b_pipe.py --extra megalite-2bw=tools.bench_adapter_pipe:two_buffered_weights
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.comm import Channel, ParallelMesh
from megalite.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, Precision, TrainingConfig
from megalite.inventory import stage_layer_ranges
from megalite.microbatch import Microbatch
from megalite.optim import ConstantLossScaler
from megalite.parallel.pipeline import Executor
from megalite.schedule import BatchRange, resolve_chunks
from megalite.train import Hyperparameters, ProgramCache, Updater, build_model


class PipelineBench:
    """One rank of a pipeline over all ranks that trains on the same batch for ever."""

    def __init__(self, ctx: dict[str, Any], schedule: str) -> None:
        self.size = ctx["m"]
        mesh = ParallelMesh.build(rank=ctx["rank"], size=ctx["world"], pp=ctx["world"])
        config = bench_config(ctx, schedule)
        self.program = ProgramCache(config).program(self.size, 1)
        model = build_model(config, mesh, self.program, stage_layer_ranges(config, self.program), ctx["x"].device)
        numbers = Hyperparameters(ctx["lr"], 0.01, 1.0)
        self.updater = Updater(
            model.buffers,
            model.optimizer,
            policy=lambda update: numbers,
            scaler=ConstantLossScaler(),
            shared=model.shared,
            clip_grad=0.0,
            nonfinite="stop",
            max_skipped=50,
            num_slots=model.num_slots,
            version=0,
            update_of=lambda microbatch: microbatch // self.size,
        )
        channel = Channel(mesh.over("pp", apart="down"), mesh.over("pp", apart="up"), model.placement.neighbours)
        self.executor = Executor(mesh.coordinate("pp"), model.stages, model.placement, channel, self.updater)
        self.microbatches = [
            microbatch(x, y) for x, y in zip(ctx["x"].chunk(self.size), ctx["y"].chunk(self.size), strict=True)
        ]
        tokens = ctx["x"].numel()
        self.factor = torch.tensor(1.0 / tokens, device=ctx["x"].device)
        self.batches = ctx.get("batches", 1) if self.program.asynchronous else 1
        self.iteration = 0

    def get(self, number: int) -> tuple[Microbatch, Tensor]:
        """The executor's source."""
        return self.microbatches[number % self.size], self.factor

    def step(self) -> None:
        """`batches` iterations; an asynchronous pipeline stays filled between calls."""
        going_on = self.size if self.program.asynchronous else 0
        for _ in range(self.batches):
            t = self.iteration
            batch = BatchRange(t, t * self.size, self.size, going_on, first=t == 0 or not self.program.asynchronous)
            for action in self.executor.run(self.program.actions_for_batch(self.executor.rank, batch), self):
                self.updater.execute(action)
            self.iteration += 1


def bench_config(ctx: dict[str, Any], schedule: str) -> Config:
    """The bench's GPT: untied, biases, learned positions, tanh GELU."""
    cfg = ctx["cfg"]
    return Config(
        model=ModelConfig(
            num_layers=cfg["L"],
            hidden_size=cfg["h"],
            num_attention_heads=cfg["heads"],
            seq_length=cfg["s"],
            vocab_size=cfg["V"],
            activation="gelu-tanh",
            untie_embeddings_and_output_weights=True,
        ),
        parallel=ParallelConfig(
            pipeline_model_parallel_size=ctx["world"],
            pipeline_schedule=schedule,
            virtual_pipeline_model_parallel_size=resolve_chunks(schedule, None),
        ),
        training=TrainingConfig(
            micro_batch_size=ctx["x"].shape[0] // ctx["m"], precision=Precision(bf16=ctx["prec"] == "bf16")
        ),
        optimizer=OptimizerConfig(lr=ctx["lr"], clip_grad=0.0),
    )


def microbatch(tokens: Tensor, labels: Tensor) -> Microbatch:
    """Tokens and labels `[b, s]` with plain positions, all of which count."""
    device = tokens.device
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    ones = torch.ones(tokens.shape, device=device)
    return Microbatch(tokens, labels, positions, ones, torch.arange(tokens.shape[0], device=device))


def run(ctx: dict[str, Any], schedule: str) -> Callable[[], None]:
    """`step` of one schedule, for the bench."""
    bench = PipelineBench(ctx, schedule)

    def step() -> None:
        bench.step()

    step.batches_per_call = bench.batches  # type: ignore[attr-defined]
    return step


two_buffered_weights = partial(run, schedule="2bw")
one_f_one_b = partial(run, schedule="1f1b")
gpipe = partial(run, schedule="gpipe")
interleaved = partial(run, schedule="interleaved")
zb_h1 = partial(run, schedule="zb-h1")
zb_v = partial(run, schedule="zb-v")
