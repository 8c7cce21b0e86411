"""Configuration: one schema for flags, YAML files and the saved `config.yaml` (floor 2, no torch).

Picture::

    defaults < family defaults < --config a.yaml < --config b.yaml < flags      (every value knows where it came from)
                                    |
                         parse(argv) -> Config(model, parallel, training, optimizer, data, checkpoint, logging)

Field names are Megatron-LM's flag names with underscores. Sections are frozen; a changed copy is made with
`dataclasses.replace`. Derived numbers are properties, so they can not go stale.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
    "with_vocab_size",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas in a world of `world_size` ranks."""
        return self.parallel.data_parallel_size(world_size)

    def global_batch_size(self, world_size: int) -> int:
        """Samples of a full global batch (after any ramp-up)."""
        return self.training.batch_size(self.data_parallel_size(world_size))

    def num_microbatches(self, world_size: int) -> int:
        """Micro-batches of one replica in a full global batch."""
        return self.training.num_microbatches(self.data_parallel_size(world_size))

    def padded_vocab_size(self) -> int:
        """Rows of the embedding in memory, over all tensor-parallel ranks."""
        return self.model.padded_vocab_size(self.parallel.tensor_model_parallel_size)


def with_vocab_size(config: Config, vocab_size: int) -> Config:
    """Copy `config` with the vocabulary size that the tokenizer gave."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
