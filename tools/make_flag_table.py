"""Write docs/flags.md and docs/megatron_flags.md from the configuration, or check them (--check)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalite import schedule as schedules
from megalite.config import (
    SECTIONS,
    MegatronFlag,
    Option,
    accepted_spellings,
    all_options,
    listing,
    megatron_flags,
    show,
    shown_flag,
)
from megalite.errors import flag_of, in_flags, spelled
from megalite.schedule import SCHEDULES

DOCS = Path(__file__).resolve().parents[1] / "docs"

_HEAD = """\
# Flags

Written by `python tools/make_flag_table.py` from the schema in `megalite/config/`; do not edit.

Every flag is also a YAML key (`--micro-batch-size 4` is `micro_batch_size: 4`, flat or in its section), `-` and `_`
mean the same, and every switch has a `--no-` form. Defaults < family defaults < `--config` files in order < flags.
Flags under a heading in italics spell one field; `one of`: a later file or flag takes the place of another spelling.
A flag with `NAME=VALUE ...` takes the arguments below it, apart by spaces or commas: `--wandb project=lm entity=us`; in
a file `wandb: {project: lm, entity: us}`.
`--config FILE` may be repeated; `--help` prints this table; `--dry-run all` prints every value with its origin.
"""


def flag_table() -> str:
    """The whole page, Markdown."""
    parts = [_HEAD]
    for each in listing(all_options()):
        if each.kind == "section":
            words = (SECTIONS[each.name].__doc__ or "").splitlines()[0]
            parts.append(f"\n## {each.name}\n\n{words}\n\n")
            parts.append("| flag | value | default | meaning |\n| --- | --- | --- | --- |\n")
        elif each.kind == "end":
            continue
        elif each.kind == "heading":
            parts.append(f"| *{each.name}:* | | | |\n")
        else:
            name, value = f"`{each.name}`", f"`{_cell(each.value)}`" if each.value else "switch"
            if each.kind == "argument":
                name, value = "", f"`{each.name}{_cell(each.value)}`"
            parts.append(f"| {name} | {value} | {_default(each.option)} | {_cell(each.help)} |\n")
    parts += [_spellings(), _combinations()]
    parts.append("\nEvery flag of Megatron-LM, and what becomes of it: [megatron_flags.md](megatron_flags.md).\n")
    return "".join(parts)


_MEGATRON_HEAD = """\
# Every flag of Megatron-LM

Written by `python tools/make_flag_table.py` from `megalite/config/megatron_flags.txt`; do not edit. These are all flags
of training/arguments.py and post_training/arguments.py (modelopt) of Megatron-LM's main at `d98e8a64dd`, and those that
the first had at any time before. What the more common ones mean here: [from_megatron.md](from_megatron.md).

- *same*: same name and meaning; where a flag stands, Megatron's name is read as that.
- *ignored*: accepted, without effect: it tunes how Megatron-LM does something, asks for what is always so here, or for
  a line of a log. A run names those that were given, in one line at its start. With the values in brackets only, where
  there are any; with others it is refused.
- *refused*: an error says the reason, before anything starts.
"""


def megatron_table() -> str:
    """The page of all flags of Megatron-LM, Markdown."""
    parts, flags = [_MEGATRON_HEAD], megatron_flags().values()
    for verdict in ("same", "ignored", "refused"):
        rows = sorted((flag for flag in flags if flag.verdict == verdict), key=lambda flag: flag.name.lower())
        what = "here" if verdict == "same" else "why"
        parts.append(f"\n## {verdict.capitalize()} ({len(rows)})\n\n| flag | {what} |\n| --- | --- |\n")
        for flag in rows:
            values = f" ({', '.join(flag.values)})" if flag.values else ""
            parts.append(f"| `{flag_of(flag.name)}`{values} | {_becomes(flag)} |\n")
    return "".join(parts)


def _becomes(flag: MegatronFlag) -> str:
    if flag.verdict == "same":
        other = accepted_spellings().get(flag.name)
        return "same" if other is None else f"`{other}`"
    other_values = f"; else refused: {flag.otherwise}" if flag.otherwise and flag.otherwise != flag.reason else ""
    return _cell(spelled(flag.reason + other_values, shown_flag))


def pages() -> dict[Path, str]:
    """The text of each page."""
    return {DOCS / "flags.md": flag_table(), DOCS / "megatron_flags.md": megatron_table()}


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
    """Return 0, or 1 where --check finds a page out of date."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args(argv)
    for page, text in pages().items():
        if not options.check:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page}")
        elif not page.is_file() or page.read_text(encoding="utf-8") != text:
            print(f"{page.name}: out of date; run python tools/make_flag_table.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
