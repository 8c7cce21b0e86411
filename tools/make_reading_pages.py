"""Writes docs/rooms.md (every room by its own description) and the reading list of docs/index.md (with lines a file).

python tools/make_reading_pages.py
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Sequence
from pathlib import Path

from draw_architecture import ROOT, Room, rooms

PAGE, INDEX = ROOT / "docs" / "rooms.md", ROOT / "docs" / "index.md"
BEGIN, END = "<!-- the reading list: python tools/make_reading_pages.py -->\n", "<!-- end of the reading list -->"

#: The engine in the order of reading: what a part is about, the folder or "", its files.
ENGINE: tuple[tuple[str, str, str], ...] = (
    ("how a run is put together, and what a step is", "", "pretrain_gpt"),
    ("", "megalite/train", "run build trainer"),
    ("stages, buffers and optimizer of a rank, and what an update does", "megalite/engine",
     "weights rules update"),
    ("a pipeline as data: actions, a program, a schedule, the messages that passes insert", "megalite/schedule",
     "action stage_placement program definition schedules/one_f_one_b passes"),
    ("who runs it", "megalite/parallel/pipeline", "executor stage shared_params"),
    ("parallel axes as values, and what goes over them", "megalite/comm", "world axis mesh collectives autograd p2p"),
    ("which rectangle of its tensor a parameter is, and in which flat buffer it lies", "megalite/inventory",
     "parameter_placement families buckets"),
    ("the model, as in a textbook", "megalite/nn",
     "init embedding segment block attention/layer attention/core attention/choose "
     "rope mlp activation norm head stack"),
    ("", "megalite/models", "families"),
    ("the layers that are cut over ranks", "megalite/parallel/tensor",
     "context products linear embedding cross_entropy"),
    ("where gradients go, and who owns which part of them", "megalite", "microbatch gradient late_reading"),
    ("", "megalite/parallel/zero",
     "parameter_buffers flat_weights bucket reducer "
     "master_shards sub_optimizers sharded_optimizer"),
    ("the update", "megalite/optim", "rule adamw optimizers"),
)  # fmt: skip

#: Files that a step or the construction of its model enters, too, and that can be left for a second afternoon.
LATER: tuple[tuple[str, str, str], ...] = (
    ("a schedule that never drains, the table of all, and lists that are renumbered for each batch",
     "megalite/schedule", "schedules/no_flush schedules/pipedream_2bw schedules/registry template"),
    ("reads batches, keeps programs, passes over samples", "megalite/train",
     "batch_reader run_data programs rollback"),
    ("sums of tensor-parallel ranks on a CPU; messages to the next rank of an axis, to some, and what follows them",
     "megalite/comm", "shared_memory ring exchange"),
    ("learning rate, loss scale, age of gradients", "megalite/optim", "lr_schedule loss_scaler staleness"),
    ("dropout that is the same at every layout", "megalite/nn", "dropout"),
    ("who sees whom in attention, said once for all layers", "megalite", "visibility"),
    ("sizes, which the planner asks for, too; what it decides", "megalite/inventory", 
     "layers parameter pieces mixers activation_bytes tiling memory_plan"),
    ("when weights are gathered: ahead of their use, or layer by layer (ZeRO-3); gradients of which a slice is kept",
     "megalite/parallel/zero", "options unshard streamed_gradient"),
    ("what stages of a rank share, which optimizer holds a part of the state, which stage runs a part of the layers",
     "megalite/parallel", "zero/rank_memory zero/host_optimizer pipeline/stage_types tiers/mover"),
    ("messages that wait at once, or behind other work; layers of one axis or of a grid", "megalite/parallel/tensor",
     "late_messages"),
    ("what routers and products in float8 note, and where tests make a run fail", "megalite",
     "microbatch_notes faults"),
)  # fmt: skip

#: Rooms that stand alone: what they do can be taken as given.
ALONE = ("config", "data", "testing")

HEAD = """\
# The rooms

Written by `python tools/make_reading_pages.py` from the rooms' own descriptions (`__init__.py`) and, below them, those
of files that they do not name; do not edit. The order is alphabetical; [the picture](architecture.svg) shows which
stands on which.
"""


def reading(parts: Sequence[tuple[str, str, str]] = ENGINE) -> list[tuple[str, Path]]:
    """What a part is about (empty: as before) and a file of it, in the order of reading."""
    found = []
    for about, folder, names in parts:
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
    rows.append(f"| | **together** | **{total():,}** |\n")
    rows.append(
        f"\nA step enters these, too; they can wait for a second afternoon. Not listed: {', '.join(ALONE)}.\n\n"
    )
    rows.append("| what it does | file |\n| --- | --- |\n")
    rows += [f"| {about} | `{path.relative_to(ROOT)}` |\n" for about, path in reading(LATER)]
    return "".join(rows)


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
    lines = [f"\n## {room.name}\n\n```text\n{room.text}\n```\n\n", _files(room)]
    for what, others in (("Imports", below), ("Used by", above)):
        if others and (room.is_folder or what == "Imports"):
            lines.append(f"{what}: {', '.join(f'[{other.name}](#{other.anchor})' for other in others)}.  \n")
    return "".join(lines)


def _files(room: Room) -> str:
    """The files that a room's own description does not name, each by the first sentence of its own."""
    lines = []
    for path in sorted((ROOT / "megalite" / room.name).glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        sentence = re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split("\n\n")[0].split()))[0]
        lines += [] if path.name in room.text else [f"- `{path.name}`: {sentence}\n"]
    return "".join(lines) + "\n" if lines else ""


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
