"""Draws docs/architecture.svg from the imports: rooms floor upon floor, with arrows to what each is built on.

python tools/draw_architecture.py

A room's floor is one above the highest room that it imports, so no arrow can point upward. Arrows that others imply are
left out, and so are those to single files, which stand on the ground: every floor uses them. The sentence in a box is
the first of the room's own description. Raises SystemExit where rooms import in a circle.
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

BOX, HEIGHT, ACROSS, DOWN, LETTERS = 210, 74, 24, 48, 32


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
    """The SVG."""
    every = rooms()
    stack = floors(every)
    width = max(map(len, stack)) * (BOX + ACROSS) + ACROSS
    height = (len(stack) + 1) * (HEIGHT + DOWN) + DOWN
    places: dict[str, tuple[float, float]] = {}
    for number, floor in enumerate(stack, 1):
        begin = (width - len(floor) * (BOX + ACROSS) + ACROSS) / 2
        for column, room in enumerate(floor):
            places[room.name] = (begin + column * (BOX + ACROSS), height - number * (HEIGHT + DOWN))
    places[TOP] = ((width - BOX) / 2, DOWN / 2)
    used = set().union(*(room.imports for room in every.values()))
    arrows = [(room.name, below) for room in every.values() for below in direct(room, every) if room.is_folder]
    arrows += [(TOP, name) for name in every if name not in used and every[name].is_folder]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#8899aa"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
    ]
    lines += [_arrow(places[upper], places[lower]) for upper, lower in sorted(arrows)]
    lines += [_box(room.name, room.sentence, f"rooms.md#{room.anchor}", places[room.name]) for room in every.values()]
    lines.append(_box(TOP, "What is started by hand: the run, and the tools around it", "", places[TOP]))
    return "\n".join([*lines, "</svg>", ""])


def _arrow(upper: tuple[float, float], lower: tuple[float, float]) -> str:
    x0, y0, x1, y1 = upper[0] + BOX / 2, upper[1] + HEIGHT, lower[0] + BOX / 2, lower[1] - 2
    bend = (y1 - y0) / 2
    path = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    return f'<path d="{path}" fill="none" stroke="#8899aa" marker-end="url(#a)"/>'


def _box(name: str, sentence: str, link: str, place: tuple[float, float]) -> str:
    x, y = place
    text = textwrap.wrap(sentence, LETTERS, max_lines=3, placeholder=" ...")
    rows = [f'<text x="{x + 10:.0f}" y="{y + 19:.0f}" font-size="14" font-weight="bold">{escape(name)}</text>']
    rows += [
        f'<text x="{x + 10:.0f}" y="{y + 36 + 14 * number:.0f}" font-size="11">{escape(line)}</text>'
        for number, line in enumerate(text)
    ]
    frame = f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" fill="#eef4fb" stroke="#334455"/>'
    title = f"<title>{escape(sentence)}</title>"
    box = f"<g>{title}{frame}{''.join(rows)}</g>"
    return f'<a href="{link}">{box}</a>' if link else box


def main(argv: list[str] | None = None) -> None:
    """Writes the picture."""
    argparse.ArgumentParser(description="Draw docs/architecture.svg from the imports.").parse_args(argv)
    PICTURE.write_text(draw())
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
