"""Adapters as `peft` keeps them: read as one merged model with their Hugging Face model, and written of a run.

    adapter_config.json         rank, alpha
    adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [r, in], lora_B [out, r]

Read is only plain LoRA of linear layers; what else peft can do is refused, never left out. For writing, a rule of a
family names the linear layers of the other side (`family.py`): an adapter of a layer that is several there (queries,
keys and values of Llama) becomes several with the same A; an adapter of a part of a layer is refused.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from megalite.checkpoint import COMMITTED, committed, is_huggingface
from megalite.comm import Axis
from megalite.config import ModelConfig
from megalite.convert.adapters import AdaptedSource, digest_of
from megalite.convert.family import GROUPED_TRANSPOSED, STACKED, TRANSPOSED, HuggingFaceFamily, LayerRule
from megalite.convert.hf_files import CONFIG, HuggingFaceSource, read_json, safetensors, write_json
from megalite.convert.hf_tokenizer import read_tokenizer, write_tokenizer
from megalite.convert.llama import ALTERNATING, STACKED_PAIRS, TURNED
from megalite.convert.model_card import CARD, model_card
from megalite.convert.registry import family_of
from megalite.convert.source import staged
from megalite.data import Tokenizer
from megalite.errors import CheckpointError, ConfigError
from megalite.files import hub_advice
from megalite.inventory import Adapter
from megalite.stores import Place

logger = logging.getLogger(__name__)
PARTS = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}
OUTER = "base_model.model."
STACKED_THERE = {"fc1": "mlp.experts.gate_up_proj", "fc2": "mlp.experts.down_proj"}
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIGEST = "megalite_base_digest"
"""In the weights' metadata: the checksum of the Hugging Face folder that they were trained beside."""
UNSET = (
    "use_dora", "lora_bias", "modules_to_save", "alpha_pattern", "layer_replication", "target_parameters",
    "alora_invocation_tokens",
)  # fmt: skip
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), **{name: (None, False, [], {}) for name in UNSET},
}  # fmt: skip
"""Setting -> its values that are plain LoRA; one that is not given is."""


def is_peft(directory: Place | str) -> bool:
    """Whether a directory holds adapters of peft, and no model."""
    return os.path.isfile(f"{directory}/{PEFT_CONFIG}") and not is_huggingface(directory)


class PeftSource(HuggingFaceSource):
    """The model in `base` with the adapters in `adapters` added to its weights, in the wider of their dtypes, as peft's
    own sum is before it is merged. Raises ConfigError without a Hugging Face model; CheckpointError for adapters that
    are damaged, belong to another model, or are more than plain LoRA."""

    def __init__(self, adapters: Path | str, base: Path | None) -> None:
        self._adapters = Path(adapters)
        if base is None:
            raise ConfigError(f"`load`={adapters}: adapters of peft without their model; name it by `base` DIR")
        if os.path.isfile(f"{base}/{COMMITTED}") or committed(Path(base)):
            raise ConfigError(
                f"`base`={base}: is a run, adapters of peft belong to a Hugging Face model; export it first: "
                f"tools/convert_checkpoint.py --from megalite --to hf --load {base}"
            )
        if not is_huggingface(base):
            fix = hub_advice(str(base)) or "name its folder"
            raise ConfigError(
                f"`base`={base}: no Hugging Face model (no {CONFIG}), which adapters of peft belong to; {fix}"
            )
        settings = read_json(self._adapters / PEFT_CONFIG)
        for name, plain in PLAIN.items():
            if settings.get(name, plain[0]) not in plain:
                raise CheckpointError(
                    f"{self._adapters / PEFT_CONFIG}: {name} is {str(settings[name])[:60]!r}, and plain LoRA alone is "
                    "read; merge the adapters there (merge_and_unload) and name the model"
                )
        alpha = settings.get("lora_alpha", 8)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise CheckpointError(f"{self._adapters / PEFT_CONFIG}: lora_alpha is no number")
        self._alpha, self._root = float(alpha), bool(settings.get("use_rslora"))
        self._transposed = bool(settings.get("fan_in_fan_out"))
        self._pairs_of_layers = self._read_adapters()
        self._check_digest(base)
        super().__init__(base)
        changed = {f"{layer}.weight" for layer in self._pairs_of_layers}
        if strange := sorted(changed - {name for pair in self._pairs.values() for name in pair.theirs}):
            more = f" (and {len(strange) - 1} more)" * (len(strange) > 1)
            raise CheckpointError(f"{self._adapters}: adapters of {strange[0]}{more}, which {base} does not have")

    @property
    def tokenizer(self) -> Tokenizer:
        """The one beside the adapters, if there is one: a template may have come with the training."""
        own = (self._adapters / "tokenizer.json").is_file()
        return read_tokenizer(self._adapters, self.model.vocab_size) if own else super().tokenizer

    def _check_digest(self, base: Path) -> None:
        """Raises CheckpointError where the adapters say that they were trained beside another model."""
        with safetensors(self._adapters / PEFT_WEIGHTS) as opened:
            theirs = (opened.metadata() or {}).get(DIGEST)
        if theirs is None:
            logger.warning("%s: no digest of its model, so whether %s is that one is not known", self._adapters, base)
        elif (now := digest_of(base, Axis.single("world"))) != theirs:
            raise CheckpointError(
                f"{self._adapters}: adapters of another model than {base} (digest {ascii(theirs[:16])[1:-1]}, there "
                f"{now}); give that"
            )

    def _read_adapters(self) -> dict[str, dict[str, Tensor]]:
        """Layer -> A and B."""
        path, found = self._adapters / PEFT_WEIGHTS, dict[str, dict[str, Tensor]]()
        if not path.is_file():
            there = (self._adapters / "adapter_model.bin").is_file()
            why = "; adapter_model.bin is a pickle, which is not read: save it as safetensors" if there else ""
            raise CheckpointError(f"{path}: not found{why}")
        with safetensors(path) as opened:
            for name in opened.keys():  # noqa: SIM118  not a mapping
                layer, _, kind = name.removeprefix(OUTER).removesuffix(".weight").rpartition(".lora_")
                if not layer or kind not in ("A", "B") or not name.startswith(OUTER):
                    raise CheckpointError(f"{path}: {name[:120]} is no matrix of plain LoRA")
                found.setdefault(layer, {})[kind] = opened.get_tensor(name)
        for layer, pair in found.items():
            shapes = [list(pair[kind].shape) if kind in pair else [] for kind in ("A", "B")]
            if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
                raise CheckpointError(f"{path}: {layer}: A {shapes[0]} and B {shapes[1]} are no pair [r, in], [out, r]")
        return found

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values, pair = super()._tensor(name, shape), self._pairs_of_layers.get(name.removesuffix(".weight"))
        if pair is None or not name.endswith(".weight"):
            return values
        wide = torch.promote_types(values.dtype, pair["A"].dtype)
        rank = len(pair["A"])
        change = pair["B"].to(wide) @ pair["A"].to(wide) * (self._alpha / (math.sqrt(rank) if self._root else rank))
        change = change.t() if self._transposed else change
        if change.shape != values.shape:
            of = f"of {list(change.shape)}, the model's weight is {list(values.shape)}"
            raise CheckpointError(f"{self._adapters}: the adapter of {name} is {of}; it belongs to another model")
        return values.to(wide) + change


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
    source.check_all_read()
    beside, base = source.base_model, base or source.base_model.hub_id
    # Of a run there is no digest: its exports have other files.
    digest = {DIGEST: beside.digest} if beside.path is not None and is_huggingface(beside.path) else {}
    config = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True, **settings}
    with staged(directory, model=model, dtype=None) as staging:
        stored = {name: (v if dtype is None else v.to(dtype)).clone() for name, v in tensors.items()}
        content = save(stored, metadata={"format": "pt", **digest})
        (staging / PEFT_WEIGHTS).write_bytes(_in_order(content))
        write_json(staging / PEFT_CONFIG, config)
        write_tokenizer(source.tokenizer, staging)
        card = model_card(model, family.name, source.origin, source.facts, base, adapters=True)
        (staging / CARD).write_text(card, encoding="utf-8")
    return directory


