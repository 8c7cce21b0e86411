"""scripts/check_wheel.py sees what is wrong with a wheel. That it finds nothing wrong with ours is asked by .ci/run,
where there is a package index to build with.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import megalite
from megalite.commands import COMMANDS, main, script_of

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
assert SPEC is not None and SPEC.loader is not None
check_wheel = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_wheel)


def wheel(path: Path, *, version: str = megalite.__version__, extra: str = "", without: str = "") -> Path:
    """A wheel of two files as our build would describe it, but for what is asked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = [f"Metadata-Version: 2.4\nName: megalite\nVersion: {version}"]
    metadata += [f"Requires-Dist: {each}" for each in project["dependencies"] if each != without]
    metadata += [f"Provides-Extra: {each}" for each in project["optional-dependencies"]]
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("megalite/__init__.py", "megalite/data.yaml", extra):
            if name and name != without:
                archive.writestr(name, "")
        archive.writestr("megalite-0.1.0.dist-info/METADATA", "\n".join(metadata) + "\n")
        commands = [f"{name} = {what}" for name, what in project["scripts"].items() if name != without]
        archive.writestr("megalite-0.1.0.dist-info/entry_points.txt", "\n".join(["[console_scripts]", *commands]))
        if without != "LICENSE":
            archive.writestr("megalite-0.1.0.dist-info/licenses/LICENSE", "")
    return path


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({}, None),
        ({"version": "0.0.9"}, "version 0.0.9 is not that of"),
        ({"extra": "tests/test_docs.py"}, "should not be there: tests/test_docs.py"),
        ({"without": "megalite-plan"}, "other commands than in pyproject.toml: megalite-convert, "),
        ({"without": "megalite/data.yaml"}, "missing: megalite/data.yaml"),
        ({"without": "torch>=2.11"}, "asks for"),
        ({"without": "LICENSE"}, "has no licence"),
    ],
)
def test_a_wheel_that_is_not_ours_is_named(changes: dict[str, str], problem: str | None, tmp_path: Path) -> None:
    files = {"megalite/__init__.py", "megalite/data.yaml"}
    found = check_wheel.problems(wheel(tmp_path / "a.whl", **changes), files)
    assert found == [] if problem is None else len(found) == 1 and problem in found[0]


def test_the_package_is_what_git_knows_of_it() -> None:
    files = check_wheel.expected()
    assert {"megalite/__init__.py", "megalite/planner/hardware/h100.yaml"} <= files
    assert {"megalite/scripts/tools/plan.py", "megalite/scripts/pretrain_gpt.py"} <= files
    assert all(name.startswith("megalite/") for name in files)


def test_the_scripts_that_the_build_takes_are_those_for_users() -> None:
    """And none of them, nor a script that one of them imports, is left in the clone."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    taken = build["force-include"]
    assert all(there == f"megalite/scripts/{here}" for here, there in taken.items())
    assert {*taken.values()} == {name for name in check_wheel.expected() if name.startswith("megalite/scripts/")}
    assert all((ROOT / name).is_file() and name not in taken for name in check_wheel.DEVELOPERS)
    beside = {path.stem for path in ROOT.glob("tools/*.py")}
    for here in taken:
        for node in ast.walk(ast.parse((ROOT / here).read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            lacking = [
                f"{here} imports {name}" for name in beside.intersection(named) if f"tools/{name}.py" not in taken
            ]
            assert not lacking


def test_every_command_has_its_script_and_its_entry_point() -> None:
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert offered == {f"megalite-{name}": "megalite.commands:main" for name in COMMANDS}
    assert all(script_of(name).is_file() for name in COMMANDS)


def test_a_command_runs_its_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/megalite-show-schedule", "--schedule", "nonsense"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "nonsense" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["commands.py", "plam"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: plam: give one of pretrain, convert")
