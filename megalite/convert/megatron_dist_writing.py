"""Megatron-LM's `torch_dist` checkpoints, written by torch.distributed.checkpoint's own writer, one layer in memory.

Layers that are all the same lie on top of one another, one rectangle a layer; mixed ones each under its own name. Whole
tensors know no layout: Megatron-LM loads them at any. What they are called: `megatron_dist.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import TRACKER, directory_name, fsync_directory
from megalite.config import ModelConfig
from megalite.convert.dcp_files import Rectangle
from megalite.convert.hf_tokenizer import write_tokenizer
from megalite.convert.megatron_args import write_args
from megalite.convert.megatron_dist import COMMON
from megalite.convert.megatron_files import RELEASE
from megalite.convert.megatron_names import CORE, cut_of, is_expert, name_of, stateful_layers
from megalite.convert.megatron_state import STATE, KeptState
from megalite.convert.megatron_writing import RUN_ARGS, write_common
from megalite.convert.source import ModelSource, converted, staged, stored_shapes
from megalite.errors import CheckpointError
from megalite.inventory import parameter_shapes

BACKEND = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
BACKEND += '"common_backend_version": 1}'


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
            for kind in run.kinds:
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
