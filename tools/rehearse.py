"""Rehearses a run of any number of GPUs on this machine: the real code of every distinct rank, without values.

    python tools/rehearse.py --config configs/gpt2_124m.yaml --num-devices 8
    python tools/rehearse.py <flags of pretrain_gpt.py> --num-devices 64

All flags and files of pretrain_gpt.py are understood; no data, tokenizer or checkpoint is needed. Exit status 1 where a
fault is found: calls of ranks that do not match, ranks that wait for each other in a circle, a race between streams,
memory that every iteration leaves behind or, with --hardware, that is not there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import ToolParser, name_ignored, run_tool
from megalite.errors import ConfigError
from megalite.planner import load_hardware
from megalite.progress import ProgressBar

MOST_DEVICES = 1_000_000


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = ToolParser(__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--num-devices", type=int, required=True, metavar="N", help="ranks of the run")
    p.add_argument("--ranks", metavar="R,...", type=ranks, help="rehearse these only; unset: every distinct rank")
    p.add_argument("--steps", type=int, default=2, metavar="N", help="iterations (default 2)")
    p.add_argument("--hardware", metavar="NAME|FILE", help="whether it fits on these devices (as tools/plan.py)")
    p.add_argument("--values", action="store_true", help="also train a small layout on real values, streams being late")
    p.add_argument("--json", metavar="FILE", type=Path, help="what was found, for programs")
    p.add_argument("--trace", metavar="FILE.json", type=Path, help="when all would run on --hardware, a row a stream")
    p.add_argument("--explain", choices=("memory", "communicators", "syncs"), help="more of what was found")
    return p


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    return run_tool(_run, argv)


def _run(argv: list[str]) -> int:
    args, rest = parser().parse_known_args(argv)
    if not 1 <= args.num_devices <= MOST_DEVICES:
        raise ConfigError(f"--num-devices={args.num_devices}: from 1 to {MOST_DEVICES:,}")
    if not 1 <= args.steps <= 100:
        raise ConfigError(f"--steps={args.steps}: from 1 to 100")
    if args.trace is not None and args.hardware is None:
        raise ConfigError(f"--trace={args.trace}: --hardware says how long things take, and is not given")
    # torch comes with it: after what is wrong is told
    from megalite.rehearsal import as_json, explain, rehearse_run, rehearsed, with_values, write_trace

    hardware = None if args.hardware is None else load_hardware(args.hardware)
    room = None if hardware is None else hardware.memory_bytes - hardware.reserved_bytes
    run = rehearsed(rest, args.num_devices, steps=args.steps)
    name_ignored(rest)
    with ProgressBar("rehearsing", "ranks") as bar:
        report = rehearse_run(run, args.ranks, device_bytes=room, hardware=hardware, on_rank=bar)
    if args.values:
        faults, row = with_values(run)
        report = replace(report, faults=[*report.faults, *faults], rows=[*report.rows, row])
    if args.json is not None:
        args.json.write_text(as_json(report))
    if args.trace is not None and hardware is not None and report.memory:
        write_trace(args.trace, run, report.records, hardware)
    if args.explain is not None:
        print(explain(report, args.explain))
    print(report)
    return int(report.fails)


def ranks(text: str) -> list[int]:
    """Ranks and commas, as in 0,64."""
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
