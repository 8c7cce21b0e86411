"""Writes docs/rooms.md (every room by its own description) and the reading list of docs/index.md (with lines a file).

python tools/make_reading_pages.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from draw_architecture import ROOT, Room, rooms

PAGE, INDEX = ROOT / "docs" / "rooms.md", ROOT / "docs" / "index.md"
BEGIN, END = "<!-- the reading list: python tools/make_reading_pages.py -->\n", "<!-- end of the reading list -->"

#: The engine in the order of reading: what a part is about, the folder or "", its files.
ENGINE: tuple[tuple[str, str, str], ...] = (
    ("how a run is put together, and what a step is", "", "pretrain_gpt"),
    ("", "megalite/train", "run build trainer"),
    ("stages, buffers and optimizer of a rank, and what an update does", "megalite/engine", "weights update"),
    ("a pipeline as data: actions, a program, two schedules, the messages that passes insert", "megalite/schedule",
     "action stage_placement program definition schedules/one_f_one_b schedules/no_flush "
     "schedules/pipedream_2bw schedules/registry passes"),
    ("who runs it", "megalite/parallel/pipeline", "executor stage shared_params"),
    ("parallel axes as values, and what goes over them", "megalite/comm", "world mesh collectives autograd p2p"),
    ("which rectangle of its tensor a parameter is, and in which flat buffer it lies", "megalite/inventory",
     "parameter_placement buckets"),
    ("the model, as in a textbook", "megalite/nn",
     "naming init embedding block attention/layer attention/core attention/choose rope mlp activation norm head stack"),
    ("", "megalite/models", "families"),
    ("the layers that are cut over ranks", "megalite/parallel/tensor", "context linear embedding cross_entropy"),
    ("where gradients go, and who owns which part of them", "megalite", "microbatch gradient"),
    ("", "megalite/parallel/zero",
     "options families parameter_buffers flat_weights bucket reducer held_gradient streamed_gradient "
     "param_groups master_shards sub_optimizers sharded_optimizer"),
    ("the update", "megalite/optim", "rule adamw optimizers"),
)  # fmt: skip

HEAD = """\
# The rooms

Written by `python tools/make_reading_pages.py` from the rooms' own descriptions (`__init__.py`); do not edit. Their
order is that of [the picture](architecture.svg), from the ground up.
"""


def reading() -> list[tuple[str, Path]]:
    """What a part is about (empty: as before) and a file of it, in the order of reading."""
    found = []
    for about, folder, names in ENGINE:
        files = names.split()
        for name in files:
            found.append((about, ROOT / folder / f"{name}.py"))
            about = ""
    return found


def lines_of(path: Path) -> int:
    """How long a file is."""
    return len(path.read_text().splitlines())


def total() -> int:
    """Lines of the whole engine."""
    return sum(lines_of(path) for _, path in reading())


def reading_list() -> str:
    """The table, Markdown."""
    rows = ["| what it is about | file | lines |\n| --- | --- | ---: |\n"]
    rows += [f"| {about} | `{path.relative_to(ROOT)}` | {lines_of(path)} |\n" for about, path in reading()]
    return "".join([*rows, f"| | **together** | **{total():,}** |\n"])


def room_page() -> str:
    """The whole page, Markdown."""
    every = rooms()
    parts = [HEAD]
    for room in every.values():
        if room.is_folder:
            parts.append(_section(room, every))
    parts.append("\n# Single files\n\nThey stand on the ground, and every floor uses them.\n")
    parts += [_section(room, every) for room in every.values() if not room.is_folder]
    return "".join(parts)


def _section(room: Room, every: dict[str, Room]) -> str:
    above = [other for other in every.values() if room.name in other.imports]
    below = [every[name] for name in sorted(room.imports)]
    lines = [f"\n## {room.name}\n\n```text\n{room.text}\n```\n\n"]
    for what, others in (("Imports", below), ("Used by", above)):
        if others and (room.is_folder or what == "Imports"):
            lines.append(f"{what}: {', '.join(f'[{other.name}](#{other.anchor})' for other in others)}.  \n")
    return "".join(lines)


def index_page() -> str:
    """docs/index.md with the reading list as it is now."""
    head, rest = INDEX.read_text().split(BEGIN)
    return head + BEGIN + reading_list() + END + rest.split(END)[1]


def main(argv: list[str] | None = None) -> None:
    """Writes both."""
    argparse.ArgumentParser(description="Write docs/rooms.md and the reading list of docs/index.md.").parse_args(argv)
    PAGE.write_text(room_page())
    INDEX.write_text(index_page())
    print(f"wrote {PAGE.relative_to(ROOT)} and the reading list of {INDEX.relative_to(ROOT)}: {total():,} lines")


if __name__ == "__main__":
    main()
