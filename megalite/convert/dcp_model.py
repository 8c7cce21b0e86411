"""Models in torch.distributed.checkpoint's plain form: torchtitan's Llama, or Hugging Face's names of any family.

step-1000/.metadata, __0_0.distcp, ...      layers.0.attention.wq.weight, or model.layers.0.self_attn.q_proj.weight
config.json                                 what model it is, in Hugging Face's words; torchtitan keeps it elsewhere

torchtitan's Llama rotates neighbouring channels, Hugging Face's (and ours) the two halves: rows of wq and wk are put in
the other order, head by head.

What a run has left beside its weights, torchtitan's or DeepSpeed's: Adam's moments and steps.

    optimizer.state.KEY.exp_avg, exp_avg_sq       moments of the weight KEY, in its shape and order of rows
    optimizer.state.KEY.step                      steps that the optimizer has done

The schedules of such a run are programs, and its place in the data is its loader's own: the flags say both anew.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config import Config, ModelConfig
from megalite.convert.dcp_files import FOLDER, STATE, DcpFiles, DeepSpeedFiles, Rectangle
from megalite.convert.family import (
    STACKED,
    HuggingFaceFamily,
    LayerRule,
    Renamed,
    TensorForm,
    TensorPair,
    join_groups,
    reordered,
    split_groups,
)
from megalite.convert.hf_files import CONFIG, read_json, write_json
from megalite.convert.llama import LLAMA
from megalite.convert.origin import Origin
from megalite.convert.registry import config_of_weights, read_model, source_and_family
from megalite.convert.source import MOMENTS, WEIGHTS_ALONE, AdamRun, ForeignModel, ModelSource, converted, staged
from megalite.errors import CheckpointError
from megalite.inventory import parameter_shapes

CONTINUED = "continued"
"""Where a checkpoint of ours says how far a run has got whose samples, schedules and seed are not known."""
TITAN_BLOCK, TITAN_EMBEDDING = "layers.{i}.", "tok_embeddings"


def _turned(model: ModelConfig, parts: Sequence[Tensor], *, inwards: bool) -> list[Tensor]:
    """Queries and keys in the other order of rows; values as they are."""
    q, k = (reordered(part, model.head_dim, model.head_dim, inwards=inwards) for part in parts[:2])
    return [q, k, parts[2]]


TITAN = (
    LayerRule("embedding.word_embeddings", (TITAN_EMBEDDING,)),
    *Renamed({"input_norm": "attention_norm", "mlp_norm": "ffn_norm"}, TITAN_BLOCK),
    *Renamed(
        {"attention.qkv": ("attention.wq", "attention.wk", "attention.wv")}, TITAN_BLOCK,
        TensorForm(
            lambda model, t: _turned(model, split_groups(model, t), inwards=False),
            lambda model, parts: join_groups(model, _turned(model, parts, inwards=True)),
        ),
    ),
    *Renamed({"attention.proj": "attention.wo", "mlp.fc2": "feed_forward.w2"}, TITAN_BLOCK),
    *Renamed({"mlp.fc1": ("feed_forward.w1", "feed_forward.w3")}, TITAN_BLOCK, STACKED),
    LayerRule("head.final_norm", ("norm",)),
    LayerRule("head.output", ("output",)),
)  # fmt: skip
"""torchtitan's names of Llama's layers."""


class DcpSource(ForeignModel):
    """A model in a directory of torch.distributed.checkpoint.

    config: a config.json of Hugging Face's that says what model it is, beside its tokenizer; None: the one in the
    directory. The caller has asked whether its pickles are trusted. Raises ConfigError for a model that we do not have,
    CheckpointError for files that are missing, damaged or hostile.
    """

    def __init__(self, directory: Path | str, config: Path | str | None = None) -> None:
        self.directory = Path(directory)
        path = self.directory / CONFIG if config is None else Path(config)
        if not path.is_file():
            what = "does not say what model it is; give `model_config`, or put its config.json there"
            what = what if config is None else "no such file"
            raise CheckpointError(f"{path if config is not None else self.directory}: {what}")
        self.home, raw = path.parent, read_json(path)
        self.family, self.model = read_model(raw, str(path))
        self.origin = Origin.of_folder(path.parent, raw, None)
        self.files = (DeepSpeedFiles if (self.directory / FOLDER).is_dir() else DcpFiles)(self.directory)
        named = self.family
        if f"{TITAN_EMBEDDING}.weight" in self.files.names and LLAMA.rules[0] in named.rules:
            named = replace(named, rules=(*named.rules, *TITAN))
        self._pairs = {pair.ours: pair for pair in named.pairs(self.model)}
        self._shapes = parameter_shapes(self.model)
        self.stored = [name for pair in self._pairs.values() for name in pair.theirs]
        names = (name for pair in self.family.pairs(self.model) for name in pair.theirs)
        if missing := [name for name, stored in zip(names, self.stored, strict=True) if stored not in self.files.names]:
            raise CheckpointError(f"{self.directory}: tensors are missing: {', '.join(missing[:3])}")

    def read(self, name: str, state: str = "") -> Tensor:
        """A logical tensor; state: what an optimizer keeps of it, by torch's name."""
        return self._pairs[name].form.to_ours(self.model, [self._tensor(*part) for part in self._parts(name, state)])

    def check_state(self, name: str, state: str) -> None:
        """Raises CheckpointError where what the optimizer keeps of a tensor is missing, or of another shape."""
        for stored, shape in self._parts(name, state):
            self.require(stored) if self.files.flat else self._checked(stored, shape)

    def _parts(self, name: str, state: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(Name there, shape) of what a logical tensor is made of."""
        for stored, shape in self._pairs[name].parts(self.model, self._shapes[name]):
            yield f"{STATE}{stored}.{state}" if state else stored, shape

    def require(self, stored: str) -> None:
        """Raises CheckpointError where a tensor is not there."""
        if stored not in self.files.names:
            raise CheckpointError(f"{self.directory}: {stored} is missing; {WEIGHTS_ALONE}")

    def _checked(self, stored: str, shape: tuple[int, ...]) -> None:
        self.require(stored)
        found = self.files.shape(stored)
        if found != shape and not (self.files.flat and found == (math.prod(shape),)):
            what = f"shape {list(found)}, {CONFIG} says {list(shape)}"
            raise CheckpointError(f"{self.directory}: {stored}: {what}")

    def _tensor(self, stored: str, shape: tuple[int, ...]) -> Tensor:
        self._checked(stored, shape)
        return self.files.read(stored).reshape(shape)


class DcpState(AdamRun):
    """A `TrainedRun`. Raises CheckpointError where the optimizer is not Adam, or a tensor has another shape."""

    def __init__(self, source: DcpSource) -> None:
        self._source, self.model, self.where = source, source.model, str(source.directory)
        for name in parameter_shapes(source.model):
            for kind in MOMENTS:
                source.check_state(name, kind)
        names = [f"{STATE}{name}.step" for name in source.stored]
        for name in names:
            source.require(name)
        steps = {float(source.files.read(name)) for name in names}
        if len(steps) != 1 or not next(iter(steps)).is_integer() or not 0 <= next(iter(steps)) < 2**53:
            what = "does not say how many steps its optimizer has done"
            raise CheckpointError(f"{self.where}: {what}; {WEIGHTS_ALONE}")
        self.steps = int(steps.pop())
        progress: tuple[int, int | None, int] = source.files.progress or (self.steps, None, 0)
        self.iteration, self.samples, _ = progress
        if self.iteration < self.steps:
            raise CheckpointError(f"{self.where}: {self.steps} steps of its optimizer in {self.iteration} iterations")
        said = {"iteration": self.iteration, "steps": self.steps, "samples": self.samples}  # None: not known
        self.meta: Mapping[str, Any] = {CONTINUED: said}
        self.config: Config = config_of_weights(self.model, torch.float32)  # of the rest nothing is known

    def part(self, kind: str, name: str) -> Tensor:
        return self._source.read(name, kind)


def write_dcp(source: ModelSource, directory: Path, *, dtype: torch.dtype | None = None) -> Path:
    """A directory that torch.distributed.checkpoint loads, with config.json beside it; returns it.

    Llama gets torchtitan's names, other families Hugging Face's. dtype: of the stored weights; None keeps each as it
    is. Raises ConfigError where no family is this model, CheckpointError where it cannot be written.
    """
    from megalite.convert.dcp_writing import write_rectangles  # with it comes torch.distributed.checkpoint

    source, family = source_and_family(source)
    with staged(directory, model=source.model, dtype=dtype) as staging:
        write_rectangles(staging, list(_rectangles(source, family, dtype)), {})
        write_json(staging / CONFIG, family.config(source.model))
    return directory


def _rectangles(source: ModelSource, family: HuggingFaceFamily, dtype: torch.dtype | None) -> Iterator[Rectangle]:
    model, shapes = source.model, parameter_shapes(source.model)

    def part(pair: TensorPair, number: int) -> Tensor:
        return pair.form.to_theirs(model, converted(pair.ours, source.read(pair.ours), dtype))[number]

    named = replace(family, rules=TITAN) if family.name == LLAMA.name else family
    for pair in named.pairs(model):
        stored = dtype or source.read(pair.ours).dtype
        for number, (name, shape) in enumerate(pair.parts(model, shapes[pair.ours])):
            yield Rectangle(name, shape, (0,) * len(shape), shape, stored, partial(part, pair, number))
