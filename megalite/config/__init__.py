"""Configuration: one schema for flags, YAML files and the saved `config.yaml` (floor 2, no torch).

Picture::

    defaults < family defaults < --config a.yaml < --config b.yaml < flags      (every value knows where it came from)
                                    |
                         parse(argv) -> Config(model, parallel, training, optimizer, data, checkpoint, logging)

Field names are Megatron-LM's flag names with underscores. Sections are frozen; a changed copy is made with
`dataclasses.replace`. Derived numbers are properties, so they can not go stale.
"""

from __future__ import annotations

from megalite.config.batch_size import BatchSizeSchedule
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.cli import Parsed, parse, parse_with_origins
from megalite.config.data import DataConfig
from megalite.config.legal import problems, warnings
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.root import Config, with_vocab_size
from megalite.config.saved import dump_yaml, from_dict, load_yaml, to_dict
from megalite.config.training import TrainingConfig

__all__ = [
    "BatchSizeSchedule",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Parsed",
    "TrainingConfig",
    "dump_yaml",
    "from_dict",
    "load_yaml",
    "parse",
    "parse_with_origins",
    "problems",
    "to_dict",
    "warnings",
    "with_vocab_size",
]
