"""What a field of the configuration carries besides its type and default: help, choices and bounds.

One schema serves the command line, YAML files, the saved `config.yaml` and the flag table of the documentation.
A section is a frozen dataclass (`Section`) whose fields are made by `option` (with a default) or `required` (without)::

    micro_batch_size: int = required("samples of one forward pass of one replica", ge=1)

A field that several flags spell is a small section of them (`Spelled`, or `OneOf` where a run gives one)::

    length: TrainingLength = TrainingLength()        # --train-iters, --train-samples or --train-tokens
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from megalite.errors import flag_of, in_flags


def option(default: Any, help: str, **facts: Any) -> Any:
    """Declare a field with a default.

    default: value when neither a file nor a flag gives one; None means "derived" or "off", as the help says.
    help: one sentence for `--help` and the flag table.
    facts: `choices` (tuple), bounds `ge`, `gt`, `le`, `lt`, `metavar`, `hint` (the advice in the message of a broken
        bound; without one it is the nearest legal value, or the default), `saved=False` (left out of a saved
        config.yaml), `words` (one value of several words, which a shell may have taken apart), `way` (of a `OneOf`:
        flags of one way go together, one of none with all), `one_of` (a word: fields that share it are ways of one
        thing, as those of a `OneOf`), `rival` (a field that cannot stand beside this one, whatever their ways), `needs`
        (a flag of the same section without which this one is refused), `only_with` (one without which it has no effect,
        a warning), `stores` (a path that may be a URL of a store), `units` (an integer that may end in K, M, G, B or
        T), `flag` (it is an argument of that flag), `arg` (by this word; else its name without `prefix` or the flag's),
        `alone` (its value where none is written), `switch` (of the flag that it turns on: `arguments`), `free` (of the
        model section: it changes how the model is trained or held, not which function of the weights it is).
    """
    return dataclasses.field(default=default, metadata={"help": help, **facts})


def required(help: str, **facts: Any) -> Any:
    """Declare a field that a file or a flag must give."""
    return dataclasses.field(metadata={"help": help, "required": True, **facts})


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Base of the sections: frozen dataclasses that are made by keywords. facts: of all fields that say nothing else,
    but not of the field that they name."""

    def __init_subclass__(cls, **facts: Any) -> None:
        for name, declared in vars(cls).items():
            if isinstance(declared, dataclasses.Field):
                shared = {key: value for key, value in facts.items() if value != name}
                declared.metadata = types.MappingProxyType({**shared, **declared.metadata})
        said = cls.__doc__ or ""  # `python -OO` has none, in whose place a dataclass would put its signature
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.__doc__ = said


class Spelled(Section):
    """Base of the value of a field that several flags spell: its attributes are these flags."""


class OneOf(Spelled):
    """... of which a run gives one. What a later file or flag gives replaces what stood before it."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One flag, ready for a parser: a field, or one of the spellings of a field.

    section: name of the section (`model`, `parallel`, ...).
    name: Megatron's flag name with underscores.
    kind: `int`, `float`, `str` or `bool`: the type of the value, or of one item of it.
    many: the value is a tuple of `kind`.
    optional: None is a legal value.
    field: the field of the section that it sets.
    spells: the type of that field, where it has several spellings.
    """

    section: str
    name: str
    kind: type
    many: bool = False
    optional: bool = False
    default: Any = None
    facts: typing.Mapping[str, Any] = dataclasses.field(default_factory=dict)
    field: str = ""
    spells: type | None = None

    @property
    def flag(self) -> str:
        """The flag as users write it: `--micro-batch-size`."""
        return flag_of(self.name)

    @property
    def marked(self) -> str:
        """The option as messages name it (`megalite.errors`)."""
        return f"`{self.name}`"

    def excludes(self, other: Option) -> bool:
        """Whether the two give one field in ways that cannot stand together."""
        if other.name == self.facts.get("rival") or self.name == other.facts.get("rival"):
            return True
        groups = [each.facts.get("one_of") or each.spells for each in (self, other)]
        if groups[0] != groups[1] or not (isinstance(groups[0], str) or issubclass(groups[0] or object, OneOf)):
            return False
        ways = [each.facts.get("way", each.name) for each in (self, other)]
        return None not in ways and ways[0] != ways[1]

    @property
    def names_a_file(self) -> bool:
        """Whether the value, or an item of it, is a path."""
        return self.facts.get("metavar") in ("DIR", "FILE", "PATH", "MODULE:FACTORY")

    @property
    def required(self) -> bool:
        """Whether a file or a flag must give the value."""
        return bool(self.facts.get("required", False))

    @property
    def help(self) -> str:
        """What it means, in the words of the command line."""
        return in_flags(str(self.facts["help"]))

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The legal texts, or None where the values are not a short list."""
        choices: tuple[str, ...] | None = self.facts.get("choices")
        return choices


@functools.cache
def _hints(cls: type) -> dict[str, typing.Any]:
    return typing.get_type_hints(cls)


@functools.cache
def options_of(section: str, cls: type) -> tuple[Option, ...]:
    """List the flags of a section dataclass as `Option`s, in the order they are written."""
    hints = _hints(cls)
    found: list[Option] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if _is_spelled(hint):
            parts = options_of(section, hint)
            found += (dataclasses.replace(part, field=field.name, spells=hint) for part in parts)
            continue
        kind, many, optional = _simplify(hint)
        default = None if field.default is dataclasses.MISSING else field.default
        found.append(Option(section, field.name, kind, many, optional, default, field.metadata, field.name))
    return tuple(found)


@functools.cache
def rivals_of(section: str, cls: type) -> typing.Mapping[str, frozenset[str]]:
    """Flag of a section -> the flags that cannot stand beside it."""
    options = options_of(section, cls)
    return {one.name: frozenset(other.name for other in options if one.excludes(other)) for one in options}


def build_section(cls: type, values: typing.Mapping[str, Any]) -> Any:
    """Build a section from values by flag; what is left out takes its default."""
    arguments = {}
    for name, hint in _hints(cls).items():
        if _is_spelled(hint):
            arguments[name] = build_section(hint, values)
        elif name in values:
            arguments[name] = values[name]
    return cls(**arguments)


def flat(section: Any) -> dict[str, Any]:
    """The values of a section by flag: the inverse of `build_section`."""
    found: dict[str, Any] = {}
    for name, value in vars(section).items():
        if isinstance(value, Spelled):
            found |= flat(value)
        else:
            found[name] = value
    return found


def _is_spelled(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Spelled)


def _simplify(hint: Any) -> tuple[type, bool, bool]:
    """Reduce `int`, `int | None`, `tuple[int, ...]` or `tuple[int, ...] | None` to (item type, many, optional)."""
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        optional = True
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True, optional
    assert hint in (int, float, str, bool), f"config fields are simple: {hint}"
    return hint, False, optional
