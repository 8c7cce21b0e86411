"""A trainer that does nothing but stand still to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megalite.comm.mesh import ParallelMesh
from megalite.config import CheckpointConfig, Config, LoggingConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.config.schema import build_section
from megalite.config.training import TrainingLength
from megalite.observe.stats import StepStats


def tiny_config(*, save: str | None = None, **logging: Any) -> Config:
    """h 8, L 2, a 2, s 4, vocabulary 10 padded to 16, global batch 3."""
    return Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            seq_length=4,
            vocab_size=10,
            make_vocab_size_divisible_by=16,
        ),
        training=TrainingConfig(micro_batch_size=3, length=TrainingLength(train_iters=100)),
        optimizer=OptimizerConfig(lr=1e-3),
        checkpoint=CheckpointConfig(save=save),
        logging=build_section(LoggingConfig, logging),
    )


@contextmanager
def timed_by(clock: Callable[[], float]) -> Iterator[None]:
    """Within, observers read the time from `clock`."""
    fake = SimpleNamespace(perf_counter=clock, monotonic=clock)
    with ExitStack() as stack:
        for module in ("hooks", "stats", "observers"):
            stack.enter_context(mock.patch(f"megalite.observe.{module}.time", fake))
        yield


@dataclass
class FakeTrainer:
    """The smallest `TrainerView`; `step` moves it on."""

    config: Config
    mesh: ParallelMesh = field(default_factory=ParallelMesh.single)
    device: torch.device = torch.device("cpu")
    iteration: int = 0
    train_iters: int = 100
    consumed_samples: int = 0

    @property
    def consumed_tokens(self) -> int:
        return self.consumed_samples * self.config.model.seq_length

    def step(self, **changes: Any) -> StepStats:
        """Count one iteration of 3 samples and half a second."""
        self.iteration += 1
        self.consumed_samples += 3
        stats = StepStats(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            global_batch_size=3,
            seq_length=self.config.model.seq_length,
            lm_loss=torch.tensor(2.0),
            grad_norm=1.5,
            learning_rate=1e-3,
            iteration_time_s=0.5,
        )
        return replace(stats, **changes)
