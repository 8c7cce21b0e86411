"""A process that sees no optional package; run as a program, the `--help` of every tool named in such a process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.extras import EXTRA_OF


class CoreOnly(PathFinder):
    """Finds what is installed, but no optional package."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in EXTRA_OF else super().find_spec(fullname, path, target)


def hide_optional_packages() -> None:
    """From now on an import of one fails in this process, as where it is not installed."""
    sys.meta_path[:] = [CoreOnly if finder is PathFinder else finder for finder in sys.meta_path]
    for name in list(sys.modules):
        if name.partition(".")[0] in EXTRA_OF or name.startswith("torch.utils.tensorboard"):
            del sys.modules[name]


def show_help(tool: str) -> dict[str, object]:
    """What `python tool --help` did."""
    sys.argv = [tool, "--help"]
    sys.path.insert(0, str(Path(tool).parent))
    status: object = None
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_path(tool, run_name="__main__")
        except SystemExit as end:
            status = end.code
    lines = text.getvalue().count("\n")
    return {"tool": tool, "status": status, "lines": lines, "torch": "torch" in sys.modules}


if __name__ == "__main__":
    hide_optional_packages()
    for name in sys.argv[1:]:
        if os.fork() == 0:
            try:
                print(json.dumps(show_help(name)), flush=True)
            finally:
                os._exit(0)
        os.wait()
