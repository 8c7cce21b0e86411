"""The documentation hangs together: every page is reached from the index, every link leads somewhere, the reading list
holds (that the picture and the rooms are up to date is asked in test_architecture.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cpu_seconds import always_run, dear

from draw_architecture import direct, floors, rooms
from make_reading_pages import lines_of, reading, total

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])


def text_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor) of every link to a file of the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if not target.startswith(("http://", "https://", "mailto:")):
            path, _, anchor = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


def anchors(page: Path) -> set[str]:
    """What headings can be linked to, by GitHub's and MkDocs' rule."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        assert path.exists(), f"{page.name}: no {path}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {path.name} has no heading #{anchor}"
        # A site is made of docs/ alone.
        assert page.parent != DOCS or path.is_relative_to(DOCS), f"{page.name}: {path} lies outside of docs/"


def test_every_page_is_reached_from_the_index_and_on_the_site() -> None:
    reached, ahead = set[Path](), [DOCS / "index.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead += [path for path, _ in links(page) if path.suffix == ".md" and path not in reached]
    assert reached == set(DOCS.glob("*.md"))
    listed = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["strict"] is True


def test_the_reading_list_is_right_about_what_there_is_to_read() -> None:
    """Within a tenth, so that not every commit has to touch it; the promise of README within 500 lines."""
    rows = re.findall(r"^\| .*? ?\| `(\S+)` \| (\d+) \|$", (DOCS / "index.md").read_text(), re.M)
    now = {str(path.relative_to(ROOT)): lines_of(path) for _, path in reading()}
    assert [name for name, _ in rows] == list(now), "run python tools/make_reading_pages.py"
    off = [name for name, lines in rows if abs(int(lines) - now[name]) > max(20, now[name] // 10)]
    assert not off, f"{off}: run python tools/make_reading_pages.py"
    assert total() <= 9_000, "the engine is no longer read in an afternoon"
    for page in ("README.md", "docs/index.md"):
        promised = re.search(r"about ([\d,]+) lines", (ROOT / page).read_text().replace("\n", " "))
        assert promised is not None and abs(total() - int(promised[1].replace(",", ""))) <= 500, (
            f"{page} does not say that the engine has {total():,} lines: change it, or the engine"
        )


def test_what_readme_promises_is_proved_by_tests_that_always_run() -> None:
    """Each row names a test; none is marked as one that `scripts/test.sh` alone leaves out."""
    table = (ROOT / "README.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "| ---" not in line][1:]
    assert len(rows) >= 10
    for row in rows:
        path, found = "", re.findall(r"`([\w/.]*)::(\w+)`", row)
        assert found, f"names no test: {row}"
        for file, name in found:
            path = file or path
            tree = ast.parse((ROOT / "tests" / path).read_text())
            tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
            assert len(tests) == 1, f"{path} has no {name}"
            marks = [ast.unparse(mark) for mark in tests[0].decorator_list]
            assert not [mark for mark in marks if re.match(r"pytest\.mark\.(full|landing|gpu|skip)", mark)], (
                f"{path}::{name}"
            )


def test_what_is_dear_exists_and_is_named_by_no_table() -> None:
    """README's promises and the faults of docs/proving.md are tried by a plain run."""
    named = always_run()
    assert len(named) > 40
    for case in dear():
        test = case.partition("[")[0]
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), f"tests/dear.txt: {test} is no longer there"
        assert not {case, test} & named, f"tests/dear.txt leaves out {case}, which a table promises"


def test_the_picture_shows_what_is_imported() -> None:
    """Against a list of known arrows, and the rule that an arrow goes down."""
    every = rooms()
    level = {room.name: number for number, floor in enumerate(floors(every)) for room in floor}
    assert len(level) == len(every) > 20
    for room in every.values():
        assert all(level[below] < level[room.name] or not room.is_folder for below in room.imports)
    assert "comm" in every["parallel/zero"].imports and "parallel/pipeline" not in every["parallel/zero"].imports
    assert "config" in every["train"].imports and "config" not in direct(every["train"], every)  # others bring it
    assert "models" in direct(every["train"], every)


@pytest.mark.parametrize("door", sorted((ROOT / "megalite").rglob("__init__.py")), ids=lambda door: door.parent.name)
def test_a_room_describes_files_and_tests_that_exist(door: Path) -> None:
    plate = ast.get_docstring(ast.parse(door.read_text())) or ""
    for name in re.findall(r"(?<![\w/])(\w+\.py)\b", plate):
        places = (door.parent, ROOT / "tools", ROOT / "tests")
        assert any(next(place.rglob(name), None) for place in places), f"{door}: there is no {name}"
    for name in re.findall(r"\b(tests/[\w/]+\w(?:\.py)?)", plate):
        assert (ROOT / name).exists(), f"{door}: there is no {name}"
