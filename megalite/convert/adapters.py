"""LoRA adapters in checkpoints: the base model that they belong to, merging into it, and export to `peft`.

    meta "base"    {"path": directory of the base model, "digest": checksum of its content}, or {"seed": s}: its
                   weights are random

A rule of a family names the linear layers of the other side (`family.py`). An adapter of a layer that is several there
(queries, keys and values of Llama) becomes several with the same A; an adapter of a part of a layer is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint import COMMITTED, CheckpointReader, Meta, is_huggingface, resolve_checkpoint
from megalite.comm import Axis, all_gather_json, patiently
from megalite.config import ModelConfig, from_dict
from megalite.convert.family import GROUPED_TRANSPOSED, STACKED, TRANSPOSED, HuggingFaceFamily, LayerRule
from megalite.convert.hf_files import CONFIG, HuggingFaceSource, write_json
from megalite.convert.hf_tokenizer import write_tokenizer
from megalite.convert.llama import STACKED_PAIRS
from megalite.convert.megalite_files import CheckpointSource
from megalite.convert.model_card import CARD, TrainingFacts, model_card
from megalite.convert.origin import ORIGIN_META, Origin, hub_id_of, is_hub_id
from megalite.convert.registry import family_of
from megalite.convert.source import ModelSource, staged
from megalite.data import Tokenizer
from megalite.errors import CheckpointError, ConfigError, MegaliteError
from megalite.inventory import Adapter, Parameter, adapters_of, block_models, held_in_8_bits, stage_parameters
from megalite.parallel.tensor import dequantised, in_8_bits

PARTS = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}
OUTER = "base_model.model."
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_META = "base"
LONGEST_PATH = 4096  # characters; systems allow no more


@dataclass(frozen=True)
class BaseModel:
    """path: a Hugging Face model or a checkpoint; None: the run began with the random weights of `seed`. hub_id: its
    name on the Hub, where known."""

    path: Path | None
    digest: str = ""
    seed: int = 0
    hub_id: str | None = None

    @classmethod
    def at(cls, path: Path, world: Axis) -> BaseModel:
        """The model that lies there now. Collective over `world`, whose ranks share the reading. Raises
        CheckpointError, on all ranks."""
        return cls(path.resolve(), _digest(path, world), hub_id=_hub_id(path))

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
        if (now := _digest(path, world)) != self.digest:
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


def _digest(path: Path, world: Axis) -> str:
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
        self._shapes = {name: p.shape for name, p in self._parameters() if not p.frozen}
        for name in self._reader.manifest.tensors:
            if name.startswith("layers.") and name not in self._shapes:
                raise CheckpointError(f"{where}: {name} is no adapter of its lora_targets; it is damaged")

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        return stage_parameters(self.adapted, range(self.adapted.num_layers + 2))

    def adapters(self, layer: str) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
        """The adapters of `layers.3.attention.qkv`, with A `[R, in]` and B `[..., out, R]`."""
        for adapter in self._known(layer):
            block = ".".join(layer.split(".")[:2])
            a, b = (self.stored(f"{block}.{p.name}") for p in (adapter.a, adapter.b))
            yield adapter, a, b

    def _known(self, layer: str) -> list[Adapter]:
        """The adapters that the configuration names, of a layer by its logical name."""
        _, index, linear = (*layer.split(".", 2), "", "")[:3]
        there = index.isdecimal() and int(index) < len(self._blocks)
        return adapters_of(self._blocks[int(index)], linear) if there else []

    def stored(self, name: str) -> Tensor:
        """What the checkpoint has of an adapter."""
        values, shape = self._reader.read(name), self._shapes[name]
        if tuple(values.shape) != tuple(shape):
            there = list(values.shape)
            path = self._reader.path
            raise CheckpointError(f"{path}: {name} is {there}, {list(shape)} by its configuration; it is damaged")
        return values

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
        values, (layer, _, kind) = self._base.read(name), name.rpartition(".")
        if name.startswith("layers.") and held_in_8_bits(self.adapted, name):  # so it was beside the adapters
            values = dequantised(*in_8_bits(values), values.dtype)
        found = list(self.adapters(layer)) if kind == "weight" and name.startswith("layers.") else []
        if not found:
            return values, values
        wide = torch.promote_types(values.dtype, found[0][1].dtype)
        exact = values.to(wide, copy=True)
        for adapter, a, b in found:
            merge(exact, adapter, a.to(wide), b.to(wide), self.adapted.lora.scale)
        return values, exact


def merge(weight: Tensor, adapter: Adapter, a: Tensor, b: Tensor, scale: float) -> None:
    """W += scale * B A in the rows that the adapter adds to, in place; `[..., out, in]`, whole."""
    if adapter.a.family == "expert":
        weight.flatten(1, -2).add_(b.flatten(1, -2) @ a, alpha=scale)
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


def write_peft(
    source: AdaptedSource, directory: Path, *, dtype: torch.dtype | None = None, base: str | None = None
) -> Path:
    """A directory that `peft.PeftModel.from_pretrained` loads beside the Hugging Face form of the model, with tokenizer
    and model card.

    dtype: of the stored matrices; None keeps them as they are. base: hub id of that model; None: the one that is
    recorded; where none is, the adapters name no model: a path of this machine is nothing to others. Raises ConfigError
    where the model's family has other layers, CheckpointError where it cannot be written.
    """
    model = source.model
    family = family_of(model, source.origin.model_type)
    tensors, settings = _prefixes(source) if source.adapted.lora.prefix else _low_rank(source, family)
    base = base or source.base_model.hub_id
    config = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True, **settings}
    with staged(directory, model=model, dtype=None) as staging:
        stored = {name: (v if dtype is None else v.to(dtype)).clone() for name, v in tensors.items()}
        save_file(stored, staging / PEFT_WEIGHTS, metadata={"format": "pt"})
        write_json(staging / PEFT_CONFIG, config)
        write_tokenizer(source.tokenizer, staging)
        card = model_card(model, family.name, source.origin, source.facts, base, adapters=True)
        (staging / CARD).write_text(card, encoding="utf-8")
    return directory


def _prefixes(source: AdaptedSource) -> tuple[dict[str, Tensor], dict[str, object]]:
    """One row a key of the prefix: of one layer after the other its keys, then its values."""
    model, length = source.model, source.adapted.lora.prefix
    own = [source.stored(f"layers.{index}.attention.adapters.prefix") for index in range(model.num_layers)]
    config = {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": length,
        "token_dim": model.kv_size,
        "num_transformer_submodules": 1,
        "num_attention_heads": model.query_groups,
        "num_layers": model.num_layers,
        "encoder_hidden_size": model.hidden_size,
        "prefix_projection": False,
    }
    return {"prompt_embeddings": torch.stack(own).permute(2, 0, 1, 3).reshape(length, -1)}, config


def _low_rank(source: AdaptedSource, family: HuggingFaceFamily) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Raises ConfigError for adapters that peft has not."""
    model, lora = source.model, source.adapted.lora
    if lora.adapter_kind != "lora":
        raise ConfigError(f"`to`=peft: it has no `adapter_kind`={lora.adapter_kind}; use the run itself")
    tensors: dict[str, Tensor] = {}
    transposed, model_parts = False, set(source.adapted.adapted_parts)
    for rule in family.rules:
        if not rule.ours.startswith("layers.{i}."):
            continue
        for index in range(model.num_layers):
            for adapter, a, b in source.adapters(rule.ours.replace("{i}", str(index))):
                if adapter.a.family == "expert":
                    pair = _pair_of_experts(rule, adapter, a, b, nested=model_parts >= {"fc1", "fc2"})
                    tensors |= {name.replace("{i}", str(index)): v.contiguous() for name, v in pair.items()}
                    continue
                transposed = transposed or rule.form in (TRANSPOSED, GROUPED_TRANSPOSED)
                for name, rows in _their_rows(rule, adapter, model, b):
                    key = f"{OUTER}{name.replace('{i}', str(index))}"
                    tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": rows}
    _check_dense_layers(tensors)
    alpha = lora.scale * (lora.lora_rank or 1)
    return tensors, {
        "peft_type": "LORA",
        "r": lora.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets({name for name in tensors if ".experts." not in name}),
        "target_parameters": _target_parameters(tensors, model_parts),
        "fan_in_fan_out": transposed,
        "bias": "none",
    }


