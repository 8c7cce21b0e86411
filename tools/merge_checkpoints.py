"""Write the weighted mean of several checkpoints as a checkpoint that loads, resumes and exports.

    python tools/merge_checkpoints.py --load runs/a --last 5 --save runs/a_mean
    python tools/merge_checkpoints.py --load runs/a/iter_0001000 runs/b --weights 1 3 --save runs/soup

What is not averaged (moments, progress, configuration, tokenizer) is that of the checkpoint named last.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool
from megalite.errors import ConfigError


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Write the weighted mean of several checkpoints as a checkpoint.")
    parser.add_argument(
        "--load", nargs="+", required=True, metavar="DIR", help="checkpoints, or run directories (their newest)"
    )
    parser.add_argument("--last", type=int, metavar="N", help="the newest N checkpoints of the one run in --load")
    parser.add_argument("--weights", nargs="+", type=float, help="one for each checkpoint, in order; unset: all alike")
    parser.add_argument("--use-ema", action="store_true", help="merge the averages that --ema-decay has kept")
    parser.add_argument(
        "--no-load-optim", action="store_true", help="write the weights alone: to fine-tune, evaluate and export"
    )
    parser.add_argument("--save", required=True, metavar="DIR", help="new or empty directory")
    flags = parser.parse_args(argv)
    if flags.last is not None and (flags.last < 1 or len(flags.load) > 1):
        raise ConfigError(f"--last={flags.last}: of one run directory in --load, 1 or more; name the checkpoints")
    for weight in flags.weights or ():
        if not 0 < weight < math.inf:
            raise ConfigError(f"--weights={weight:g}: not above 0; leave the checkpoint out")
    return flags


def main(argv: list[str]) -> None:
    """Raises MegaliteError."""
    flags = parse(argv)
    from megalite.checkpoint import committed, resolve_checkpoint  # torch comes with these
    from megalite.convert import MergedSource, write_checkpoint

    one, last = flags.load[0], flags.last
    newest = [resolve_checkpoint(path) for path in flags.load]
    paths = committed(one)[-last:] if last else newest
    if last and len(paths) < last:
        raise ConfigError(f"--last={last}: {one} holds {len(paths)} committed checkpoints")
    if flags.weights is not None and len(flags.weights) != len(paths):
        raise ConfigError(f"--weights: {len(flags.weights)} of them, for {len(paths)} checkpoints; give one for each")
    source = MergedSource(paths, flags.weights or [1.0] * len(paths), use_ema=flags.use_ema)
    run = source if source.continues and not flags.no_load_optim else None
    written = write_checkpoint(source, Path(flags.save), run=run)
    for part in source.parts:
        print(f" {part['share']:.4f}  {part['checkpoint']}")
    print(f"wrote {written}")
    if run is not None:
        print(f"with the last one's optimizer state: --load {flags.save} continues after iteration {run.iteration:,}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
