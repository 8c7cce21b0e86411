"""Draw the curves of one or more runs into a single HTML file that opens anywhere.

python tools/report.py --load checkpoints/a checkpoints/b --output report.html
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool
from megalite.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megalite.observe import Record


def main(argv: list[str]) -> None:
    """Read the metrics, write the page."""
    parser = ToolParser("Draw the curves of one or more runs into a single HTML file.")
    parser.add_argument("--load", required=True, nargs="+", metavar="DIR", help="run directories (--save of training)")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="page to write")
    flags = parser.parse_args(argv)
    from report_page import render_report  # torch comes with it: not before the flags are right

    runs = [(Path(directory).name or directory, read_run(directory)) for directory in flags.load]
    page = render_report(" and ".join(name for name, _ in runs), runs)
    try:
        Path(flags.output).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--output={flags.output}: cannot be written ({error.strerror})") from None
    print(f" wrote {flags.output}")


def read_run(directory: str) -> list[Record]:
    """The records of a run directory. Raises DataError."""
    from megalite.observe import METRICS_FILE, read_metrics

    path = Path(directory) / METRICS_FILE
    try:
        records = read_metrics(path)
    except OSError as error:
        raise DataError(f"--load={directory}: {METRICS_FILE} cannot be read ({error.strerror})") from None
    if not records:
        raise DataError(f"--load={directory}: {METRICS_FILE} holds no record; is the run still starting?")
    return records


if __name__ == "__main__":
    sys.exit(run_tool(main))
