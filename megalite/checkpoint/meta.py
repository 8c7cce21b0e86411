"""The `meta` of a manifest and the configuration in it: typed reading of untrusted JSON, and does it fit this run?

Checksums prove that nothing has changed since it was written, not that a trainer has written it. A checkpoint's model
must be the run's, its optimizer state of the same kind; parallel and training flags may differ freely.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from megalite.checkpoint.format import StoredTensor
from megalite.config import Config, ModelConfig, architecture_differences
from megalite.errors import CheckpointError
from megalite.inventory import stage_parameters

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST = 2**62
# Flags of the optimizer that decide which tensors its state has, and in which dtype they are kept.
_STATE = ("optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")
T = TypeVar("T", bound="DataclassInstance")


class Meta:
    """An object of it. Every getter raises CheckpointError naming checkpoint and key; a default makes one optional."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{where}: is not an object; the checkpoint is damaged")
        self.raw: Mapping[str, Any] = raw
        self.where = where

    def wrong(self, key: str, what: str) -> CheckpointError:
        shown = str(self.raw.get(key, "missing"))[:40]
        return CheckpointError(f"{self.where}: {key} is {shown}, not {what}; the checkpoint is damaged")

    def section(self, key: str, default: Mapping[str, Any] | None = None) -> Meta:
        return Meta(self.raw.get(key, default), f"{self.where}: {key}")

    def integer(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        """A whole number from `low` on, below 2^62."""
        value = self.raw.get(key, default)
        if type(value) is not int or not low <= value < LARGEST:
            raise self.wrong(key, f"a whole number >= {low}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers >= 0; empty where there is none."""
        value = self.raw.get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < LARGEST for item in value):
            raise self.wrong(key, "a list of whole numbers >= 0")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self.raw.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list of numbers")
        return tuple(Meta({key: item}, self.where).number(key) for item in value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key, default)
        if type(value) not in (int, float) or not abs(value) <= 1e300 or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def build(self, cls: type[T]) -> T:
        """A dataclass whose fields are whole numbers >= 0, numbers and texts; of a `Literal` one of its values."""
        hints = typing.get_type_hints(cls)
        names = [field.name for field in fields(cls)]
        if set(names) != set(self.raw):
            odd = sorted(set(names) ^ set(map(str, self.raw)))
            raise CheckpointError(f"{self.where}: written by another version of megalite ({', '.join(odd)[:80]})")
        return cls(**{name: self._typed(name, hints[name]) for name in names})

    def _typed(self, key: str, hint: Any) -> Any:
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            if self.raw[key] is None:
                return None
            hint = typing.get_args(hint)[0]
        if hint is int:
            return self.integer(key)
        if hint is float:
            return self.number(key)
        value, choices = self.raw[key], typing.get_args(hint)
        if not isinstance(value, str) or (choices and value not in choices):
            raise self.wrong(key, f"one of {', '.join(choices)}" if choices else "a text")
        return value


def check_model(saved: ModelConfig, now: ModelConfig, where: str) -> None:
    """Raises CheckpointError naming every flag in which the checkpoint's model differs. where: how the message begins,
    e.g. `--load=runs/a`."""
    if differing := architecture_differences(saved, now):
        whose = " (the vocabulary of a tokenizer, if no flag gives it)" * ("vocab_size" in differing)
        raise CheckpointError(
            f"{where}: model differs from checkpoint: {_listed(differing)}{whose}; use the checkpoint's values, or "
            "`use_checkpoint_args`"
        )


def check_tensors(model: ModelConfig, tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Raises CheckpointError where a checkpoint does not hold the weights of the model that it describes. Asked before
    anything of the model's size is allocated: what a checkpoint can demand is bounded by what it holds."""
    if not model.vocab_size or model.num_layers > len(tensors):
        size = f"{model.num_layers} layers and a vocabulary of {model.vocab_size}"
        raise CheckpointError(f"{where}: damaged ({len(tensors)} tensors cannot be {size})")
    for name, parameter in stage_parameters(model, range(model.num_layers + 2)):
        stored = tensors.get(name)
        if parameter.frozen:  # beside adapters: stored where they were before
            continue
        if stored is None or stored.shape != tuple(parameter.shape):
            held = "holds none" if stored is None else f"holds {list(stored.shape)}"
            raise CheckpointError(
                f"{where}: damaged ({name} is {list(parameter.shape)} by its configuration, and it {held})"
            )


def check_state(saved: Config, now: Config, where: str) -> None:
    """Raises CheckpointError where a run of `now` cannot use the optimizer state of `saved`."""
    pairs = {name: (getattr(now.optimizer, name), getattr(saved.optimizer, name)) for name in _STATE}
    pairs["fp64"] = now.training.precision.fp64, saved.training.precision.fp64
    if differing := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        raise CheckpointError(
            f"{where}: its optimizer state differs: {_listed(differing)}; use the checkpoint's values, or "
            "start with fresh optimizer state (`no_load_optim`)"
        )


def _listed(differing: Mapping[str, tuple[Any, Any]]) -> str:
    """field -> (value now, value in the checkpoint), as text."""
    texts = {
        name: [str(v).lower() if v in (None, True, False) else str(v) for v in pair] for name, pair in differing.items()
    }
    return ", ".join(f"`{n}`={ours} (checkpoint {theirs})" for n, (ours, theirs) in texts.items())
