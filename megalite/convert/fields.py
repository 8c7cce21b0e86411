"""Typed reading of an untrusted config.json: what we cannot represent is refused by name.

RoPE is read and written for all families: transformers 5 has `rope_parameters`, 4.57 `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalite.config import ModelConfig, RopeScaling
from megalite.errors import ConfigError

LARGEST, MOST_LAYERS = 2**40, 10_000
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = "original_max_position_embeddings"
MSCALES = ("mscale", "mscale_all_dim")
KINDS = {"default": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


class Fields:
    """The object in a config.json. Every getter raises ConfigError naming the file and the key.

    A default of None makes the key required.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def wrong(self, key: str, value: Any, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} {str(value)[:60]!r} {what}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; `null` counts as absent."""
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < LARGEST:
            what = f"is not a positive integer{f' below {LARGEST:,}' if type(value) is int and value > 0 else ''}"
            raise self._missing(key) if value is None else self.wrong(key, value, what)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self._missing(key) if value is None else self.wrong(key, value, "is not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "is not true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """The value, translated by `choices`."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, value, f"not supported ({', '.join(choices)})")
        return choices[value]

    def of_layers(self, key: str, kinds: Mapping[str, bool], usual: Callable[[int], bool]) -> list[bool]:
        """What the words in a list mean, layer by layer. usual: the meaning for a layer where there is no list."""
        words, layers = self.get(key), self.integer("num_hidden_layers")
        if words is None:
            return [usual(index) for index in range(min(layers, MOST_LAYERS))]
        if not isinstance(words, list) or len(words) != layers or not all(word in [*kinds] for word in words):
            raise self.wrong(key, words, f"is not a list of {layers} of {', '.join(kinds)}")
        return [kinds[word] for word in words]

    def section(self, key: str) -> Fields:
        """An object inside; empty where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "is not an object")
        return Fields(value, f"{self.where}: {key}")

    def but(self, **values: Any) -> Fields:
        """The same object with other values."""
        return Fields({**self.raw, **values}, self.where)

    def fixed(self, values: Mapping[str, Any]) -> None:
        """Refuses any other than these values (absent ones are fine)."""
        for key, value in values.items():
            self.only(key, value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses any other value than those (an absent one is fine)."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.wrong(key, value, f"not supported (only {', '.join(map(str, allowed))})")

    def _missing(self, key: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is missing")


def name_there(names: Mapping[str, str], ours: str) -> str:
    """The first of `names` for the value `ours`, as `choice` reads it; without one the first of all, which loses it."""
    return next((theirs for theirs, name in names.items() if name == ours), next(iter(names)))


def read_common(
    fields: Fields, activations: Mapping[str, str], usual: str, positions: int | None = None
) -> dict[str, Any]:
    """The fields of ModelConfig that have the same keys in most families. usual, positions: an activation and a length
    where the file has none. Raises ConfigError."""
    longest = fields.integer("max_position_embeddings", positions)
    return dict(
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        ffn_hidden_size=fields.integer("intermediate_size"),
        num_attention_heads=fields.integer("num_attention_heads"),
        seq_length=longest,
        max_position_embeddings=longest,
        activation=fields.choice("hidden_act", activations, usual),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings", False),
        init_method_std=fields.number("initializer_range", 0.02),
        vocab_size=fields.integer("vocab_size"),
        **read_rotary(fields),
    )


def write_common(model: ModelConfig, activations: Mapping[str, str]) -> dict[str, Any]:
    """What `read_common` reads."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": name_there(activations, model.activation),
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        "use_cache": True,
        **write_rotary(model),
    }


