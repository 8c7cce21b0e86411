"""Where a model comes from: what its Hugging Face folder says beyond the architecture, kept from the first conversion
through training to the export.

    meta "converted_from"   {"model_type", "bos_token_id", "eos_token_id", "pad_token_id", "generation_config",
                            "hub_id", "tokenizer", "transformers_version"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from megalite.data import NullTokenizer, Tokenizer
from megalite.strangers import PROGRAMS, read_limited

MOST_BYTES = 128 << 20  # of a tokenizer's file
ORIGIN_META = "converted_from"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Of these files one is what a tokenizer of ours is made of.
DEFINITIONS = ("tokenizer.json", "vocab.json", "tokenizer.model")
#: Entries of generation_config.json that hold whatever the tokens are.
SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size",
    "max_length", "max_new_tokens", "min_new_tokens", "num_beams",
)  # fmt: skip
_CACHED = re.compile(r"models--([\w.-]+)/snapshots/[^/]+", re.ASCII)
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class Origin:
    """Facts of a Hugging Face model that training does not use; `model_type` is None where there was none."""

    model_type: str | None = None
    # `eos_token_id` and others as config.json has them: a number, a list, or null.
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] | None = None  # content of generation_config.json
    hub_id: str | None = None  # name on the Hub of the model that the weights were first read from, where known
    tokenizer: Mapping[str, str] = field(default_factory=dict)  # checksums of the files that decided its ids, by name
    transformers_version: str | None = None  # which wrote config.json: transformers reads some tokenizers by it

    def to_meta(self) -> dict[str, Any]:
        """For a checkpoint's meta."""
        known = {"generation_config": self.generation, "hub_id": self.hub_id, "tokenizer": dict(self.tokenizer) or None}
        known["transformers_version"] = self.transformers_version
        there = {name: value for name, value in known.items() if value is not None}
        return {"model_type": self.model_type, **self.special_tokens, **there}

    @classmethod
    def from_meta(cls, raw: Any) -> Origin:
        """Reads what `to_meta` writes; anything else in it is dropped."""
        if not isinstance(raw, Mapping):
            return cls()
        generation, hub_id, files = raw.get("generation_config"), raw.get("hub_id"), raw.get("tokenizer")
        digests = files.items() if isinstance(files, Mapping) else ()
        return cls(
            **_said(raw),
            generation=generation if isinstance(generation, Mapping) else None,
            hub_id=hub_id if isinstance(hub_id, str) and is_hub_id(hub_id) else None,
            tokenizer={name: digest for name, digest in digests if name in DEFINITIONS and isinstance(digest, str)},
        )

    @classmethod
    def of_folder(cls, folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> Origin:
        """Of a Hugging Face folder with this config.json and generation_config.json. Raises DataError."""
        files = {name: folder / name for name in DEFINITIONS if (folder / name).is_file()}
        kept = None if generation is None else {k: v for k, v in generation.items() if k != PROGRAMS}
        digests = {name: xxh3_64_hexdigest(read_limited(file, "`load`", MOST_BYTES)) for name, file in files.items()}
        return cls(**_said(config), generation=kept, hub_id=hub_id_of(folder), tokenizer=digests)

    def has_tokens_of(self, tokenizer: Tokenizer) -> bool:
        """Whether the ids that it names are this tokenizer's: not where a run has chosen another one."""
        if not self.tokenizer or tokenizer.kind == NullTokenizer.kind:
            return True
        own = {name: content for name, content in tokenizer.files().items() if name in self.tokenizer}
        return any(xxh3_64_hexdigest(content) == self.tokenizer[name] for name, content in own.items())


def _said(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says, or a meta made of it."""
    kind, version = raw.get("model_type"), raw.get("transformers_version")
    legible = isinstance(version, str) and re.fullmatch(r"[\w.+-]{1,40}", version, re.ASCII)
    return {
        "model_type": kind if isinstance(kind, str) else None,
        "special_tokens": {name: raw[name] for name in SPECIAL_TOKENS if name in raw and _is_token(raw[name])},
        "transformers_version": version if legible else None,
    }


def _is_token(value: Any) -> bool:
    many = isinstance(value, list) and all(type(item) is int for item in value)
    return value is None or type(value) is int or many


def hub_id_of(folder: Path) -> str | None:
    """The name of a model in Hugging Face's cache, `.../models--ORG--NAME/snapshots/REVISION`; None of other folders:
    what config.json says of itself (`_name_or_path`) is the model before, or a path."""
    found = _CACHED.fullmatch("/".join(folder.resolve().parts[-3:]))
    name = re.sub("-{2}", "/", found[1]) if found else ""
    return name if is_hub_id(name) else None


def is_hub_id(text: str) -> bool:
    """Whether a text has the form ORG/NAME, or NAME of the oldest models."""
    return _HUB_ID.fullmatch(text) is not None
