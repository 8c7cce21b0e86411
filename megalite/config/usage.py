"""The text of `--help`, from the same schema as everything else."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from megalite.config.names import CONSTANT_FLAGS, RENAMED
from megalite.config.schema import OneOf, Option
from megalite.config.values import show
from megalite.errors import flag_of

_HEAD = """\
usage: pretrain_gpt.py [--config FILE.yaml ...] [--flag value ...]

Defaults < --config files, in order < flags. Names take - or _; every switch has a --no- form.
YAML keys are the same names with _, flat or in the sections below.
"""


def usage(options: Mapping[str, Option], width: int = 110) -> str:
    """Render the help of all options, section by section."""
    lines = [_HEAD]
    section = field = ""
    for option in options.values():
        if option.section != section:
            section = option.section
            lines.append(f"\n{section}:")
        if option.field != field:
            field = option.field
            lines += [f"  {title(option)}:"] if option.spells else []
        indent = " " * (4 if option.spells else 2)
        head = f"{indent}{option.flag} {value_text(option)}".rstrip()
        tail = option.help + default_text(option)
        also = ", ".join(flag_of(alias) for alias in aliases_of(option.name))
        text = tail + (f" [also {also}]" if also else "")
        lines += [head, *textwrap.wrap(text, width - 8, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    return "\n".join(lines)


def title(option: Option) -> str:
    """What stands above the spellings of one field."""
    words = (option.spells.__doc__ or "").partition(".")[0] if option.spells else ""
    return f"{words} (one of)" if issubclass(option.spells or object, OneOf) else words


def value_text(option: Option) -> str:
    """What stands after the flag: nothing for a switch, the choices, or a placeholder."""
    if option.kind is bool:
        return ""
    if option.choices is not None:
        return "{" + ",".join(option.choices) + "}"
    name = option.facts.get("metavar") or {int: "N", float: "X", str: "TEXT"}[option.kind]
    return f"{name} ..." if option.many else str(name)


def default_text(option: Option) -> str:
    """The default in brackets, where there is one to tell."""
    if option.required:
        return " (required)"
    if option.default is None or option.default == () or option.kind is bool:
        return " (default on)" if option.default is True else ""
    return f" (default {show(option.default)})"


def aliases_of(name: str) -> list[str]:
    aliases = [alias for alias, target in RENAMED.items() if target == name]
    aliases += [alias for alias, (target, _) in CONSTANT_FLAGS.items() if target == name]
    helpers = {
        "virtual_pipeline_model_parallel_size": ["num_layers_per_virtual_pipeline_stage"],
        "num_query_groups": ["group_query_attention"],
    }
    return aliases + helpers.get(name, [])
