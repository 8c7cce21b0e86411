"""Is this configuration legal at this world size? The one validator: parser, planner and tests call it.

`config_problems` is pure: no file is read, nothing is printed, and every problem is found in one pass. A sampler draws
random layouts and keeps those for which `config_problems(config, world_size)` is empty.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalite.config import rules
from megalite.config.model import ModelConfig
from megalite.config.model_parts import OF_MODULES
from megalite.config.optimizer import readers_of
from megalite.config.root import SECTIONS, Config, all_options
from megalite.config.schema import Option, build_section, flat, options_of
from megalite.config.values import as_typed, bounds_problem, show


def config_problems(config: Config, world_size: int, *, broken: frozenset[str] = frozenset()) -> list[str]:
    """List what is wrong, one line each, in the form "`setting`=value: what (facts); fix".

    broken: fields whose value is a stand-in (the parser has reported them): rules that speak of them are silent.
    """
    lines: list[str] = []
    silent = {option.marked for name, option in all_options().items() if name in broken}
    for section, cls in SECTIONS.items():
        values = flat(getattr(config, section))
        given = _given(options_of(section, cls), values)
        stand_ins: dict[str, Any] = {}
        for option in given:
            value = values[option.name]
            reason = bounds_problem(option, value)
            if reason is not None:
                lines.append(f"{option.marked}={show(value)}: {reason}")
                stand_ins[option.name] = placeholder(option)
                silent.add(option.marked)
        if stand_ins:
            values |= stand_ins
            given = _given(given, values)
            config = replace(config, **{section: build_section(cls, values)})
        lines += _contradictions(given, values)
        needing = _unaccompanied(given, values, "needs")
        lines += (line for line in needing if not _mentions(line, silent))
    if config.model.is_foreign:  # what we say of our own model's sizes does not concern it
        silent |= {option.marked for option in options_of("model", ModelConfig) if option.name not in OF_MODULES}
    for rule, setting in rules.RULES:
        if setting is None or rules.beside.is_on(config, setting):
            lines += (line for line in rule(config, world_size) if not _mentions(line, silent))
    lines += rules.foreign.foreign_module(config, world_size)
    return list(dict.fromkeys(lines))


def layout_problems(config: Config, world_size: int) -> list[str]:
    """List why `world_size` ranks cannot hold the model in this layout, without training it."""
    return [line for rule in rules.LAYOUT_RULES for line in rule(config, world_size)]


def _given(options: Sequence[Option], values: Mapping[str, Any]) -> list[Option]:
    """Those that have not their defaults, which are legal."""
    return [option for option in options if values[option.name] != option.default]


def _contradictions(given: Sequence[Option], values: Mapping[str, Any]) -> Iterator[str]:
    """Spellings of one field, of which only one can be meant."""
    for number, option in enumerate(given):
        rival = next((before for before in given[:number] if option.excludes(before)), None)
        if rival is not None:
            pair = [as_typed(each.marked, values[each.name]) for each in (option, rival)]
            yield f"{pair[0]}: contradicts {pair[1]}; give one of them"


def _unaccompanied(given: Sequence[Option], values: Mapping[str, Any], tie: str) -> Iterator[str]:
    """Settings of something that is off. tie: `needs` or `only_with`."""
    for option in given:
        other = option.facts.get(tie)
        if other is not None and not values[other]:
            flag, typed = f"`{other}`", as_typed(option.marked, values[option.name])
            idle = f"has no effect without {flag}; add that, or drop this"
            yield f"{typed}: needs {flag}" if tie == "needs" else f"{typed}: {idle}"


def config_warnings(config: Config, world_size: int) -> list[str]:
    """List what is legal but doubtful, one line each; `config` has no problems."""
    lines: list[str] = []
    for section, cls in SECTIONS.items():
        values = flat(getattr(config, section))
        given = _given(options_of(section, cls), values)
        lines += _unaccompanied(given, values, "only_with")
        for option in given:
            readers = readers_of(option)
            if readers is not None and values["optimizer"] not in readers:
                typed = as_typed(option.marked, values[option.name])
                lines.append(f"{typed}: has no effect with `optimizer`={values['optimizer']}; drop it")
    return lines + rules.layout.warnings(config, world_size)


def placeholder(option: Option) -> Any:
    """A legal stand-in for a value that is missing or broken."""
    return option.kind(1) if option.required else option.default


def _mentions(line: str, settings: set[str]) -> bool:
    return any(setting in line for setting in settings)
