"""The whole configuration: seven sections and the numbers that need more than one of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from megalite.config.batch_size import BatchSizeSchedule, LengthSchedule
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.schema import Option, flat, options_of
from megalite.config.staleness import Correction, completed, has_delay
from megalite.config.training import BatchRamp, TrainingConfig
from megalite.schedule import find_schedule

SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @functools.cached_property
    def given(self) -> Mapping[str, Any]:
        """Flag -> value, of those that are not their defaults; without required ones."""
        values = {name: value for section in SECTIONS for name, value in flat(getattr(self, section)).items()}
        return {name: values[name] for name, default in _defaults().items() if values[name] != default}

    def data_parallel_size(self, world_size: int) -> int:
        return self.parallel.data_parallel_size(world_size)

    def microbatches_together(self, world_size: int) -> int:
        """Micro-batches of an update where a schedule makes one after every micro-batch: one of each replica, or a
        round of them where replicas take turns."""
        return self.data_parallel_size(world_size) * lcm(*self.parallel.workers)

    def of_stage(self, stage: int, world_size: int) -> tuple[Config, int]:
        """(The run in which all stages are as this one is, its number of ranks); the run itself where they are."""
        meshes = self.parallel.meshes
        if not meshes:
            return self, world_size
        alike = dataclasses.replace(self.parallel, stage_meshes=None, tensor_model_parallel_size=meshes[stage].tp)
        return dataclasses.replace(self, parallel=alike), len(meshes) * meshes[stage].size

    def gradient_ranks(self, world_size: int) -> int:
        """Ranks that hold the same dense parameters and whose gradients are summed: data x context parallel."""
        return self.data_parallel_size(world_size) * self.parallel.context.context_parallel_size

    def expert_copies(self, world_size: int) -> int:
        """Ranks that hold the same experts and whose gradients are summed (edp)."""
        parallel = self.parallel
        cut = parallel.expert_tensor_size * parallel.experts.expert_model_parallel_size
        return world_size // parallel.pipeline_model_parallel_size // cut

    def batch_size_schedule(self, world_size: int) -> BatchSizeSchedule:
        """Global batch size by samples consumed. ValueError for malformed ramp-up flags (validation reports them)."""
        training = self.training
        full = training.batch_size(self.data_parallel_size(world_size))
        return training.batch_ramp.sizes(full, self.model.seq_length)

    def global_batch_size(self, world_size: int) -> int:
        """Samples of a full global batch (after any ramp-up)."""
        return self.batch_size_schedule(world_size).final

    def num_microbatches(self, world_size: int) -> int:
        """Micro-batches of one replica in a full global batch."""
        samples_at_once = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return self.global_batch_size(world_size) // samples_at_once

    def train_iterations(self, world_size: int) -> int:
        """Length of the whole training in iterations, whichever unit it was given in (0 with `skip_train` alone)."""
        sizes = self.batch_size_schedule(world_size)
        return self.training.length.iterations(sizes, self.model.seq_length)

    def total_train_samples(self, world_size: int) -> int:
        """Samples that all training iterations together consume."""
        return self.batch_size_schedule(world_size).samples_after(self.train_iterations(world_size))

    @property
    def gathers_float8(self) -> bool:
        """Whether weights that are multiplied in float8 are rounded before they are gathered."""
        return self.training.float8.fp8_param_gather and self.parallel.zero_stage == 3

    @property
    def keeps_float8(self) -> bool:
        """Whether weights stay in float8 beside their own dtype until an update changes them: not where they come and
        go."""
        permanent = self.parallel.zero_stage < 3 and self.optimizer.offload.param_offload != "cpu"
        return self.training.float8.fp8_format is not None and permanent

    @property
    def length_schedule(self) -> LengthSchedule:
        """Tokens of a sequence by samples consumed. ValueError for a malformed flag (validation reports it)."""
        text, longest = self.training.seq_length_schedule, self.model.seq_length
        return LengthSchedule.constant(longest) if text is None else LengthSchedule.parse(text, longest)

    def phases(self, world_size: int) -> list[tuple[int, int]]:
        """(Length of sequences, iterations with it), one after the other, as far as the training goes."""
        if self.training.seq_length_schedule is None:
            return [(self.model.seq_length, self.train_iterations(world_size))]
        sizes, steps = self.batch_size_schedule(world_size), self.length_schedule.steps
        ends = [sizes.iterations_for(first) for first, _ in steps[1:]]
        total, begin, found = self.train_iterations(world_size), 0, []
        for (_, length), end in zip(steps, [*ends, total], strict=True):
            if min(end, total) > begin:
                found.append((length, min(end, total) - begin))
            begin = max(begin, min(end, total))
        return found or [(self.model.seq_length, 0)]

    def at_length(self, length: int) -> Config:
        """The run as it is while sequences are `length` tokens long: as many tokens in more of them."""
        pieces, training = self.model.seq_length // length, self.training
        if pieces == 1 and training.seq_length_schedule is None:
            return self
        size = training.global_batch_size
        if training.batch_ramp.step_batch_size_schedule is not None:
            size = training.batch_ramp.sizes(0, self.model.seq_length).final
        total = training.length.train_samples
        changed = dataclasses.replace(
            training,
            micro_batch_size=training.micro_batch_size * pieces,
            global_batch_size=None if size is None else size * pieces,
            batch_ramp=BatchRamp(),
            seq_length_schedule=None,
            length=dataclasses.replace(training.length, train_samples=None if total is None else total * pieces),
        )
        model = dataclasses.replace(self.model, seq_length=length, max_position_embeddings=self.model.max_positions)
        return dataclasses.replace(self, model=model, training=changed)

    @property
    def embedding_rows(self) -> int:
        """Rows of the word embedding on a rank of the first stage, with padding; 0 while the vocabulary is unknown."""
        return self.padded_vocab_size() // self.parallel.tensor_model_parallel_size if self.model.vocab_size else 0

    @property
    def rows_at_once(self) -> int:
        """The most of them that one micro-batch can use on a rank: one for each of its tokens."""
        tokens = self.training.micro_batch_size * self.model.seq_length
        tokens //= self.parallel.context.context_parallel_size
        return min(tokens, self.embedding_rows or tokens)

    @property
    def cached_rows(self) -> int:
        """Those of the cache of `--embedding-offload`."""
        given = self.optimizer.offload
        wanted = given.embedding_cache_rows or (given.embedding_lookahead + 1) * self.rows_at_once
        return min(wanted, self.embedding_rows or wanted)

    @property
    def staleness(self) -> Correction:
        """What is done about delayed gradients, the defaults filled in."""
        each = find_schedule(self.parallel.schedule).update_per_microbatch
        return completed(self.optimizer, each_microbatch=each) if has_delay(self) else Correction()

    def padded_vocab_size(self) -> int:
        """Rows of the embedding in memory, over all tensor-parallel ranks."""
        return self.model.padded_vocab_size(self.parallel.tensor_model_parallel_size)


def with_vocab_size(config: Config, vocab_size: int) -> Config:
    """Copy `config` with the vocabulary size that the tokenizer gave."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


@functools.cache
def _defaults() -> Mapping[str, Any]:
    return {name: option.default for name, option in all_options().items() if not option.required}


@functools.cache
def all_options() -> Mapping[str, Option]:
    """Every flag of every section by name, in the order of the documentation."""
    options: dict[str, Option] = {}
    for section, cls in SECTIONS.items():
        for option in options_of(section, cls):
            assert option.name not in options, f"{option.name} is in two sections"
            options[option.name] = option
    return options
