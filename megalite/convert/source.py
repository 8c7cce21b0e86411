"""Sources of a conversion: models that give their logical tensors one by one; and the directory that is written."""

import math
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from megalite.checkpoint import check_space, fsync_directory
from megalite.config import Config, ModelConfig
from megalite.convert.hf_tokenizer import read_tokenizer
from megalite.convert.model_card import TrainingFacts
from megalite.convert.origin import Origin
from megalite.data import Tokenizer
from megalite.errors import CheckpointError
from megalite.inventory import parameter_shapes

EXPERT_BIAS = ".expert_bias"
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "optimizer/step"
WEIGHTS_ALONE = "the weights alone are taken by `finetune` (a training) or `no_load_optim` (a conversion)"


class ModelSource(Protocol):
    """A model on disk. `read` raises CheckpointError where its tensor is missing or damaged."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def origin(self) -> Origin: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def facts(self) -> TrainingFacts | None:
        """What a run of ours has done to it; None: nothing."""
        ...

    def read(self, name: str) -> Tensor:
        """A logical tensor as it is stored, on the CPU."""
        ...


class ForeignModel:
    """What a model from elsewhere says besides its tensors; its tokenizer lies in `home`, if there is one."""

    model: ModelConfig
    origin = Origin()
    facts: TrainingFacts | None = None
    home: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.home, self.model.vocab_size)


class TrainedRun(Protocol):
    """A run elsewhere with what it has left beside its weights, so that one of ours continues it.

    iteration: those done. config, meta: what a checkpoint of ours says of a run (`train/run_state.py`).
    """

    iteration: int

    @property
    def config(self) -> Config: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def names(self) -> Collection[str]:
        """Names in a checkpoint of ours of all that is there: masters, and what the optimizer keeps."""
        ...

    def stored(self, name: str) -> Tensor:
        """One of them. Raises CheckpointError."""
        ...


class AdamRun:
    """Names of a `TrainedRun` of Adam's; where its tensors lie is the business of `part`."""

    model: ModelConfig
    where: str
    steps: int

    @cached_property
    def names(self) -> Collection[str]:
        """Names in a checkpoint of ours of all that is there."""
        moments = (f"optimizer/{kind}/{name}" for kind in MOMENTS for name in parameter_shapes(self.model))
        return {STEP, *stored_shapes(self.model), *moments}

    def stored(self, name: str) -> Tensor:
        """One of them, in fp32. Raises CheckpointError."""
        if name not in self.names:
            raise CheckpointError(f"{self.where}: holds no {name}; {WEIGHTS_ALONE}")
        if name == STEP:
            return torch.tensor(float(self.steps))
        kind, _, owner = name.removeprefix("optimizer/").partition("/")
        return (self.part(kind, owner) if owner else self.part("", name)).float()

    def part(self, kind: str, name: str) -> Tensor:
        """What there is of a parameter: its master (\"\"), or one of `MOMENTS`."""
        raise NotImplementedError


def stored_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Logical tensors of a model's checkpoint, layer by layer: parameters, and the biases that choose experts."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(model).items():
        found[name] = shape
        if model.experts.moe_router_enable_expert_bias and name.endswith(".mlp.router.weight"):
            found[name.replace(".weight", EXPERT_BIAS)] = shape[:1]
    return found


def converted(name: str, values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor in the dtype in which weights are to be stored; the biases of experts stay as exact as they are."""
    return values if dtype is None or name.endswith(EXPERT_BIAS) else values.to(dtype)


@contextmanager
def staged(directory: Path, name: str = "", *, model: ModelConfig, dtype: torch.dtype | None) -> Iterator[Path]:
    """A new directory to write a model into, which becomes `directory` (or `name` in it) when the body has ended well.

    dtype: of the weights; None: not known, so room is asked for by the byte an element. Raises CheckpointError where it
    exists already and holds something, has no room for the weights, or cannot be written.
    """
    elements = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    check_space(directory, elements * (dtype or torch.int8).itemsize)
    final = directory / name
    try:
        if directory.exists() and any(directory.iterdir()):
            raise CheckpointError(
                f"`save`={directory}: exists and is not empty; nothing is overwritten, choose another"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:12]}")
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"`save`={directory}: cannot write there ({error.strerror})") from None
    try:
        yield staging
        readable = staging.stat().st_mode & 0o666  # as of any new file: safetensors makes files for their owner alone
        for path in staging.rglob("*"):
            if path.is_file():
                path.chmod(readable)
        fsync_directory(staging)
        if final.exists():
            final.rmdir()
        os.rename(staging, final)
        fsync_directory(final.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            what = f"{error.filename or staging}: {error.strerror or error}"
            raise CheckpointError(f"`save`={directory}: {what}") from None
        if isinstance(error, SafetensorError):
            raise CheckpointError(f"`save`={directory}: {staging}: {error}") from None
        raise
