"""The house keeps its shape: floors, rooms, doors and sizes. (What may not be done in it: `test_code_rules.py`.)

Every test reads the source; nothing is imported but the table of flags. A message says which line breaks which rule.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter

import pytest
from source_tree import FLOORS, PRODUCT, ROOT, SOURCES, TESTING, check, everything, functions, imports, room_of

from draw_architecture import PICTURE, draw
from make_reading_pages import PAGE, room_page

# A proof on the user's machine is the tests' own: the same oracle, and ranks forked by the same harness.
MAY_TEST = ("megalite.proof.", "megalite.rehearsal.witness")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Flags by section, as `--help` lists them; 211 with --config, five of them for what OLMo 2 and 3 and Gemma 3 have of
# their own. Arguments (NAME=VALUE) of a flag and its other spellings do not count.
MAX_FLAGS = {
    "model": 64,
    "parallel": 42,
    "training": 30,
    "optimizer": 23,
    "data": 19,
    "checkpoint": 23,
    "logging": 9,
}

NO_TORCH = (
    "megalite.errors",
    "megalite.extras",
    "megalite.progress",
    "megalite.faults",
    "megalite.streams",
    "megalite.strangers",
    "megalite.schedule",
    "megalite.config",
    "megalite.inventory",
    "megalite.planner",
)


def test_every_module_has_a_floor() -> None:
    unknown = [name for name in PRODUCT if room_of(name) in ("", "megalite") and name != "megalite"]
    check([f"{name}: give it a floor in FLOORS" for name in unknown])


def test_modules_import_lower_floors_and_their_own_room() -> None:
    problems = []
    for module, tree in PRODUCT.items():
        room = room_of(module)
        if module == "megalite":  # what it offers is imported when it is used; there only the type checker sees it
            continue
        for line, name in imports(module, tree):
            if name.split(".")[0] not in ("megalite", "tools", "benchmarks", "pretrain_gpt"):
                continue
            target = room_of(name)
            # `import megalite` is the version number; a package that only groups rooms has nothing to import.
            if target in (room, "megalite") and not name.startswith(TESTING):
                continue
            if name.startswith(TESTING) and module.startswith(MAY_TEST):
                continue
            if name.startswith(TESTING):
                problems.append(f"{module}:{line}: product code never imports {TESTING}")
            elif FLOORS[target] >= FLOORS[room]:
                problems.append(f"{module}:{line}: floor {FLOORS[room]} imports {name} of floor {FLOORS[target]}")
            elif room == "megalite.planner" and FLOORS[target] > 3:
                problems.append(f"{module}:{line}: the planner sees floors 0 to 3, not {name}")
    check(problems)


def test_rooms_are_entered_by_their_doors() -> None:
    """Across rooms, names come from the room's `__init__`, which imports what others may use and nothing else."""
    doors = {room: SOURCES[room] for room in FLOORS if room in SOURCES and (ROOT / room.replace(".", "/")).is_dir()}
    offered = {room: {name.rpartition(".")[2] for _, name in imports(room, tree)} for room, tree in doors.items()}
    asked: dict[str, set[str]] = {room: set() for room in doors}
    problems = []
    for module, tree in PRODUCT.items():
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.ImportFrom)
                or not node.module
                or room_of(node.module) in (room_of(module), "megalite")
            ):
                continue
            room = room_of(node.module)
            if room not in doors:
                continue
            names = {alias.name for alias in node.names}
            asked[room] |= names
            if node.module != room:
                problems.append(f"{module}:{node.lineno}: {node.module} lies behind the door of {room}")
            problems += [f"{module}:{node.lineno}: {room} does not offer {name}" for name in names - offered[room]]
    check(problems)


def test_pipeline_and_zero_never_see_layers_by_name() -> None:
    """They handle nn.Modules: no name of a layer of the transformer appears in their code."""
    layers = {"Attention", "MLP", "Block", "Embedding", "Head"}
    problems = []
    for module, tree in PRODUCT.items():
        if module.startswith(("megalite.parallel.pipeline", "megalite.parallel.zero")):
            names = {node.id: node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name)}
            problems += [f"{module}:{names[name]}: names the layer {name}" for name in layers & names.keys()]
    check(problems)


def test_low_floors_do_not_know_torch() -> None:
    check(
        [
            f"{module}:{line}: imports {name}"
            for module, tree in PRODUCT.items()
            if module.startswith(NO_TORCH)
            for line, name in imports(module, tree)
            if name.split(".")[0] == "torch"
        ]
    )


def test_files_and_functions_are_short() -> None:
    problems = []
    for path in everything():
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            problems.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {MAX_FILE_LINES}")
    for module, tree in SOURCES.items():
        for function in functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                problems.append(f"{module}:{function.lineno}: {function.name} has {lines} lines, at most 60")
    check(problems)


def test_tests_mirror_the_product() -> None:
    """A folder of tests/unit and tests/distributed has the name of the room, or of tools/, that it tests."""
    problems = []
    for kind in ("unit", "distributed"):
        base = ROOT / "tests" / kind
        for path in sorted(base.glob("**/*.py")):
            folder = path.parent.relative_to(base)
            mirrored = ROOT / "megalite" / (folder if folder.parts else path.name.removeprefix("test_"))
            if not mirrored.exists() and str(folder) != "tools":
                problems.append(f"{path.relative_to(ROOT)}: no room of the product has this name")
    check(problems)


def test_module_names_of_tests_are_unique() -> None:
    names = Counter(path.name for path in ROOT.glob("tests/**/*.py"))
    check([f"{name}: {count} test modules have this name" for name, count in names.items() if count > 1])


def test_the_number_of_flags_is_bounded_by_section() -> None:
    """Every word of the whole `--help` that begins with two dashes is a flag, and counts."""
    usage = pytest.importorskip("megalite.config.usage", reason="megalite.config is not there")
    help_text = usage.usage(importlib.import_module("megalite.config.root").all_options())
    _, *parts = re.split(r"^(\w+):$", help_text, flags=re.M)
    counts = {parts[i]: len(re.findall(r"^ +--", parts[i + 1], re.M)) for i in range(0, len(parts), 2)}
    assert sum(MAX_FLAGS.values()) + len(["--config"]) <= 211 and counts.keys() == MAX_FLAGS.keys()
    over = {section: count for section, count in counts.items() if count > MAX_FLAGS[section]}
    assert not over, f"{over} flags, at most {MAX_FLAGS}: give one an argument, or remove one, before adding one"
    listed = set(re.findall(r"^ +(--[a-z0-9-]+)", help_text, re.M)) | {"--config", "--flag", "--no-"}
    named = set(re.findall(r"(?<![\w-])--[a-z0-9-]+", help_text))
    assert named <= listed, f"{named - listed}: flags that --help names and does not list"


def test_the_picture_and_the_rooms_page_are_up_to_date() -> None:
    assert PICTURE.read_text() == draw(), "docs/architecture.svg: run python tools/draw_architecture.py"
    assert PAGE.read_text() == room_page(), "docs/rooms.md: run python tools/make_reading_pages.py"
