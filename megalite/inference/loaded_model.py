"""A checkpoint as a whole model in this one process, whatever layout wrote it: for generation, evaluation and export.

A checkpoint is self-contained: configuration, weights by logical name, and the tokenizer's files. Nothing else of the
run is needed, and nothing of it is changed.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.checkpoint import Checkpointer, Meta, copy_extras, read_manifest, resolve_checkpoint
from megalite.comm import Axis, TensorShard
from megalite.config import Config, DeviceOptions, ParallelConfig
from megalite.data import Tokenizer, load_tokenizer
from megalite.errors import ConfigError
from megalite.inventory import placement_of
from megalite.models import build_stack, layer_specs
from megalite.nn import LayerStack, expert_biases
from megalite.parallel.tensor import LayerContext
from megalite.train import config_of, parameter_dtype


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use.

    config: of the run that saved it, with its parallel section replaced by that of one process.
    tokenizer: what the checkpoint carries.
    model: all layers, in evaluation mode, without gradients.
    path, iteration, consumed_samples: the checkpoint it came from.
    """

    config: Config
    tokenizer: Tokenizer
    model: LayerStack
    path: Path
    iteration: int
    consumed_samples: int

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_for_inference(
    directory: Path | str,
    *,
    ckpt_step: int | None = None,
    device: torch.device | str = "auto",
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Load a checkpoint into one process.

    directory: a run directory (its newest committed checkpoint counts, or `ckpt_step`) or one checkpoint.
    device: `auto` is cuda where torch sees a GPU.
    dtype: of the weights; None: that of the training on a GPU, fp32 on a CPU (fp64 stays fp64).
    Raises CheckpointError where nothing is there, or it is damaged; DataError where its tokenizer cannot be built (a
    package it needs is missing, for example).
    """
    path = resolve_checkpoint(directory, ckpt_step, advice="give a run's --save, or one of its checkpoints")
    manifest = read_manifest(path)
    config = config_of(path, manifest)
    target = pick_device(str(device))
    model_config = dataclasses.replace(config.model, make_vocab_size_divisible_by=1)  # one process needs no padding
    config = dataclasses.replace(
        config, model=model_config, parallel=ParallelConfig(hardware=DeviceOptions(device=target.type))
    )
    with tempfile.TemporaryDirectory(prefix="megalite-tokenizer-") as folder:
        copy_extras(path, manifest, Path(folder))
        tokenizer = load_tokenizer(folder, f"--load={path}")
    told = Meta(manifest.meta, str(path))
    model = _empty_model(config, target, dtype or pick_dtype(config, target))
    Checkpointer(path.parent, world=Axis.single("world")).load(path, _shards(model), cast=True)
    return LoadedModel(
        config, tokenizer, model, path, told.integer("iteration", 0), told.integer("consumed_samples", 0)
    )


def pick_device(name: str) -> torch.device:
    """Turn `--device` into a device. Raises ConfigError where cuda is asked for and torch sees no GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device={name}: torch sees no GPU (torch {torch.__version__}); use --device=cpu")
    return torch.device(name)


def pick_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The training's parameter dtype; half precision becomes fp32 on a CPU, where it would be slow and no smaller."""
    return torch.float32 if device.type == "cpu" and config.training.precision.half else parameter_dtype(config)


def _empty_model(config: Config, device: torch.device, dtype: torch.dtype) -> LayerStack:
    model = build_stack(config.model, layer_specs(config.model), LayerContext(dtype=dtype, device=device))
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()  # padding rows are in no checkpoint
    return model.eval()


def _shards(model: LayerStack) -> list[TensorShard]:
    """All parameters as the rectangles that they are of their logical tensors: everything but padding; and biases of
    experts."""
    shards = [TensorShard(name, tuple(bias.shape), (0,), bias) for name, _, bias in expert_biases(model)]
    for name, parameter in model.logical_parameters():
        place = placement_of(parameter)
        inside = tuple(slice(extent) for extent in place.valid_shape(tuple(parameter.shape)))
        shards.append(TensorShard(name, place.global_shape, place.offset, parameter.detach()[inside]))
    return shards
