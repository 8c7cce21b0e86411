"""The text of `--help`, from the same schema as everything else."""

import functools
import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megalite.config.arguments import argument_flags, places, shown_flag
from megalite.config.names import CONSTANT_FLAGS, EXTRA_OPTIONS, RENAMED
from megalite.config.schema import OneOf, Option
from megalite.config.values import show
from megalite.errors import flag_of, spelled

_HEAD = """\
usage: pretrain_gpt.py [--config FILE.yaml ...] [--flag value ...]

Defaults < --config files, in order < flags. Names take - or _; every switch has a --no- form.
YAML keys are the same names with _, flat or in the sections below.

Enough to begin with (docs/tutorial.md leads through them):
  --config FILE                         the model and how it is trained, e.g. configs/quickstart.yaml
  --data-path FILE, --tokenizer-type TYPE, --tokenizer-model FILE
  --save DIR, --save-interval N, --auto-resume
  --train-iters N, --lr X, --micro-batch-size N
  --num-layers N, --hidden-size N
  --nprocs N                            processes on this machine
  --dry-run                             check everything, train nothing
"""


class Listed(NamedTuple):
    """One line of the list of flags.

    kind: `section`, `heading` (above flags that spell one field, `end` behind them), `flag`, or `argument` of the flag
        before it.
    value: what stands after its name. option: None for a flag with arguments.
    """

    kind: str
    name: str
    value: str = ""
    help: str = ""
    option: Option | None = None


def listing(options: Mapping[str, Option]) -> Iterator[Listed]:
    """Every flag in the order of the documentation, under the headings of `--help`."""
    shown = [option for option in options.values() if option.name not in places()]
    section = field = ""
    headed = False
    for option in options.values():
        if option.section != section:
            section, headed = option.section, False
            yield Listed("section", section)
        flag, _ = places().get(option.name, ("", ""))
        made = argument_flags().get(flag)
        if made is not None and option is next(options[name] for name in made.fields.values() if name in places()):
            yield Listed("flag", flag_of(flag), "NAME=VALUE ...", spelled(made.help, shown_flag))
            for argument, name in made.fields.items():
                part = options[name]
                value = "" if part.kind is bool else f"={value_text(part).removesuffix(' ...')}"
                value = f"[{value}]" if "alone" in part.facts else value  # it has a value where none is written
                yield Listed("argument", argument, value, _meaning(part), part)
        if flag:
            continue
        if option.field != field:
            if headed:
                yield Listed("end", "")
            headed = sum(each.field == option.field for each in shown) > 1
            if headed:
                words = (option.spells.__doc__ or "").partition(".")[0] if option.spells else ""
                yield Listed("heading", f"{words} (one of)" if issubclass(option.spells or object, OneOf) else words)
        field = option.field
        yield Listed("flag", option.flag, value_text(option), _meaning(option), option)


def usage(options: Mapping[str, Option]) -> str:
    """Render the help of all options, section by section. Accepted spellings are in docs/flags.md."""
    lines, wrapped = [_HEAD], functools.partial(textwrap.wrap, width=102, break_on_hyphens=False)
    for kind, name, value, text, option in listing(options):
        text += "" if option is None else default_text(option)
        if kind == "section":
            lines.append(f"\n{name}:")
        elif kind == "heading":
            lines.append(f"\n  {name}:")
        elif kind == "end":
            lines.append("")
        elif kind == "flag":
            lines.append(f"  {name} {value}".rstrip())
            lines += wrapped(text, initial_indent=" " * 8, subsequent_indent=" " * 8)
        else:
            lines += wrapped(f"{name}{value}: {text}", initial_indent=" " * 12, subsequent_indent=" " * 16)
    return "\n".join(lines)


def _meaning(option: Option) -> str:
    return spelled(str(option.facts["help"]), shown_flag)


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


def accepted_spellings() -> dict[str, str]:
    """Another name that is read -> what stands for it now, as users type it."""
    found = {name: shown_flag(name) for name, (flag, _) in places().items() if name != flag}
    found |= {alias: flag_of(target) for alias, target in RENAMED.items()}
    for alias, (target, value) in CONSTANT_FLAGS.items():
        found[alias] = flag_of("no_" + target) if value is False else f"{flag_of(target)} {show(value)}"
    return found | {name: spelled(now, shown_flag) for name, (_, now) in EXTRA_OPTIONS.items() if now}
