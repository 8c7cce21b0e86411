"""`Config` <-> the text of config.yaml and the dictionary of a checkpoint's manifest."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from megalite.config.model_parts import OF_MODULES
from megalite.config.optimizer import readers_of
from megalite.config.root import SECTIONS, Config
from megalite.config.schema import Option, build_section, flat, options_of, rivals_of
from megalite.config.values import bounds_problem, show
from megalite.errors import ConfigError


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Turn a configuration into nested dictionaries of JSON values."""
    result: dict[str, dict[str, Any]] = {}
    for section, cls in SECTIONS.items():
        values = flat(getattr(config, section))
        kept = _saved(section, cls, values)
        if section == "model" and config.model.is_foreign:
            kept = [name for name in kept if name in OF_MODULES]
        result[section] = {n: list(values[n]) if isinstance(values[n], tuple) else values[n] for n in kept}
    return result


def from_dict(data: Mapping[str, Mapping[str, Any]], where: str = "config") -> Config:
    """Rebuild a configuration from `to_dict`'s form, strictly.

    data: section -> field -> value; a field that is left out takes its default.
    where: what an error line begins with.
    Raises ConfigError for an unknown section or field, a wrong type, a broken bound or a missing required field.
    """
    problems = [f"{where}: unknown section {name[:80]!r}" for name in data if name not in SECTIONS]
    sections: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        given: Any = data.get(section, {})
        if not isinstance(given, Mapping):
            problems.append(f"{where}: {section} is {str(given)[:40]!r}, not a section")
            continue
        options = {option.name: option for option in options_of(section, cls)}
        problems += [f"{where}: unknown key {f'{section}.{name}'[:80]!r}" for name in given if name not in options]
        arguments = {}
        foreign = section == "model" and given.get("model_module") is not None
        for name, option in options.items():
            if foreign and option.required and name not in OF_MODULES:
                arguments[name] = option.kind(1)
                continue
            if name not in given:
                if option.required:
                    problems.append(f"{where}: '{section}.{name}' is missing")
                continue
            arguments[name], reason = _checked(option, given[name])
            if reason is not None:
                problems.append(f"{where}: {section}.{name}={given[name]!r:.80}: {reason}")
        if not problems:
            sections[section] = build_section(cls, arguments)
    if problems:
        raise ConfigError(problems)
    return Config(**sections)


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None, *, every: bool = True) -> str:
    """Write a configuration as YAML, nested in sections, with the origin of each value beside it where it is known.
    every: also the values that are defaults."""
    derived = _derived(config)
    lines = []
    for section, values in to_dict(config).items():
        options = {option.name: option for option in options_of(section, SECTIONS[section])}
        shown = {
            name: value
            for name, value in values.items()
            if every or (origins or {}).get(name, "default") != "default" or not _is_default(options[name], value)
        }
        lines += [f"{section}:"] if shown else []
        for name, value in shown.items():
            line = f"  {name}: {_scalar(value)}"
            notes = [f"derived: {show(derived[name])}"] if value is None and name in derived else []
            if origins is not None:
                origin = origins.get(name, "default")
                notes.insert(0, origin if origin != "default" or _is_default(options[name], value) else "worked out")
            lines.append(f"{line:<44}  # {'; '.join(notes)}" if notes else line)
    return "\n".join(lines) + "\n"


def _saved(section: str, cls: type, values: Mapping[str, Any]) -> list[str]:
    """The flags to write: of several spellings of a field the given one, or the first; of single optimizers' numbers
    those that are read."""
    options, rivals, written = options_of(section, cls), rivals_of(section, cls), set[str]()
    for option in sorted(options, key=lambda option: values[option.name] == option.default):
        readers = readers_of(option)
        if readers is not None and values["optimizer"] not in readers and values[option.name] == option.default:
            continue
        if option.facts.get("saved", True) and written.isdisjoint(rivals[option.name]):
            written.add(option.name)
    return [option.name for option in options if option.name in written]


def _checked(option: Option, value: Any) -> tuple[Any, str | None]:
    """Check the type and bounds of a JSON value; returns (value as the field wants it, reason against it)."""
    if value is None:
        return None, None if option.optional else "expected a value"
    if option.many:
        if option.kind is not str and type(value) is option.kind:
            value = [value]  # one number is a list of one, as for flags and in files
        if not isinstance(value, (list, tuple)):
            return value, "expected a list"
    items = [*value] if option.many else [value]
    if option.kind is float:
        items = [float(item) if type(item) is int and abs(item) < 10**300 else item for item in items]
    if any(type(item) is not option.kind for item in items):
        return value, f"expected {option.kind.__name__}"
    result = tuple(items) if option.many else items[0]
    return result, bounds_problem(option, result)


def _is_default(option: Option, value: Any) -> bool:
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    return not option.required and bool(value == default)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)  # as YAML writes it, in a tenth of the time
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _derived(config: Config) -> dict[str, Any]:
    """What fields left open come to, where that needs no world."""
    model, parallel, of_file = config.model, config.parallel, config.parallel.pipeline_schedule_file is not None
    return {
        "ffn_hidden_size": model.ffn_size,
        **({"moe_ffn_hidden_size": model.expert_ffn_size} if model.experts.num_experts else {}),
        "num_query_groups": model.query_groups,
        **({"kv_channels": model.head_dim} if model.mixer == "attention" else {}),
        "max_position_embeddings": model.max_positions,
        **({} if of_file else {"pipeline_schedule": parallel.schedule}),
        **({} if of_file else {"virtual_pipeline_model_parallel_size": parallel.num_chunks}),
        "staleness_correction": config.staleness.method,
        "staleness_lookahead": config.staleness.lookahead,
    }
