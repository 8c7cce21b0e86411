"""Write docs/flags.md from the schema of the configuration, or check that it is up to date (--check)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalite import schedule as schedules
from megalite.config import NOT_NEEDED, SECTIONS, Option, accepted_spellings, all_options, listing, show
from megalite.errors import flag_of, in_flags
from megalite.schedule import SCHEDULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

_HEAD = """\
# Flags

Written by `python tools/make_flag_table.py` from the schema in `megalite/config/`; do not edit.

Every flag is also a YAML key (`--micro-batch-size 4` is `micro_batch_size: 4`, flat or in its section), `-` and `_`
mean the same, and every switch has a `--no-` form. Defaults < family defaults < `--config` files in order < flags.
Flags under a heading in italics spell one field; `one of`: a later file or flag takes the place of another spelling.
A flag with `NAME=VALUE ...` takes the arguments below it, apart by spaces or commas: `--wandb project=lm entity=us`; in
a file `wandb: {project: lm, entity: us}`.
`--config FILE` may be repeated; `--help` prints this table; `--dry-run` prints every value with its origin.
"""


def flag_table() -> str:
    """The whole page, Markdown."""
    parts = [_HEAD]
    for each in listing(all_options()):
        if each.kind == "section":
            words = (SECTIONS[each.name].__doc__ or "").splitlines()[0]
            parts.append(f"\n## {each.name}\n\n{words}\n\n")
            parts.append("| flag | value | default | meaning |\n| --- | --- | --- | --- |\n")
        elif each.kind == "heading":
            parts.append(f"| *{each.name}:* | | | |\n")
        else:
            name, value = f"`{each.name}`", f"`{_cell(each.value)}`" if each.value else "switch"
            if each.kind == "argument":
                name, value = "", f"`{each.name}{_cell(each.value)}`"
            parts.append(f"| {name} | {value} | {_default(each.option)} | {_cell(each.help)} |\n")
    parts += [_spellings(), _combinations()]
    parts.append("\n## Flags of Megatron-LM that are refused\n\nEach gives one line that says this.\n\n")
    parts.append("| flag | reason |\n| --- | --- |\n")
    parts += [f"| `{flag_of(name)}` | {in_flags(reason)} |\n" for name, reason in sorted(NOT_NEEDED.items())]
    return "".join(parts)


def _default(option: Option | None) -> str:
    if option is None:
        return ""
    if option.kind is bool:
        return "on" if option.default else "off"
    if option.required:
        return "**required**"
    return "" if option.default in (None, ()) else f"`{show(option.default)}`"


def _spellings() -> str:
    """Other names that are read: on the command line, and with `_` in files."""
    lines = [
        "\n## Accepted spellings\n\n",
        "Megatron-LM's names, and those of older runs, of what has another flag here; files take them with `_`.\n\n",
        "| spelling | stands for |\n| --- | --- |\n",
    ]
    lines += [f"| `{flag_of(name)}` | `{meant}` |\n" for name, meant in sorted(accepted_spellings().items())]
    return "".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _combinations() -> str:
    """Which ZeRO stage goes with which schedule, and what a schedule asks for."""
    lines = [
        "\n## What goes together\n\n",
        "Any tensor-parallel size goes with any schedule and any `--zero-stage`: ZeRO shards over data-parallel ranks, "
        "which hold the same slice.\n\n",
        "| `--pipeline-schedule` | also | `--zero-stage` | not, and why |\n| --- | --- | --- | --- |\n",
    ]
    for name in SCHEDULES:
        also = ", ".join(f"`{alias}`" for alias, target in schedules.ALIASES.items() if target == name)
        reasons = {stage: SCHEDULES[name].zero_excluded.get(stage) for stage in range(4)}
        legal = ", ".join(str(stage) for stage, reason in reasons.items() if reason is None)
        why = "; ".join(f"{stage}: {reason}" for stage, reason in reasons.items() if reason is not None)
        lines.append(f"| `{name}` | {also} | {legal} | {in_flags(why)} |\n")
    return "".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 where --check finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args(argv)
    if options.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == flag_table():
            return 0
        print(f"{PAGE.name}: out of date; run python tools/make_flag_table.py", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(flag_table(), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
