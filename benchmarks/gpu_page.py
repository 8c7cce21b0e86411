"""Tables of docs/gpus.md that scripts write, each between two comments that name its script."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpus.md"


def held(script: str) -> dict[str, Any]:
    """What the script counted when it last wrote."""
    found: dict[str, Any] = json.loads(_record(script).read_text(encoding="utf-8"))
    return found


def keep(script: str, counted: dict[str, Any]) -> None:
    """Writes what the script has counted."""
    _record(script).write_text(json.dumps(counted, indent=1) + "\n", encoding="utf-8")


def written(script: str) -> str:
    """The script's table as it stands in the page."""
    found = _table(script).search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE.name} has no table of {script}.py"
    return found[2]


def print_or_write(script: str, about: str | None, table: Callable[[bool], str], argv: Sequence[str]) -> int:
    """Prints the script's table and, with --write, of which `table` is told, writes it; the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table, and what was counted")
    write = parser.parse_args(argv).write
    text = table(write)
    sys.stdout.write(text)
    if write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_table(script).sub(lambda found: f"{found[1]}{text}{found[3]}", page), encoding="utf-8")
    return 0


def _record(script: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"{script}.json"


def _table(script: str) -> re.Pattern[str]:
    begin, end = f"<!-- {script}: python benchmarks/{script}.py --write -->\n", f"<!-- end of {script} -->"
    return re.compile(f"({begin})(.*?)({end})", re.S)
