"""Nothing stands in the product that only its tests use.

Every function, class, method, field, property and constant of `megalite/`, `tools/` and `benchmarks/` is named
somewhere else in the product, or in the documentation that users read. A string that is a name counts (`getattr`, keys
of a record), and so does a word in code type in a document; an entry of `__all__`, an import and a test do not.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import SOURCES, TESTING, nodes

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

ALLOWED = {
    # A benchmark that lives outside calls these by name (see the docstring).
    r"benchmarks/shared_lab\.py": r"\w+",
    # lm-evaluation-harness calls its models by these.
    r"megalite/inference/harness\.py": "loglikelihood(_rolling)?|generate_until",
    # logging calls it.
    r"megalite/events\.py": "emit",
    # megalite/testing/fault.py calls it.
    r"megalite/proof/watch\.py": "reached",
    # torch.distributed.checkpoint calls these of a planner.
    r"megalite/convert/dcp_writing\.py": "create_local_plan|resolve_data",
    # torch asks its dispatch modes.
    r"megalite/rehearsal/watch\.py": "_should_skip_dynamo",
    # ctypes reads it.
    r"megalite/launch/rank_page\.py": "_fields_",
}

Definition = tuple[int, str, ast.stmt]
"""Line, name, and the node whose own body does not count as a use."""


def targets(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        yield from node.targets
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """Functions, classes and methods, names assigned in a module or a class, attributes assigned to `self`."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name, node
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef) else []:
            for target in targets(statement):
                yield from ((target.lineno, n.id, statement) for n in ast.walk(target) if isinstance(n, ast.Name))
        if isinstance(node, ast.stmt):
            for target in targets(node):
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                        yield part.lineno, part.attr, node


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names and attributes that are read, and strings that look like one, each with its line."""
    exported: set[int] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            exported.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno not in exported:
            yield node.value, node.lineno


def documented() -> set[str]:
    """Words in code type: between backquotes, or in a fenced block."""
    words: set[str] = set()
    for path in DOCUMENTS:
        for code in re.findall(r"```.*?```|`[^`\n]+`", path.read_text(encoding="utf-8"), flags=re.DOTALL):
            words.update(re.findall(r"\w+", code))
    return words


def unused(trees: dict[str, ast.Module], words: set[str]) -> list[str]:
    places: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for module, tree in trees.items():
        for name, line in uses(tree):
            places[name].append((module, line))
    found: dict[tuple[str, str], int] = {}
    for module, tree in trees.items():
        for line, name, node in definitions(tree):
            special = name.startswith("__") and name.endswith("__")
            # What a definition says of itself (a recursive call, a type) is no use of it.
            own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not special and name not in words and all(m == module and n in own for m, n in places[name]):
                found.setdefault((module, name), line)
    return [
        f"{module}:{line}: {name}"
        for (module, name), line in found.items()
        if not any(re.fullmatch(file, module) and re.fullmatch(names, name) for file, names in ALLOWED.items())
    ]


def test_everything_is_used() -> None:
    product = {f"{name.replace('.', '/')}.py": tree for name, tree in SOURCES.items() if not name.startswith(TESTING)}
    found = unused(product, documented())
    if found:
        pytest.fail("nobody but a test names these; delete them\n" + "\n".join(found), pytrace=False)


def test_the_test_sees_what_is_unused() -> None:
    source = """
__all__ = ["alone", "used"]
LIMIT = 3
def alone(): return alone()
def used(): return Box(1).read() + LIMIT
class Box:
    kept: int
    spare: int
    def __init__(self, value):
        self.value, self.lost = value, 0
    def read(self): return self.value + getattr(self, "kept")
    @property
    def shown(self): return 1
    @property
    def told(self): return 2
print(used())
"""
    names = {line.rsplit(" ", 1)[1] for line in unused({"m.py": ast.parse(source)}, {"told"})}
    assert names == {"alone", "spare", "lost", "shown"}
