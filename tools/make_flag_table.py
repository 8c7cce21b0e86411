"""Write docs/flags.md from the schema of the configuration, or check that it is up to date (--check)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalite.config.flag_table import flag_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 where --check finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args(argv)
    if options.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == flag_table():
            return 0
        print(f"{PAGE.name}: out of date; run python tools/make_flag_table.py", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(flag_table(), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
