"""Builds the wheel and looks at it from outside: version, files, what it asks for, and whether it works out of an empty
folder. `.ci/run` calls it; it needs pip and a package index (hatchling builds the wheel).

python scripts/check_wheel.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: They stay in the clone: what draws its pages, a study, and comparisons of predictions with runs.
DEVELOPERS = {
    "tools/check_plan.py",
    "tools/compare_published.py",
    "tools/draw_architecture.py",
    "tools/make_flag_table.py",
    "tools/make_reading_pages.py",
    "tools/study_staleness.py",
}

#: Run where nothing but the wheel's files can be imported as megalite.
TRIAL = """
import megalite
from megalite.config import parse
from megalite.planner import available, load_hardware
assert {load_hardware(name).name for name in available()}, "no hardware files"
from megalite.commands import COMMANDS, script_of
assert all(script_of(name).is_file() for name in COMMANDS), "no scripts"
parse(["--mock-data", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16",
       "--vocab-size", "64", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"])
print(megalite.__version__, megalite.__file__)
"""


def build(folder: Path) -> Path:
    """The wheel, made from the repository as it is."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def expected() -> set[str]:
    """Files of the package that git knows, and the scripts beside it that users run."""
    paths = ["megalite", "tools", "pretrain_gpt.py"]
    listed = subprocess.run(["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    names = set(listed.stdout.split()) - DEVELOPERS
    return {name if name.startswith("megalite/") else f"megalite/scripts/{name}" for name in names}


def problems(wheel: Path, files: set[str]) -> list[str]:
    """What is wrong with a wheel that should hold `files`, one line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        commands = f"{info}/entry_points.txt"
        points = ConfigParser()
        points.read_string(archive.read(commands).decode() if commands in names else "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.search(r'__version__ = "(.+)"', (ROOT / "megalite" / "__init__.py").read_text())
    inside = {name for name in names if ".dist-info/" not in name}
    found = [f"missing: {name}" for name in sorted(files - inside)]
    found += [f"should not be there: {name}" for name in sorted(inside - files)]
    if version is None or metadata["Version"] != version[1]:
        found.append(f"version {metadata['Version']} is not that of megalite/__init__.py")
    core = {each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each}
    if {re.sub(r"\s", "", each) for each in core} != {re.sub(r"\s", "", each) for each in project["dependencies"]}:
        found.append(f"asks for {sorted(core)}, pyproject.toml for {project['dependencies']}")
    if set(metadata.get_all("Provides-Extra", [])) != set(project["optional-dependencies"]):
        found.append("other extras than in pyproject.toml")
    offered = dict(points["console_scripts"]) if "console_scripts" in points else {}
    if offered != project["scripts"]:
        found.append(f"other commands than in pyproject.toml: {', '.join(sorted(offered)) or 'none'}")
    if not any(name.endswith("LICENSE") for name in names):
        found.append("has no licence")
    return found


def main() -> int:
    """Exit status 1 where something is wrong."""
    with tempfile.TemporaryDirectory() as place:
        wheel = build(Path(place))
        found = problems(wheel, expected())
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(place) / "there")
        said = subprocess.run(
            [sys.executable, "-c", TRIAL], cwd=Path(place) / "there", capture_output=True, text=True, check=False
        )
        if said.returncode or place not in said.stdout:
            found.append(f"does not work by itself: {said.stderr or said.stdout}")
        for line in found:
            print(f"error: {wheel.name}: {line}", file=sys.stderr)
        if not found:
            print(f"{wheel.name}: {len(expected())} files, as they should be; works out of an empty folder")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
