"""Write docs/flags.md from the schema of the configuration, or check that it is up to date (--check)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalite import schedule as schedules
from megalite.config import NOT_NEEDED, SECTIONS, Option, aliases_of, all_options, options_of, show, title, value_text
from megalite.errors import flag_of, in_flags
from megalite.schedule import SCHEDULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

_HEAD = """\
# Flags

Written by `python tools/make_flag_table.py` from the schema in `megalite/config/`; do not edit.

Every flag is also a YAML key (`--micro-batch-size 4` is `micro_batch_size: 4`, flat or in its section), `-` and `_`
mean the same, and every switch has a `--no-` form. Defaults < family defaults < `--config` files in order < flags.
Flags under a heading in italics spell one field; `one of`: a later file or flag takes the place of another spelling.
`--config FILE` may be repeated; `--help` prints this table; `--dry-run` prints every value with its origin.
"""


def flag_table() -> str:
    """The whole page, Markdown."""
    options = all_options()
    parts = [_HEAD]
    for section, cls in SECTIONS.items():
        words = (cls.__doc__ or "").splitlines()[0]
        parts.append(f"\n## {section}\n\n{words}\n\n| flag | value | default | meaning |\n| --- | --- | --- | --- |\n")
        for option in (each for each in options.values() if each.section == section):
            first = option.spells is not None and options_of(section, option.spells)[0].name == option.name
            parts.append((f"| *{title(option)}:* | | | |\n" if first else "") + _row(option))
    parts.append(_combinations())
    parts.append("\n## Flags of Megatron-LM that are refused\n\nEach gives one line that says this.\n\n")
    parts.append("| flag | reason |\n| --- | --- |\n")
    parts += [f"| `{flag_of(name)}` | {in_flags(reason)} |\n" for name, reason in sorted(NOT_NEEDED.items())]
    return "".join(parts)


def _row(option: Option) -> str:
    value = "switch" if option.kind is bool else f"`{_cell(value_text(option))}`"
    if option.kind is bool:
        default = "on" if option.default else "off"
    elif option.required:
        default = "**required**"
    else:
        default = "" if option.default in (None, ()) else f"`{show(option.default)}`"
    also = ", ".join(f"`{flag_of(alias)}`" for alias in aliases_of(option.name))
    meaning = _cell(option.help) + (f" (also {also})" if also else "")
    return f"| `{option.flag}` | {value} | {default} | {meaning} |\n"


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
