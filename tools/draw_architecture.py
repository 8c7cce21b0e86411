"""Draws docs/architecture.svg from the imports: rooms floor upon floor, each with what it is built on.

python tools/draw_architecture.py

A room's floor is one above the highest room that it imports. What it is built on leaves out what others on the list
are built on, and single files, which stand on the ground: every floor uses them. The sentence in a box is the first of
the room's own description. Nothing is smaller than 12 pixels on a page of 900. Raises SystemExit where rooms import in
a circle.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
#: A package of rooms that do not know each other.
GROUPS = ("parallel",)
#: Not drawn: what only tests use, and the version number.
HIDDEN = ("testing", "__init__")
TOP = "pretrain_gpt.py, tools"

STARTED = "What is started by hand: the run, and the tools around it"

COLUMNS, WIDTH, GAP, MARGIN, LINE, LETTER = 4, 972, 10, 32, 16, 7


@dataclass(frozen=True)
class Room:
    """A folder of megalite, or a single file at its root. text: its whole description."""

    name: str
    text: str
    imports: frozenset[str]

    @property
    def sentence(self) -> str:
        """The first of the description, without the drawing that may follow it."""
        first = re.split(r"(?<=\.)\s|\n\n", self.text.replace("::", ":"), maxsplit=1)[0]
        return re.sub(r"`| \(floor.*?\)", "", " ".join(first.split())).rstrip(".:;")

    @property
    def is_folder(self) -> bool:
        """Else it is a single file."""
        return not self.name.endswith(".py")

    @property
    def anchor(self) -> str:
        """Of its section in docs/rooms.md."""
        return re.sub(r"[^a-z0-9_]", "", self.name)


def room_of(path: Path) -> str:
    """`comm`, `parallel/zero` or `gradient.py`."""
    parts = path.relative_to(ROOT / "megalite").parts
    if len(parts) == 1:
        return parts[0]
    return "/".join(parts[:2]) if parts[0] in GROUPS and len(parts) > 2 else parts[0]


def imported(tree: ast.AST) -> set[Path]:
    """Files or folders of megalite that a module imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    found = set()
    for name in names:
        if name.startswith("megalite."):
            path = ROOT.joinpath(*name.split("."))
            found |= {each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()}
    return found


@cache
def rooms() -> dict[str, Room]:
    """All rooms by name, those without imports first."""
    texts: dict[str, str] = {}
    uses: dict[str, set[str]] = {}
    for path in sorted((ROOT / "megalite").rglob("*.py")):
        name, tree = room_of(path), ast.parse(path.read_text())
        if name.removesuffix(".py") in HIDDEN or name in GROUPS:
            continue
        uses.setdefault(name, set()).update(map(room_of, imported(tree)))
        if path.name in (name, "__init__.py") and path.parent.name == name.rpartition("/")[2] or path.name == name:
            texts[name] = ast.get_docstring(tree) or ""
    return {name: Room(name, texts[name], frozenset((uses[name] & texts.keys()) - {name})) for name in texts}


def floors(every: dict[str, Room]) -> list[list[Room]]:
    """Rooms by floor, the lowest first: that of the single files."""
    floor = [[room for room in every.values() if not room.is_folder]]
    built = {room.name for room in floor[0]}
    left = {name: room for name, room in every.items() if room.is_folder}
    while left:
        ready = [room for room in left.values() if room.imports <= built]
        if not ready:
            raise SystemExit(f"rooms import in a circle: {', '.join(left)}")
        floor.append(sorted(ready, key=lambda room: room.name))
        built |= {room.name for room in ready}
        left = {name: room for name, room in left.items() if name not in built}
    return floor


def direct(room: Room, every: dict[str, Room]) -> list[str]:
    """What a room imports, less what it would reach through another of its imports."""

    def reach(name: str) -> set[str]:
        return set(every[name].imports).union(*(reach(below) for below in every[name].imports))

    implied = set[str]().union(*(reach(below) for below in room.imports))
    return sorted(name for name in room.imports - implied if every[name].is_folder)


def draw() -> str:
    """The SVG: a band for each floor, `COLUMNS` boxes a row, the top first."""
    every = rooms()
    ground, *stack = floors(every)
    used = set().union(*(room.imports for room in every.values()))
    started = [name for name in every if name not in used and every[name].is_folder]
    lines, y = _row_of_boxes([(TOP, STARTED, _on(started), "")], GAP)
    for number in range(len(stack), 0, -1):
        boxes = [(r.name, r.sentence, _on(direct(r, every)), f"rooms.md#{r.anchor}") for r in stack[number - 1]]
        drawn, below = _row_of_boxes(boxes, y + GAP)
        lines += [_band(y, below + GAP - y, str(number), number % 2), *drawn]
        y = below + GAP
    names = textwrap.wrap(", ".join(room.name for room in ground), (WIDTH - MARGIN - GAP) // LETTER)
    height = 26 + LINE * len(names)
    lines.append(_band(y, height, "0", 0))
    lines.append(_text(MARGIN, y + 18, "single files, used from every floor", 15, "bold"))
    lines += [_text(MARGIN, y + 18 + LINE * n, line, 13) for n, line in enumerate(names, 1)]
    whole = y + height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{whole}" fill="white"/>', *lines, "</svg>", ""])


def _on(names: list[str]) -> str:
    return f"on {', '.join(names)}" if names else ""


def _row_of_boxes(boxes: list[tuple[str, str, str, str]], y: int) -> tuple[list[str], int]:
    """Boxes of (name, sentence, what it is built on, link) from `y` on, which fill the rows; and where they end."""
    rows = -(-len(boxes) // COLUMNS)
    columns = -(-len(boxes) // rows)
    width = (WIDTH - MARGIN) // columns - GAP
    letters = (width - 20) // LETTER
    lines: list[str] = []
    for row in range(rows):
        here = boxes[row * columns : (row + 1) * columns]
        texts = [(textwrap.wrap(told, letters), textwrap.wrap(below, letters)) for _, told, below, _ in here]
        height = 30 + LINE * max(len(told) + len(under) for told, under in texts)
        for column, ((name, _, _, link), (told, under)) in enumerate(zip(here, texts, strict=True)):
            lines.append(_box(name, told, under, link, (MARGIN + column * (width + GAP), y, width, height)))
        y += height + GAP
    return lines, y - GAP


def _band(y: int, height: int, floor: str, shade: int) -> str:
    color = ("#f4f6f8", "#e6ebf0")[shade]
    band = f'<rect y="{y}" width="{WIDTH}" height="{height}" fill="{color}"/>'
    return band + _text(10, y + height // 2 + 5, floor, 15, "bold", "#667788")


def _text(x: int, y: int, text: str, size: int, weight: str = "normal", color: str = "#112233") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{color}">{escape(text)}</text>'


def _box(name: str, told: list[str], under: list[str], link: str, place: tuple[int, int, int, int]) -> str:
    x, y, width, height = place
    rows = [_text(x + 10, y + 20, name, 15, "bold")]
    rows += [_text(x + 10, y + 20 + LINE * n, line, 13) for n, line in enumerate(told, 1)]
    rows += [_text(x + 10, y + 20 + LINE * n, line, 13, color="#2255aa") for n, line in enumerate(under, 1 + len(told))]
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#ffffff" stroke="#778899"/>'
    box = f"<g>{frame}{''.join(rows)}</g>"
    return f'<a href="{link}">{box}</a>' if link else box


def main(argv: list[str] | None = None) -> None:
    """Writes the picture."""
    argparse.ArgumentParser(description="Draw docs/architecture.svg from the imports.").parse_args(argv)
    PICTURE.write_text(draw())
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
