"""Adapters as `peft` keeps them, beside their Hugging Face model: read as one merged model.

    adapter_config.json         rank, alpha
    adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [r, in], lora_B [out, r]

Only plain LoRA of linear layers; what else peft can do is refused, never left out.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import COMMITTED, committed, is_huggingface
from megalite.comm import Axis
from megalite.convert.adapters import digest_of
from megalite.convert.hf_files import CONFIG, HuggingFaceSource, read_json, safetensors
from megalite.convert.hf_tokenizer import read_tokenizer
from megalite.convert.peft_writing import DIGEST, OUTER, PEFT_CONFIG, PEFT_WEIGHTS
from megalite.data import Tokenizer
from megalite.errors import CheckpointError, ConfigError
from megalite.files import hub_advice
from megalite.stores import Place

logger = logging.getLogger(__name__)
UNSET: tuple[Any, ...] = (None, False, [], {})
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": UNSET,
    "lora_bias": UNSET,
    "modules_to_save": UNSET,
    "alpha_pattern": UNSET,
    "layer_replication": UNSET,
    "target_parameters": UNSET,
    "alora_invocation_tokens": UNSET,
}
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
