"""Adapters on their way out: merged into the model that they were trained beside, or as `peft` keeps them.

A rule of a family names what a linear layer is there (`family.py`). An adapter of a whole layer that is several there
(queries, keys and values of Llama) becomes as many with the same A; one of a part that is no layer there is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint import CheckpointReader, resolve_checkpoint
from megalite.comm import Axis
from megalite.config import ModelConfig, from_dict
from megalite.convert.base_model import BASE_META, BaseModel
from megalite.convert.family import GROUPED_TRANSPOSED, TRANSPOSED, LayerRule
from megalite.convert.megalite_files import CheckpointSource
from megalite.convert.registry import family_of
from megalite.convert.source import ModelSource, Origin, staged
from megalite.data import Tokenizer
from megalite.errors import CheckpointError, ConfigError
from megalite.inventory import Adapter, adapters_of

PARTS = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdaptedSource:
    """A model and the adapters of a checkpoint: `read` gives merged weights.

    base: where the model lies now; None: where the checkpoint says. dtype: what weights are merged and given in; None:
    merged in the wider of both, given in the model's. Raises CheckpointError.
    """

    def __init__(
        self, directory: Path | str, ckpt_step: int | None = None, *, base: Path | None, dtype: torch.dtype | None
    ) -> None:
        self._reader = CheckpointReader(resolve_checkpoint(directory, ckpt_step))
        where, meta = str(self._reader.path), self._reader.manifest.meta
        self.adapted: ModelConfig = from_dict(meta["config"], where).model
        self.model, self._dtype = self.adapted.without_adapters, dtype
        self.base_model = BaseModel.of_meta(meta, where).found(where, Axis.single("world"), base)
        self._base = self.base_model.open()
        self._tokenizer = CheckpointSource.tokenizer_of(self._reader)
        for name in self._reader.manifest.tensors:
            rest = name.split(".", 2)[-1]
            known = adapters_of(self.adapted, rest.partition(".adapters.")[0])
            if name.startswith("layers.") and not any(rest in (adapter.a.name, adapter.b.name) for adapter in known):
                raise CheckpointError(f"{where}: {name} is no adapter of its lora_targets; it is damaged")

    @property
    def origin(self) -> Origin:
        return self._base.origin

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def adapters(self, layer: str) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
        """Those of `layers.3.attention.qkv`, with A `[R, in]` and B `[..., out, R]`."""
        _, index, linear = layer.split(".", 2)
        for adapter in adapters_of(self.adapted, linear):
            a, b = (self._stored(f"layers.{index}.{p.name}", p.shape) for p in (adapter.a, adapter.b))
            yield adapter, a, b

    def _stored(self, name: str, shape: Sequence[int]) -> Tensor:
        values = self._reader.read(name)
        if tuple(values.shape) != tuple(shape):
            there, path = list(values.shape), self._reader.path
            raise CheckpointError(f"{path}: {name} is {there}, {list(shape)} by its configuration; it is damaged")
        return values

    def read(self, name: str) -> Tensor:
        values, (layer, _, kind) = self._base.read(name), name.rpartition(".")
        found = list(self.adapters(layer)) if kind == "weight" and name.startswith("layers.") else []
        if not found:
            return values if self._dtype is None else values.to(self._dtype)
        wide = self._dtype or torch.promote_types(values.dtype, found[0][1].dtype)
        merged = values.to(wide, copy=True)
        for adapter, a, b in found:
            merge(merged, adapter, a.to(wide), b.to(wide), self.adapted.lora.scale)
        return merged if self._dtype is not None else merged.to(values.dtype)


def merge(weight: Tensor, adapter: Adapter, a: Tensor, b: Tensor, scale: float) -> None:
    """W += scale * B A in the rows that the adapter adds to, in place; `[..., out, in]`, whole."""
    rows = weight.view(-1, weight.shape[-1])
    width = adapter.width or len(rows) // adapter.units
    own = rows.view(-1, adapter.units, width, rows.shape[-1])[:, adapter.begin : adapter.end]
    own += scale * (b.flatten(0, -2) @ a).view(own.shape)


def open_checkpoint(
    directory: Path | str,
    ckpt_step: int | None = None,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
) -> ModelSource:
    """The weights of a checkpoint, merged where it holds adapters. base, dtype: see `AdaptedSource`. Raises
    CheckpointError."""
    reader = CheckpointReader(resolve_checkpoint(directory, ckpt_step))
    if BASE_META in reader.manifest.meta:
        return AdaptedSource(directory, ckpt_step, base=base, dtype=dtype)
    if base is not None:
        raise CheckpointError(f"--base={base}: {reader.path} holds a whole model; drop it")
    return CheckpointSource(directory, ckpt_step)


def write_peft(source: AdaptedSource, directory: Path, *, dtype: torch.dtype | None = None) -> Path:
    """A directory that `peft.PeftModel.from_pretrained` loads beside the Hugging Face form of the model.

    dtype: of the stored matrices; None keeps them as they are. Raises ConfigError where the model's family has other
    layers, CheckpointError where it cannot be written.
    """
    model, lora = source.model, source.adapted.lora
    family = family_of(model, source.origin.model_type)
    tensors: dict[str, Tensor] = {}
    transposed = False
    for rule in family.rules:
        if not rule.ours.startswith("layers.{i}."):
            continue
        for index in range(model.num_layers):
            for adapter, a, b in source.adapters(rule.ours.replace("{i}", str(index))):
                transposed = transposed or rule.form in (TRANSPOSED, GROUPED_TRANSPOSED)
                for name, rows in _their_rows(rule, adapter, model, b):
                    key = f"base_model.model.{name.replace('{i}', str(index))}"
                    for letter, values in (("A", a), ("B", rows)):
                        tensors[f"{key}.lora_{letter}.weight"] = (values if dtype is None else values.to(dtype)).clone()
    alpha = lora.scale * (lora.lora_rank or 1)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source.base_model.path),
        "r": lora.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(tensors),
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    with staged(directory, model=model, dtype=None) as staging:
        save_file(tensors, staging / PEFT_WEIGHTS, metadata={"format": "pt"})
        (staging / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory


def _their_rows(rule: LayerRule, adapter: Adapter, model: ModelConfig, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(Layer there, B of its adapter `[out, R]`)."""
    if adapter.name in PARTS:
        if len(rule.theirs) == 1:
            raise ConfigError(
                f"--to=peft: {rule.theirs[0]} is one layer there, and {adapter.name} a part of it; train it with "
                "--lora-targets linear_qkv linear_fc1 (c_attn, c_fc), or export the merged model (--to hf)"
            )
        yield rule.theirs[PARTS[adapter.name]], b
        return
    parts = rule.form.to_theirs(model, b)
    for name, part in zip(rule.theirs, parts, strict=True):
        yield name, part.t() if rule.form in (TRANSPOSED, GROUPED_TRANSPOSED) else part


def _targets(tensors: dict[str, Tensor]) -> list[str]:
    """Names of layers as peft compares them with the end of a path: the last word, with the one before where blocks
    have it twice (c_proj of GPT-2)."""
    paths = {tuple(key.split(".")[-4:-2]) for key in tensors}
    last = [path[-1] for path in paths]
    return sorted({path[-1] if last.count(path[-1]) == 1 else ".".join(path) for path in paths})
