"""Typed reading of an untrusted config.json: what we cannot represent is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.errors import ConfigError

LARGEST = 2**40


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
        """What `choices` makes of the value."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, value, f"not supported ({', '.join(choices)})")
        return choices[value]

    def section(self, key: str) -> Fields:
        """An object inside; empty where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "is not an object")
        return Fields(value, f"{self.where}: {key}")

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses any other value than those (an absent one is fine)."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.wrong(key, value, f"not supported (only {', '.join(map(str, allowed))})")

    def _missing(self, key: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is missing")
