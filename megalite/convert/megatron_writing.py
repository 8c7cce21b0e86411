"""Megatron-LM's `torch` checkpoints, written file by file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import TRACKER, fsync_directory
from megalite.convert.hf_tokenizer import write_tokenizer
from megalite.convert.megatron_args import check_cut, write_args
from megalite.convert.megatron_files import EMBEDDING, FILES, RELEASE, VERSION
from megalite.convert.megatron_names import COPY, CORE, cut_of, is_expert, name_of, stateful_layers, written_experts
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
            # the name of the directory is as by Megatron-LM's `get_checkpoint_name`
            numbers = [f"_{n:03d}" for n, size in ((stage, pipeline_parallel), (expert, expert_parallel)) if size > 1]
            folder = staging / RELEASE / f"mp_rank_{rank:02d}{''.join(numbers)}"
            folder.mkdir(parents=True)
            weights = _weights(
                source, implementation, (stage, pipeline_parallel), (rank, tensor_parallel), (expert, expert_parallel),
                (rank % within, within),
            )  # fmt: skip
            stored = {name: None if values is None else converted(name, values, dtype) for name, values in weights}
            first = next(values.dtype for values in stored.values() if values is not None)
            written = _nested(stored) if implementation == "legacy" else stored
            write_common(folder / FILES[0], args, first, model=written)
        (staging / TRACKER).write_text(RELEASE)
        write_tokenizer(source.tokenizer, staging)
        fsync_directory(staging / RELEASE)
    return directory


def _weights(
    source: ModelSource, implementation: str, stage: tuple[int, int], tensor: tuple[int, int], expert: tuple[int, int],
    within: tuple[int, int],
) -> Iterator[tuple[str, Tensor | None]]:  # fmt: skip
    """Names and values in the file of a rank of each kind (number, how many); each with memory of its own: torch.save
    stores the whole of what a tensor is a view of."""
    model, layers = source.model, source.model.num_layers // stage[1]
    last, first, sparse = stage[0] == stage[1] - 1, stage[0] == 0, model.sparse_layers

    def part(ours: str) -> Tensor:
        return _own(cut_of(ours).to_theirs(model, source.read(ours), tensor[1])[tensor[0]])

    for ours in stored_shapes(model):
        index = int(ours.split(".")[1]) if ours.startswith("layers.") else None
        here = first if ours.startswith("embedding.") else last
        if not (here if index is None else index // layers == stage[0]):
            continue
        layer = (index or 0) % layers
        if is_expert(ours):
            values = written_experts(model, ours, source.read(ours), implementation, layer, expert, within)
            yield from ((name, _own(value)) for name, value in values)
            continue
        yield name_of(ours, implementation, layer, sparse=index is not None and sparse[index]), part(ours)
    if last and not first and not model.untie_embeddings_and_output_weights:
        yield COPY["legacy" if implementation == "legacy" else "local"], part(EMBEDDING)
    if implementation == "transformer_engine":
        for layer in range(layers):
            before = CORE.replace("{i}", str(layer))
            for name in stateful_layers(model, sparse=sparse[stage[0] * layers + layer]):
                yield f"{before}{name}._extra_state", None


def _own(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format)


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
