"""Megatron-LM's checkpoints, written: `torch` file by file, `torch_dist` by torch's own writer, one layer in memory.

In `torch_dist` layers that are all the same lie on top of one another, one rectangle a layer; mixed ones each under its
own name. Whole tensors know no layout: Megatron-LM loads them at any. What they are called: `megatron_dist.py`.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import TRACKER, directory_name, fsync_directory
from megalite.config import ModelConfig
from megalite.convert.dcp_files import STATE, Rectangle
from megalite.convert.hf_tokenizer import write_tokenizer
from megalite.convert.megatron_args import cut_problems, write_args
from megalite.convert.megatron_dist import COMMON
from megalite.convert.megatron_files import EMBEDDING, FILES, RELEASE, VERSION
from megalite.convert.megatron_names import COPY, CORE, cut_of, is_expert, name_of, stateful_layers, written_experts
from megalite.convert.megatron_state import KINDS, KeptState
from megalite.convert.source import ModelSource, converted, staged, stored_shapes
from megalite.errors import CheckpointError, ConfigError
from megalite.inventory import parameter_shapes

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
BACKEND = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
BACKEND += '"common_backend_version": 1}'


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
    if problems := [*cut_problems(model, tensor_parallel, pipeline_parallel, expert_parallel, within)]:
        raise ConfigError(problems)
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


def write_torch_dist(
    source: ModelSource,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    implementation: str = "transformer_engine",
    run: KeptState | None = None,
) -> Path:
    """A checkpoint that Megatron-LM loads at any layout; returns its directory.

    dtype: of the stored weights; None keeps each as it is, or as the run computed with it. implementation: of
    Megatron's layers, transformer_engine or local; where a block has experts its norm is called otherwise. run: what
    has trained the weights, to be continued there; None: the weights alone, a `release`. Raises ConfigError where
    Megatron-LM has no such model, CheckpointError where it cannot be written.
    """
    from megalite.convert.dcp_writing import write_rectangles  # with it comes torch.distributed.checkpoint

    model = source.model
    args = write_args(model, implementation)
    args |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "padded_vocab_size": model.padded_vocab_size(1),
        **RUN_ARGS,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        **({} if run is None else run.args),
    }
    if all(model.sparse_layers):
        args["moe_layer_freq"] = 1  # a list would say that they are mixed
    dtype = run.dtype if run is not None and dtype is None else dtype
    name = RELEASE if run is None else directory_name(run.iteration)
    with staged(directory, model=model, dtype=dtype) as staging:
        folder = staging / name
        folder.mkdir()
        parts = list(rectangles(model, lambda ours: converted(ours, source.read(ours), dtype), implementation))
        if run is not None:
            for kind in KINDS:
                parts += rectangles(model, partial(run.read, kind), implementation, f"{STATE}{kind}.")
        write_rectangles(folder, parts, dict.fromkeys(_empty_objects(model), [None]))
        write_common(folder / COMMON, args, parts[0].dtype, **({} if run is None else run.common))
        (folder / "metadata.json").write_text(BACKEND)
        (staging / TRACKER).write_text(RELEASE if run is None else str(run.iteration))
        write_tokenizer(source.tokenizer, staging)
        fsync_directory(folder)
    return directory


def rectangles(
    model: ModelConfig, read: Callable[[str], Tensor], implementation: str, prefix: str = ""
) -> Iterator[Rectangle]:
    """The tensors of a model, layer by layer. read: gives that of a logical name. prefix: of their names there; of the
    weights it is empty."""
    sparse, layers = model.sparse_layers, model.num_layers
    mixed = len(set(sparse)) > 1
    dtypes: dict[str, torch.dtype] = {}
    for ours, shape in (parameter_shapes(model) if prefix else stored_shapes(model)).items():
        index = int(ours.split(".")[1]) if ours.startswith("layers.") else None
        name = prefix + _name(ours, index, implementation, sparse=index is not None and sparse[index])
        if index is not None and not mixed:
            name = name.replace(CORE.replace("{i}", str(index)), CORE.replace("{i}.", ""))
        if name not in dtypes:
            dtypes[name] = read(ours).dtype
        chunk = tuple(theirs(model, ours, torch.empty(shape, device="meta")).shape)
        whole, offset = chunk, (0,) * len(chunk)
        if index is not None and not mixed:
            whole, offset, chunk = (layers, *chunk), (index, *offset), (1, *chunk)
        values = partial(_values, model, read, ours, dtypes[name])
        yield Rectangle(name, whole, offset, chunk, dtypes[name], values)


def _values(model: ModelConfig, read: Callable[[str], Tensor], ours: str, expected: torch.dtype) -> Tensor:
    values = read(ours)
    if values.dtype != expected:
        what = f"{values.dtype}, in another layer {expected}: one tensor there; give `dtype`"
        raise CheckpointError(f"{ours}: {what}")
    return theirs(model, ours, values)


def theirs(model: ModelConfig, ours: str, values: Tensor) -> Tensor:
    """A logical tensor as one rank of Megatron's has it."""
    cut = cut_of(ours).to_theirs
    return torch.stack([cut(model, e, 1)[0] for e in values]) if is_expert(ours) else cut(model, values, 1)[0]


def _name(ours: str, index: int | None, implementation: str, *, sparse: bool) -> str:
    if is_expert(ours):
        part, kind = ours.rsplit(".", 2)[1:]
        return f"{CORE.replace('{i}', str(index))}mlp.experts.experts.linear_{part}.{kind}"
    # Layers of torch's lie under the names of Transformer Engine's, even the norm that is in no linear layer.
    return name_of(ours, "transformer_engine", index or 0, sparse=sparse and implementation == "transformer_engine")


def _empty_objects(model: ModelConfig) -> Iterator[str]:
    """Names of what Transformer Engine's layers look for, with nothing in it: by layer, by layer and expert."""
    mixed, experts = len(set(model.sparse_layers)) > 1, model.experts.num_experts or 1
    for index, sparse in enumerate(model.sparse_layers):
        before = CORE.replace("{i}", str(index)) if mixed else CORE.replace("{i}.", "")
        at, of = ("", "") if mixed else (f"{index}.", f"{model.num_layers}.")
        for name in stateful_layers(model, sparse=sparse):
            inside = name.replace("mlp.experts.", "mlp.experts.experts.")
            if inside == name:
                yield f"{before}{name}._extra_state/shard_{at[:-1] or '0'}_{of[:-1] or '1'}"
                continue
            for expert in range(experts):
                yield f"{before}{inside}._extra_state/shard_{at}{expert}_{of}{experts}"
