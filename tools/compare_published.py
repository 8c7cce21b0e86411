"""Predict training runs that others have published, and print the error of each.

    python tools/compare_published.py              all of them (about half a minute)
    python tools/compare_published.py --source C E

Nothing is fitted to them: the numbers are those of the hardware files; what a source leaves open the search chooses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.planner.published import SOURCES, compare, published_runs, table


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    parser = argparse.ArgumentParser(
        prog="compare_published.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", nargs="+", choices=sorted(SOURCES), help="only the runs of these sources")
    args = parser.parse_args(argv)
    print(table(compare(run for run in published_runs() if args.source is None or run.source in args.source)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
