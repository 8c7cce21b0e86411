"""The sources as the tests of the house read them: parsed once, never imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Longest prefix wins. A module may import strictly lower floors and its own room; rooms of one floor do not see each
# other.
FLOORS = {
    "megalite": 0,
    "megalite.errors": 0,
    "megalite.events": 1,
    "megalite.extras": 1,
    "megalite.progress": 1,
    "megalite.scratch": 1,
    "megalite.strangers": 2,
    "megalite.files": 0,
    "megalite.host_memory": 1,
    "megalite.page_locked": 1,
    "megalite.host_waits": 0,
    "megalite.late_reading": 1,
    "megalite.commands": 0,
    "megalite.faults": 0,
    "megalite.streams": 0,
    "megalite.schedule": 1,
    "megalite.config": 2,
    "megalite.inventory": 3,
    "megalite.comm": 4,
    "megalite.gradient": 4,
    "megalite.microbatch_notes": 4,
    "megalite.microbatch": 4,
    "megalite.visibility": 1,
    "megalite.planner": 4,
    "megalite.launch": 5,
    "megalite.parallel.context": 5,
    "megalite.parallel.expert": 5,
    "megalite.parallel.grid": 5,
    "megalite.parallel.pipeline": 5,
    "megalite.parallel.rows": 5,
    "megalite.parallel.tensor": 5,
    "megalite.stores": 5,
    "megalite.parallel.tiers": 4,
    "megalite.parallel.zero": 5,
    "megalite.parallel": 5,
    "megalite.nn": 6,
    "megalite.optim": 6,
    "megalite.data": 6,
    "megalite.checkpoint": 6,
    "megalite.models": 7,
    "megalite.engine": 7,
    "megalite.convert": 7,
    "megalite.generation": 8,
    "megalite.observe": 8,
    "megalite.library": 8,
    "megalite.train": 9,
    "megalite.inference": 10,
    "megalite.proof": 10,
    "megalite.rehearsal": 11,
    "pretrain_gpt": 12,
    "tools": 12,
    "benchmarks": 13,
}
TESTING = "megalite.testing"


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    rooms = ("megalite", "tools", "benchmarks")
    return sorted([*(path for room in rooms for path in ROOT.glob(f"{room}/**/*.py")), ROOT / "pretrain_gpt.py"])


def everything() -> list[Path]:
    return [*sources(), *sorted(ROOT.glob("tests/**/*.py"))]


SOURCES = {module(path): ast.parse(path.read_text(), str(path)) for path in sources()}
PRODUCT = {name: tree for name, tree in SOURCES.items() if not name.startswith(TESTING)}


def room_of(module: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in FLOORS:
            return ".".join(parts[:length])
    return ""


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, listed once: a dozen tests walk each."""
    return list(ast.walk(tree))


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Absolute names of what a module imports, wherever in the file; `from package import name` gives package.name."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write the whole name"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


@cache
def calls(tree: ast.AST) -> list[tuple[int, str, ast.Call]]:
    return [(node.lineno, ast.unparse(node.func), node) for node in nodes(tree) if isinstance(node, ast.Call)]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(Line, text) of every string that is no docstring."""
    bodies = [node.body for node in nodes(tree) if isinstance(getattr(node, "body", None), list)]
    told = {id(each.value) for body in bodies for each in body if isinstance(each, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


def check(problems: list[str]) -> None:
    __tracebackhide__ = True
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