def _in_order(content: bytes) -> bytes:
    """The same file of safetensors whose metadata stand in order: its library takes another one each time, and equal
    adapters should be equal files."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin where they did: eight bytes apart
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


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
    transposed, parts = False, set(source.adapted.adapted_parts)
    for rule in family.rules:
        if not rule.ours.startswith("layers.{i}."):
            continue
        linear = rule.ours.removesuffix(".weight")
        for index in range(model.num_layers):
            for adapter, a, b in source.adapters(linear.replace("{i}", str(index))):
                if adapter.a.family == "expert":
                    pair = _pair_of_experts(rule, adapter, a, b, nested=parts >= {"fc1", "fc2"})
                    tensors |= {name.replace("{i}", str(index)): v.contiguous() for name, v in pair.items()}
                    continue
                transposed = transposed or rule.form in (TRANSPOSED, GROUPED_TRANSPOSED)
                for name, rows in _their_rows(rule, adapter, model, b):
                    key = f"{OUTER}{name.replace('{i}', str(index))}"
                    tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": rows}
    _check_dense_layers(tensors)
    alpha = lora.scale * (lora.lora_rank or 1)
    of_experts = {name for name in tensors if ".experts." in name}
    return tensors, {
        "peft_type": "LORA",
        "r": lora.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(tensors.keys() - of_experts),
        "target_parameters": [STACKED_THERE[part] for part in STACKED_THERE if part in parts] if of_experts else None,
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
    if rule.form not in (STACKED_PAIRS, STACKED, ALTERNATING, TURNED):
        raise ConfigError(
            "`to`=peft: experts of this family have their columns elsewhere there; export merged (`to` hf)"
        )
    block = rule.theirs[0].partition(".experts.")[0]
    layer = f"{block}.experts".replace("block_sparse_moe", "mlp")  # its name in transformers 5
    inner = ".base_layer" if nested and adapter.name == "fc1" else ""
    name, rows = f"{OUTER}{layer}{inner}", (b.transpose(1, 2) if rule.form is ALTERNATING else b).flatten(1, -2)
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


def _targets(tensors: Iterable[str]) -> list[str]:
    """Names of layers as peft compares them with the end of a path: the last word, with the one before where blocks
    have it twice (c_proj of GPT-2)."""
    paths = {tuple(key.split(".")[-4:-2]) for key in tensors}
    last = [path[-1] for path in paths]
    return sorted({path[-1] if last.count(path[-1]) == 1 else ".".join(path) for path in paths})
