"""An iteration of a run again, from the nearest checkpoint, at any layout: what happened there?

    python tools/replay.py --load runs/a --iteration 1730                        as the run was laid out
    python tools/replay.py --load runs/a --iteration 1730 --nprocs 2 --pipeline-model-parallel-size 2    or otherwise
    torchrun ... tools/replay.py --load runs/a --iteration 1730

Prints loss and gradient norm of every iteration on the way beside those of metrics.jsonl, the dearest documents of the
iteration, and a verdict: `data` (documents that stand out), `numbers` (the first metric or tensor that is not what the
run had; exit status 1), `hardware` (a second pass computes other bits; exit status 1), or, at another layout,
`rounding` (numbers drift apart as rounding can make them; exit status 3). Nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import MOST, ToolParser, check_numbers, run_tool, say


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's and changes what the run had."""
    p = ToolParser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--load", required=True, metavar="RUN", help="the run's directory (--save)")
    p.add_argument("--iteration", type=int, required=True, metavar="N", help="the iteration to look at")
    p.add_argument("--documents", type=int, default=10, metavar="K", help="documents to show (default 10)")
    p.add_argument("--once", action="store_true", help="no second pass: twice as fast, and blind to hardware")
    return p


def main(argv: list[str]) -> int:
    """Runs the tool, or is one of its ranks; the exit status."""
    return run_tool(_run, argv)


def _run(argv: list[str]) -> int:
    args, rest = parser().parse_known_args(argv)
    check_numbers(args, iteration=(1, MOST), documents=(1, 10**6))
    from megalite.proof import run_replay  # torch comes with it

    return run_replay(args.load, args.iteration, rest, say, documents=args.documents, passes=1 if args.once else 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
