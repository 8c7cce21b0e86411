"""LoRA adapters in checkpoints: the base model that they belong to, and merging into it (peft's: `peft.py`).

meta "base"    {"path": directory of the base model, "digest": checksum of its content}, or {"seed": s}: its
               weights are random
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megalite.checkpoint import COMMITTED, CheckpointReader, Meta, is_huggingface, resolve_checkpoint
from megalite.comm import Axis, all_gather_json, patiently
from megalite.config import ModelConfig, from_dict
from megalite.convert.hf_files import CONFIG, HuggingFaceSource
from megalite.convert.megalite_files import BASE_META, CheckpointSource
from megalite.convert.model_card import TrainingFacts
from megalite.convert.origin import ORIGIN_META, Origin, hub_id_of, is_hub_id
from megalite.convert.source import ModelSource, stored_shapes
from megalite.data import Tokenizer
from megalite.errors import CheckpointError, ConfigError, MegaliteError
from megalite.inventory import Adapter, adapters_of, block_models, held_in_8_bits, stage_parameters
from megalite.parallel.tensor import dequantised, in_8_bits

LONGEST_PATH = 4096  # characters; systems allow no more


@dataclass(frozen=True)
class BaseModel:
    """The model that adapters belong to."""

    path: Path | None  # a Hugging Face model or a checkpoint; None: the run began with the random weights of `seed`
    digest: str = ""
    seed: int = 0
    hub_id: str | None = None  # its name on the Hub, where known

    @classmethod
    def at(cls, path: Path, world: Axis) -> BaseModel:
        """The model that lies there now. Collective over `world`, whose ranks share the reading. Raises
        CheckpointError, on all ranks."""
        return cls(path.resolve(), digest_of(path, world), hub_id=_hub_id(path))

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], where: str) -> BaseModel:
        """The base model that the meta of a checkpoint of adapters names. Raises CheckpointError."""
        section = Meta(meta, where).section(BASE_META)
        path, digest = section.raw.get("path"), section.raw.get("digest", "")
        if not isinstance(path, str | None) or len(path or "") > LONGEST_PATH or not isinstance(digest, str):
            raise section.wrong("path", "the place of a model")
        hub_id = section.raw.get("hub_id")
        known = hub_id if isinstance(hub_id, str) and is_hub_id(hub_id) else None
        return cls(None if path is None else Path(path), digest, section.integer("seed", 0), known)

    def to_meta(self) -> dict[str, Any]:
        if self.path is None:
            return {"seed": self.seed}
        named = {} if self.hub_id is None else {"hub_id": self.hub_id}
        return {"path": str(self.path), "digest": self.digest, **named}

    def found(self, where: str, world: Axis, elsewhere: Path | None = None) -> BaseModel:
        """The same model in its directory (`elsewhere`: in another), its content verified. Collective.

        where: the checkpoint of the adapters, for messages. Raises CheckpointError, on all ranks.
        """
        path = elsewhere or self.path
        if path is None:
            raise CheckpointError(f"{where}: adapters of a model with random weights, which is stored nowhere")
        if not os.path.isdir(path):
            raise CheckpointError(
                f"{where}: adapters of the model {path}, which is not there; bring it back, or name its place: `load` "
                "to train (beside `auto_resume`), `base` to convert, generate and evaluate"
            )
        if (now := digest_of(path, world)) != self.digest:
            raise CheckpointError(
                f"{where}: adapters of another model than {path} (digest {self.digest}, there {now}); give that"
            )
        return replace(self, path=path, hub_id=self.hub_id or _hub_id(path))

    def open(self) -> ModelSource:
        """Its weights. Raises CheckpointError; ConfigError for a model that we do not have."""
        assert self.path is not None
        return HuggingFaceSource(self.path) if is_huggingface(self.path) else CheckpointSource(self.path)


def _hub_id(path: Path) -> str | None:
    """The name on the Hub of a model that lies there as it came: not of one that was trained since. Raises
    CheckpointError."""
    if is_huggingface(path):
        return hub_id_of(path)
    meta = CheckpointReader(resolve_checkpoint(path)).manifest.meta
    return None if "progress" in meta else Origin.from_meta(meta.get(ORIGIN_META)).hub_id


def digest_of(path: Path, world: Axis) -> str:
    """Checksum of a model's content: a checkpoint's COMMITTED proves all of it; of a Hugging Face model the ranks read
    every byte of weights and configuration, each its share of the files."""
    own: dict[str, str] = {}
    problem = None
    try:
        if is_huggingface(path):
            files = sorted([path / CONFIG, *path.glob("*.safetensors")])
        else:
            files = [Path(str(resolve_checkpoint(path))) / COMMITTED]
        mine = files[world.rank :: world.size]
        own = patiently(lambda: {file.name: _checksum(file) for file in mine}, world) or {}
    except (MegaliteError, OSError) as error:
        problem = str(error)
    gathered = all_gather_json([own, problem], world)
    problem = next((text for _, text in gathered if text is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
    lines = sorted(f"{name} {digest}" for found, _ in gathered for name, digest in found.items())
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


class AdaptedSource:
    """A base model and the adapters of a checkpoint: `read` gives merged weights.

    reader: of the checkpoint. base: directory of the base model; None: the one that the checkpoint names. dtype: in
    which weights are returned; None: in the base model's. Whatever it is, they are merged in the wider of base and
    adapters and rounded once.
    Raises CheckpointError.
    """

    def __init__(self, reader: CheckpointReader, base: Path | None, dtype: torch.dtype | None) -> None:
        self._reader, where, meta = reader, str(reader.path), reader.manifest.meta
        config = from_dict(meta["config"], where)
        self.adapted: ModelConfig = config.model
        self.facts = TrainingFacts.of(self._reader.manifest, config, where)
        self.model = self.adapted.without_adapters
        self._dtype = dtype
        self.base_model = BaseModel.of_meta(meta, where).found(where, Axis.single("world"), base)
        self._base = self.base_model.open()
        self.origin: Origin = replace(self._base.origin, hub_id=self.base_model.hub_id or self._base.origin.hub_id)
        self.tokenizer: Tokenizer = CheckpointSource.tokenizer_of(self._reader)
        self._blocks = block_models(self.adapted)
        parameters = stage_parameters(self.adapted, range(self.adapted.num_layers + 2))
        self._shapes = {name: p.shape for name, p in parameters if not p.frozen}
        layers = [name.removesuffix(".weight") for name in stored_shapes(self.model) if name.endswith(".weight")]
        merged = {name for layer in layers for _, names in self._known(layer) for name in names}
        self._beside_none, self._left = sorted(self._shapes.keys() - merged), set(self._shapes)
        for name in self._reader.manifest.tensors:
            if name.startswith("layers.") and name not in self._shapes:
                raise CheckpointError(f"{where}: {name} is no adapter of its lora_targets; it is damaged")

    def adapters(self, layer: str) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
        """The adapters of `layers.3.attention.qkv`, with A `[R, in]` and B `[..., out, R]`."""
        for adapter, names in self._known(layer):
            a, b = map(self.stored, names)
            yield adapter, a, b

    def _known(self, layer: str) -> list[tuple[Adapter, list[str]]]:
        """The adapters that the configuration names, of a layer by its logical name, and the names of their A and B."""
        block, index, linear = (*layer.split(".", 2), "", "")[:3]
        there = index.isdecimal() and int(index) < len(self._blocks)
        found = adapters_of(self._blocks[int(index)], linear) if there else []
        return [(each, [f"{block}.{index}.{p.name}" for p in (each.a, each.b)]) for each in found]

    def stored(self, name: str) -> Tensor:
        """What the checkpoint has of an adapter."""
        self._left.discard(name)
        values, shape = self._reader.read(name), self._shapes[name]
        if tuple(values.shape) != tuple(shape):
            there = list(values.shape)
            path = self._reader.path
            raise CheckpointError(f"{path}: {name} is {there}, {list(shape)} by its configuration; it is damaged")
        return values

    def check_all_read(self) -> None:
        """Raises ConfigError where an adapter has not been read, and so is missing from what was made of them."""
        _check_none_left(sorted(self._left), "peft", "export merged (`to` hf)")

    def read(self, name: str) -> Tensor:
        values, exact = self._base_and_merged(name)
        return exact.to(self._dtype or values.dtype)

    def merged(self, name: str) -> Tensor:
        """The same before it is rounded."""
        return self._base_and_merged(name)[1]

    def _base_and_merged(self, name: str) -> tuple[Tensor, Tensor]:
        if (other := self.adapted.lora.adapter_kind) != "lora":
            raise ConfigError(
                f"`adapter_kind`={other}: merges into no matrix, and no model of Hugging Face has it; "
                f"{'export it `to` peft, or ' * (other == 'prefix')}use the run itself (generate_text.py, evaluate.py)"
            )
        _check_none_left(self._beside_none, "hf", "use the run itself")
        values, (layer, _, kind) = self._base.read(name), name.rpartition(".")
        if name.startswith("layers.") and held_in_8_bits(self.adapted, name):  # so it was beside the adapters
            values = dequantised(*in_8_bits(values), values.dtype)
        found = list(self.adapters(layer)) if kind == "weight" and name.startswith("layers.") else []
        if not found:
            return values, values
        wide = torch.promote_types(values.dtype, found[0][1].dtype)
        exact = values.to(wide, copy=True, memory_format=torch.contiguous_format)
        for adapter, a, b in found:
            merge(exact, adapter, a.to(wide), b.to(wide), self.adapted.lora.scale)
        return values, exact


def _check_none_left(names: Sequence[str], to: str, fix: str) -> None:
    """Raises ConfigError for adapters that an export would be without."""
    if names:
        more = f" (and {len(names) - 1:,} more)" * (len(names) > 1)
        raise ConfigError(f"`to`={to}: {names[0]}{more}: this family has no place for it; {fix}")


def merge(weight: Tensor, adapter: Adapter, a: Tensor, b: Tensor, scale: float) -> None:
    """W += scale * B A in the rows that the adapter adds to, in place; `[..., out, in]`, whole and contiguous: its rows
    are a view, where `flatten` would make a copy of another layout."""
    if adapter.a.family == "expert":
        weight.view(len(weight), -1, weight.shape[-1]).add_(b.flatten(1, -2) @ a, alpha=scale)
        return
    rows = weight.view(-1, weight.shape[-1])
    width = adapter.width or len(rows) // adapter.units
    own = rows.view(-1, adapter.units, width, rows.shape[-1])[:, adapter.begin : adapter.end]
    own += scale * (b.flatten(0, -2) @ a).view(own.shape)


def open_checkpoint(
    directory: Path | str,
    ckpt_step: int | None = None,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
    *,
    use_ema: bool = False,
) -> ModelSource:
    """The weights of a checkpoint, or their averages, merged where it holds adapters. base, dtype: see `AdaptedSource`.
    Raises CheckpointError."""
    reader = CheckpointReader(resolve_checkpoint(directory, ckpt_step), use_ema=use_ema)
    if BASE_META in reader.manifest.meta:
        return AdaptedSource(reader, base, dtype)
    if base is not None:
        raise CheckpointError(f"`base`={base}: {reader.path} holds a whole model; drop it")
    return CheckpointSource(directory, ckpt_step, use_ema=use_ema)