def _their_rows(rule: LayerRule, adapter: Adapter, model: ModelConfig, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(Layer there, B of its adapter `[out, R]`)."""
    if adapter.name in PARTS:
        if len(rule.theirs) == 1:
            raise ConfigError(
                f"`to`=peft: {rule.theirs[0]} is one layer there, and {adapter.name} a part of it; train it with "
                "`lora_targets` linear_qkv linear_fc1 (c_attn, c_fc), or export the merged model (`to` hf)"
            )
        yield rule.theirs[PARTS[adapter.name]], b
        return
    parts = rule.form.to_theirs(model, b)
    for name, part in zip(rule.theirs, parts, strict=True):
        yield name, part.t() if rule.form in (TRANSPOSED, GROUPED_TRANSPOSED) else part


def _pair_of_experts(rule: LayerRule, adapter: Adapter, a: Tensor, b: Tensor, *, nested: bool) -> Mapping[str, Tensor]:
    """A and B as peft keeps them beside a stacked parameter: `[E * R, in]` and `[out, R * E]`. nested: both layers of
    the experts have adapters, and peft wraps the first one's inside of the other's."""
    if rule.form not in (STACKED_PAIRS, STACKED):
        raise ConfigError(
            "`to`=peft: experts of this family have their columns elsewhere there; export merged (`to` hf)"
        )
    layer = rule.theirs[0].partition(".{e}")[0].replace("block_sparse_moe", "mlp")  # its name in transformers 5
    inner = ".base_layer" if nested and adapter.name == "fc1" else ""
    name, rows = f"{OUTER}{layer}{inner}", b.flatten(1, -2)
    return {
        f"{name}.lora_A.weight": a.expand(len(b), -1, -1).flatten(0, 1),
        f"{name}.lora_B.weight": rows.permute(1, 2, 0).flatten(1),
    }


def _check_dense_layers(tensors: Iterable[str]) -> None:
    """Where a model has experts, peft takes what is called `down_proj` for theirs, and leaves other layers out."""
    names = list(tensors)
    dense = [n for n in names if ".experts." not in n and n.split(".")[-3] in ("gate_proj", "up_proj", "down_proj")]
    if dense and len(dense) < len([n for n in names if "mlp" in n]):
        layer = dense[0].removeprefix(OUTER).rpartition(".lora_")[0]
        raise ConfigError(
            f"`to`=peft: beside adapters of experts peft forgets those of {layer}; export merged (`to` hf)"
        )


def _target_parameters(tensors: Iterable[str], parts: Container[str]) -> list[str] | None:
    """The stacked parameters that have adapters."""
    names = {"fc1": "mlp.experts.gate_up_proj", "fc2": "mlp.experts.down_proj"}
    found = [name for part, name in names.items() if part in parts]
    return found if any(".experts." in name for name in tensors) else None


def _targets(tensors: Iterable[str]) -> list[str]:
    """Names of layers as peft compares them with the end of a path: the last word, with the one before where blocks
    have it twice (c_proj of GPT-2)."""
    paths = {tuple(key.split(".")[-4:-2]) for key in tensors}
    last = [path[-1] for path in paths]
    return sorted({path[-1] if last.count(path[-1]) == 1 else ".".join(path) for path in paths})