def read_rotary(fields: Fields) -> dict[str, Any]:
    """The rotary fields of ModelConfig. Raises ConfigError for a scaling that we do not have."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    scaling = new if new.raw else old
    kind = scaling.choice("rope_type" if "rope_type" in scaling.raw else "type", KINDS, "default")
    places = ((new, "rope_theta"), (fields, "rope_theta"), (fields, "rotary_emb_base"))
    # the first that is there, be it 0, which is refused
    base = next((place.number(key) for place, key in places if place.get(key) is not None), 10000.0)
    found: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base}
    if kind == "linear":
        found["rope_scaling"] = RopeScaling(rotary_seq_len_interpolation_factor=scaling.number("factor"))
    if kind == "llama3":
        scaling.fixed(LLAMA3)
        found["rope_scaling"] = RopeScaling(
            use_rope_scaling=True,
            rope_scaling_factor=scaling.number("factor"),
            rope_scaling_original_length=scaling.integer(LENGTH, 8192),
        )
    if kind == "yarn":
        found["rope_scaling"] = _read_yarn(scaling)
    return found


def _read_yarn(scaling: Fields) -> RopeScaling:
    scales = {name: scaling.number(name) for name in MSCALES if scaling.get(name)}  # 0 means absent there
    made = RopeScaling(
        use_rope_scaling=True,
        rope_scaling_type="yarn",
        rope_scaling_factor=scaling.number("factor"),
        rope_scaling_original_length=scaling.integer(LENGTH),
        yarn_beta_fast=scaling.number("beta_fast", 32.0),
        yarn_beta_slow=scaling.number("beta_slow", 1.0),
        yarn_correction_range_round_to_int=scaling.flag("truncate", True),
        **(scales if len(scales) == len(MSCALES) else {}),
    )
    stated = scaling.get("attention_factor")
    if stated is not None and abs(scaling.number("attention_factor") - made.yarn_temperature) > 1e-6:
        raise scaling.wrong(
            "attention_factor", stated, f"not supported (only {made.yarn_temperature:.6g}, the paper's)"
        )
    return made


def _write_yarn(scaling: RopeScaling) -> dict[str, Any]:
    """What is not the paper's."""
    found: dict[str, Any] = {"beta_fast": scaling.yarn_beta_fast, "beta_slow": scaling.yarn_beta_slow}
    found = found if tuple(found.values()) != (32.0, 1.0) else {}
    if not scaling.yarn_correction_range_round_to_int:
        found["truncate"] = False
    if scaling.mscale is not None:
        found |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return found


def read_rotaries(fields: Fields, base: float, window_base: float | None, *, having: Sequence[bool]) -> dict[str, Any]:
    """The same where layers with a window turn otherwise: `rope_parameters` by the kind of a layer (transformers 5), or
    `rope_scaling` of layers without a window beside two bases.

    base, window_base: where the file has none; a window_base of None is the other one. having: which layers have a
    window.
    """
    new = fields.section("rope_parameters")
    by_kind = {kind: new.section(kind) for kind in ("full_attention", "sliding_attention")}
    if not any(kind in new.raw for kind in by_kind):
        by_kind = {"full_attention": new, "sliding_attention": Fields({}, new.where)}
    full = fields.but(rope_parameters=by_kind["full_attention"].raw, rope_theta=fields.get("rope_theta", base))
    found, local = read_rotary(full), by_kind["sliding_attention"]
    local.only("rope_type", "default")
    by_kind["full_attention"].only("truncate", True)  # transformers reads it elsewhere, and rounds
    there = local.number("rope_theta", found["rotary_base"] if window_base is None else window_base)
    if having and all(having):
        return read_rotary(Fields({"rope_theta": there}, fields.where))
    alike = there == found["rotary_base"] and "rope_scaling" not in found
    return found | {"window_rotary_base": there if any(having) and not alike else None}


def read_rotary_share(fields: Fields, usual: float, key: str = "partial_rotary_factor") -> float:
    """The part of a head's channels that is rotated. usual, key: a part and a place where `rope_parameters` have
    none."""
    new = fields.section("rope_parameters")
    stated = new.get("partial_rotary_factor") is not None
    return new.number("partial_rotary_factor") if stated else fields.number(key, usual)


def with_rotary_share(model: ModelConfig, written: Mapping[str, Any]) -> dict[str, Any]:
    """written: a config.json without it."""
    part = {"partial_rotary_factor": model.rotary_percent}
    return {**written, "rope_parameters": written["rope_parameters"] | part, **part}


def write_rotary(model: ModelConfig) -> Mapping[str, Any]:
    """The entries for both generations of transformers."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    ours = model.rope_scaling
    if ours.use_rope_scaling:
        more = LLAMA3 if ours.rope_scaling_type == "llama3" else _write_yarn(ours)
        scaling = {"rope_type": ours.rope_scaling_type, "factor": ours.rope_scaling_factor, **more}
        scaling[LENGTH] = ours.rope_scaling_original_length
    elif ours.rotary_seq_len_interpolation_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": ours.rotary_seq_len_interpolation_factor}
    return {
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_theta": model.rotary_base, **scaling},
        "rope_scaling": scaling if len(scaling) > 1 else None,
    }


def write_rotaries(model: ModelConfig, window_base: float | None) -> Mapping[str, Any]:
    """What `read_rotaries` reads. window_base: of a model without windows."""
    there = model.rotary_base if window_base is None else window_base
    own = there if model.window_size is None else model.window_rotary_base or model.rotary_base
    full = write_rotary(model)
    kinds = {"full_attention": full["rope_parameters"]}
    kinds["sliding_attention"] = {"rope_theta": own, "rope_type": "default"}
    return {**full, "rope_parameters": kinds}
