"""Megatron-LM's `torch` checkpoints, written file by file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import TRACKER, fsync_directory
from megalite.convert.hf_tokenizer import write_tokenizer
from megalite.convert.megatron_args import check_cut, write_args
from megalite.convert.megatron_files import EMBEDDING, FILES, RELEASE, VERSION
from megalite.convert.megatron_names import COPY, CORE, is_expert, name_of, rule_of, stateful_layers, written_experts
from megalite.convert.source import ModelSource, converted, staged, stored_shapes

# Dictionaries in dictionaries before megatron.core, whose own names have dots in them.
NESTED = (
    "language_model.embedding.word_embeddings.",
    "language_model.embedding.position_embeddings.",
    "language_model.encoder.",
    "language_model.output_layer.",
    "word_embeddings_for_head.",
)

# Arguments that Megatron-LM's loader reads besides the model's.
RUN_ARGS: Mapping[str, Any] = {
    "consumed_train_samples": 0,
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
    "iteration": 0,
    "no_save_optim": True,
    "no_save_rng": True,
    "sequence_parallel": False,
    "data_parallel_random_init": False,
    "bert_binary_head": False,
    "tokenizer_type": None,
    "ckpt_format": "torch",
    "use_dist_ckpt": False,
}


def write_megatron(
    source: ModelSource,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    implementation: str = "transformer_engine",
) -> Path:
    """A `release` checkpoint that Megatron-LM loads with these sizes; returns its directory.

    dtype: of the stored weights; None keeps each as it is. expert_tensor_parallel: 1, or tensor_parallel (None).
    implementation: whose names they get (IMPLEMENTATIONS).
    Raises ConfigError where Megatron-LM has no such model or cannot cut it so, CheckpointError where it cannot be
    written. Memory: one file.
    """
    model = source.model
    within = tensor_parallel if expert_tensor_parallel is None else expert_tensor_parallel
    check_cut(model, tensor_parallel, pipeline_parallel, expert_parallel, within)
    args = write_args(model, implementation)
    args |= {
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": within,
        "padded_vocab_size": model.padded_vocab_size(tensor_parallel),
        **RUN_ARGS,
    }
    with staged(directory, model=model, dtype=dtype) as staging:
        for stage, rank, expert in product(range(pipeline_parallel), range(tensor_parallel), range(expert_parallel)):
            file = _RankFile(
                implementation, (stage, pipeline_parallel), (rank, tensor_parallel), (expert, expert_parallel),
                (rank % within, within),
            )  # fmt: skip
            (staging / RELEASE / file.name).mkdir(parents=True)
            stored = {n: None if t is None else converted(n, t, dtype) for n, t in file.weights(source)}
            _write_file(staging / RELEASE / file.name / FILES[0], stored, args, implementation)
        (staging / TRACKER).write_text(RELEASE)
        write_tokenizer(source.tokenizer, staging)
        fsync_directory(staging / RELEASE)
    return directory


@dataclass(frozen=True)
class _RankFile:
    """One file: which rank of each kind it belongs to, and how many there are: (number, how many)."""

    implementation: str
    stage: tuple[int, int]
    tensor: tuple[int, int]
    expert: tuple[int, int]
    within: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of the directory, as by Megatron-LM's `get_checkpoint_name`."""
        parts = [f"_{number:03d}" for number, size in (self.stage, self.expert) if size > 1]
        return f"mp_rank_{self.tensor[0]:02d}{''.join(parts)}"

    def weights(self, source: ModelSource) -> Iterator[tuple[str, Tensor | None]]:
        """Names and values; each with memory of its own: torch.save stores the whole of what a tensor is a view of."""
        model, (number, stages) = source.model, self.stage
        layers, sparse = model.num_layers // stages, model.sparse_layers
        last, first = number == stages - 1, number == 0
        for ours in stored_shapes(model):
            index = int(ours.split(".")[1]) if ours.startswith("layers.") else None
            here = (
                index // layers == number if index is not None else (first if ours.startswith("embedding.") else last)
            )
            if not here:
                continue
            layer = (index or 0) % layers
            if is_expert(ours):
                values, how = source.read(ours), (self.implementation, layer, self.expert, self.within)
                yield from ((name, _own(part)) for name, part in written_experts(model, ours, values, *how))
                continue
            name = name_of(ours, self.implementation, layer, sparse=index is not None and sparse[index])
            yield name, self._part(source, ours)
        if last and not first and not model.untie_embeddings_and_output_weights:
            yield COPY["legacy" if self.implementation == "legacy" else "local"], self._part(source, EMBEDDING)
        if self.implementation == "transformer_engine":
            for layer in range(layers):
                before = CORE.replace("{i}", str(layer))
                for name in stateful_layers(model, sparse=sparse[number * layers + layer]):
                    yield f"{before}{name}._extra_state", None

    def _part(self, source: ModelSource, ours: str) -> Tensor:
        rank, ranks = self.tensor
        return _own(rule_of(ours)[0].cut.to_theirs(source.model, source.read(ours), ranks)[rank])


def _own(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format)


def _write_file(path: Path, stored: Mapping[str, Tensor | None], args: Mapping[str, Any], implementation: str) -> None:
    dtype = next(values.dtype for values in stored.values() if values is not None)
    write_common(path, args, dtype, model=_nested(stored) if implementation == "legacy" else dict(stored))


def write_common(path: Path, args: Mapping[str, Any], dtype: torch.dtype, **more: Any) -> None:
    """A file of torch.save with the settings of a `release`, and `more`. dtype: of the weights. Raises OSError."""
    named = argparse.Namespace(**args, params_dtype=dtype, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16)
    content = {"args": named, "checkpoint_version": VERSION, "iteration": 0, **more}
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # on a full disk its message is about a count of its own
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(path.parent)


def _nested(stored: Mapping[str, Tensor | None]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, values in stored.items():
        prefix = next(prefix for prefix in NESTED if name.startswith(prefix))
        inner = tree
        for key in prefix.rstrip(".").split("."):
            inner = inner.setdefault(key, {})
        inner[name.removeprefix(prefix)] = values
    return tree
