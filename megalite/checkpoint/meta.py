"""What a saver has put into a manifest's `meta`, read as what it is: JSON of unknown origin.

Checksums prove that nothing has changed since it was written, not that a trainer has written it.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from megalite.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST = 2**62
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
