"""A training step of megalite at any layout, on one batch, repeated: what the benchmarks time.

It is put together from the rooms that a run is put together from, without data, hooks and checkpoints: program, stages,
optimizer, executor. A step is one iteration: all micro-batches forward and backward, reduction, clipping where it is
asked for, and the update.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.turns import Place, Variant
from megalite.comm import ParallelMesh, open_channel, share_axis
from megalite.config import (
    Config,
    ContextParallelism,
    DeviceOptions,
    Float8,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    StageLayout,
    TrainingConfig,
)
from megalite.engine import Hyperparameters, Updater
from megalite.inventory import given_plan
from megalite.microbatch import Microbatch
from megalite.optim import LossScaler
from megalite.parallel.context import SequenceCut
from megalite.parallel.pipeline import executor_of
from megalite.schedule import BatchRange, resolve_chunks
from megalite.train import PlannedRun, ProgramCache, build_model


@dataclass(frozen=True)
class Layout:
    """tp, cp, pp: sizes; what they leave of the ranks is data-parallel. batches: in a call of an asynchronous one.
    stages: (tp, dp) of each, where they differ. cut: as `pipeline_model_parallel_layout`. graphs: blocks by CUDA
    graphs."""

    tp: int = 1
    cp: int = 1
    cp_comm_type: str = "p2p"
    pp: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    schedule: str = "1f1b"
    num_microbatches: int = 1
    batches: int = 1
    bf16: bool = False
    compile: bool = False
    graphs: bool = False
    fp8: str | None = None  # a recipe
    stages: tuple[tuple[int, int], ...] = ()
    cut: str | None = None


def tiny_model(layers: int) -> ModelConfig:
    """A model whose computation takes no time beside what is waited for."""
    return ModelConfig(
        num_layers=layers, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=64,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Update:
    """The optimizer's numbers; clip_grad 0: no clipping."""

    lr: float = 1e-4
    weight_decay: float = 0.0
    clip_grad: float = 0.0
    optimizer: str = "adam"


class TrainingStep:
    """One rank of a training on the batch `tokens`, `labels` `[b, s]`, of which data-parallel ranks give their own."""

    def __init__(
        self, model: ModelConfig, layout: Layout, update: Update, place: Place, tokens: Tensor, labels: Tensor
    ) -> None:
        self.size, device = layout.num_microbatches, tokens.device
        config = config_of(model, layout, update, tokens.shape[0] // self.size)
        given = config.parallel.context
        sizes: dict[str, Any] = {"tp": layout.tp, "cp": layout.cp, "cp_heads": given.traders, "pp": layout.pp}
        if layout.stages:
            sizes = {"stages": layout.stages}
        mesh = ParallelMesh.build(rank=place.rank, size=place.ranks, **sizes)
        if device.type == "cpu":
            mesh.adopt(share_axis(mesh["tp"]))
        self.program = ProgramCache(config).program(self.size, 1)
        planned = PlannedRun.before(
            config, place.ranks, self.program, given_plan(config), None, on_cpu=device.type == "cpu"
        )
        with weights_drawn_on(device):
            built = build_model(config, planned, mesh, device)
        numbers = Hyperparameters(update.lr, update.weight_decay, update.clip_grad, 1.0, iteration=1, samples=0)
        self.updater = Updater(
            built,
            policy=lambda update: numbers,
            count_iteration=lambda samples, skipped: None,
            late=device.type == "cuda",
            scaler=LossScaler(),
            nonfinite="stop",
            max_skipped=50,
            version=0,
            update_of=lambda microbatch: microbatch // self.size,
        )
        channel = open_channel(mesh, built.placement.neighbours, split=layout.sequence_parallel)
        self.executor = executor_of(self.program, mesh, built.stages, built.placement, channel, self.updater)
        cut = SequenceCut(mesh.coordinate("cp"), layout.cp, given.ring)
        self.microbatches = [
            cut(microbatch(x, y)) for x, y in zip(tokens.chunk(self.size), labels.chunk(self.size), strict=True)
        ]
        self.factor = torch.tensor(1.0 / (tokens.numel() * mesh.size("stream")), device=device)
        self.batches = layout.batches if self.program.asynchronous else 1
        self.iteration = 0

    def get(self, number: int) -> tuple[Microbatch, Tensor]:
        """The executor's source."""
        return self.microbatches[number % self.size], self.factor

    def step(self) -> list[Tensor]:
        """`batches` iterations, an asynchronous pipeline stays filled between calls; losses of the last stage."""
        next_size = self.size if self.program.asynchronous else 0
        for _ in range(self.batches):
            t = self.iteration
            batch = BatchRange(t, t * self.size, self.size, next_size, first=t == 0 or not self.program.asynchronous)
            for action in self.executor.run(self.program.actions_for_batch(self.executor.rank, batch), self):
                self.updater.execute(action)
            self.updater.take_results()
            self.iteration += 1
        return list(self.executor.take_losses().values())

    def variant(self) -> Variant:
        """For the harness."""
        return Variant(self.step, divide_by=self.batches)


def weights_drawn_on(device: torch.device) -> AbstractContextManager[Any]:
    """Initial weights of a GPU come from its own generator, since no time depends on their values and the host's would
    take longer than all that is measured."""

    def draw(*place: Any, std: float, seed: int, out: Tensor) -> None:
        out.normal_(0.0, std)

    return nullcontext() if device.type == "cpu" else mock.patch("megalite.nn.init.logical_normal", draw)


def config_of(model: ModelConfig, layout: Layout, update: Update, micro_batch_size: int) -> Config:
    """The run that a layout is."""
    return Config(
        model=model,
        parallel=ParallelConfig(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context=ContextParallelism(context_parallel_size=layout.cp, cp_comm_type=layout.cp_comm_type),
            sequence_parallel=layout.sequence_parallel,
            zero_stage=layout.zero_stage,
            pipeline_schedule=layout.schedule,
            stage_meshes=",".join(f"{tp}x{dp}" for tp, dp in layout.stages) or None,
            stage_layout=StageLayout(pipeline_model_parallel_layout=layout.cut),
            virtual_pipeline_model_parallel_size=resolve_chunks(layout.schedule, None),
            hardware=DeviceOptions(cuda_graph_impl="local" if layout.graphs else "none"),
        ),
        training=TrainingConfig(
            micro_batch_size=micro_batch_size,
            precision=Precision(bf16=layout.bf16),
            compile=layout.compile,
            float8=Float8(fp8_format="hybrid", fp8_recipe=layout.fp8) if layout.fp8 else Float8(),
        ),
        optimizer=OptimizerConfig(lr=update.lr, clip_grad=update.clip_grad, optimizer=update.optimizer),
    )


def microbatch(tokens: Tensor, labels: Tensor) -> Microbatch:
    """Tokens and labels `[b, s]` with plain positions, all of which count."""
    device = tokens.device
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    ones = torch.ones(tokens.shape, device=device)
    return Microbatch(tokens, labels, positions, ones, torch.arange(tokens.shape[0], device=device))
