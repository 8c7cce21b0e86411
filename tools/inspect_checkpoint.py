"""Look into a checkpoint: what it holds, whether it is whole, how it differs from another.

    inspect_checkpoint.py runs/a                         all checkpoints of a run, and the newest in detail
    inspect_checkpoint.py runs/a/iter_0000100 --verify   every byte against its checksum; damaged files by name
    inspect_checkpoint.py runs/a --tensors               shape, dtype and statistics of every tensor
    inspect_checkpoint.py runs/a --diff runs/b           names, values and settings that differ

Works for any layout, in one process, with the memory of a few blocks.
Exit status: 0 all well, 1 --diff found differences, 2 damaged or not a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool, stored
from megalite.errors import CheckpointError
from megalite.progress import ProgressBar
from megalite.stores import Place, place

Json = dict[str, Any]


#: Settings that say where a run lies: shown where they differ, no difference of the checkpoints.
PLACES = {"config.checkpoint.save", "config.checkpoint.load"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_tool(_run, None if argv is None else list(argv))


def _run(argv: list[str]) -> int:
    parser = ToolParser("Look into a checkpoint: what it holds, whether it is whole, how it differs from another.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("directory", metavar="DIR", nargs="?", type=stored, help="a run directory or one checkpoint")
    where.add_argument("--load", metavar="DIR", type=stored, help="the same, by the other tools' flag")
    parser.add_argument("--ckpt-step", type=int, help="which checkpoint of a run directory; unset: the newest")
    parser.add_argument("--verify", action="store_true", help="check every byte")
    parser.add_argument("--tensors", action="store_true", help="statistics of every tensor")
    parser.add_argument("--diff", metavar="OTHER", type=stored, help="compare with another checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    arguments.directory = arguments.directory or arguments.load
    report = inspect(arguments)
    print(json.dumps(report, indent=1) if arguments.json else as_text(report))
    if report.get("damaged"):
        return CheckpointError.exit_code
    return 1 if report.get("diff", {}).get("different") else 0


def inspect(arguments: argparse.Namespace) -> Json:
    """All that was asked for, as one JSON object. Raises CheckpointError."""
    from checkpoint_contents import differences, statistics, summarize, summarize_run
    from megalite.checkpoint import COMMITTED, CheckpointReader, is_file, verify_checkpoint

    report: Json = {}
    if not is_file(place(arguments.directory) / COMMITTED):
        report["run"] = summarize_run(arguments.directory)
    path = find(arguments.directory, arguments.ckpt_step)
    if arguments.verify:
        with ProgressBar("verifying", "B") as bar:
            report["damaged"] = verify_checkpoint(path, on_progress=bar)
        if report["damaged"]:
            return report
    report["checkpoint"] = summarize(path)
    if arguments.tensors:
        reader = CheckpointReader(path)
        report["tensors"] = {}
        with ProgressBar("reading", "tensors") as bar:
            for name in reader.names:
                report["tensors"][name] = statistics(reader, name)
                bar(len(report["tensors"]), len(reader.names))
    if arguments.diff is not None:
        found = differences(path, find(arguments.diff, None))
        told = {key: value for key, value in found.items() if key not in ("paths", "equal_tensors", "meta")}
        found["different"] = any(told.values()) or not found["meta"].keys() <= PLACES
        report["diff"] = found
    return report


def find(directory: str, step: int | None) -> Place:
    """The checkpoint that a directory means."""
    from megalite.checkpoint import resolve_checkpoint

    return resolve_checkpoint(directory, step, flag="", advice="give a run's --save, or one of its checkpoints")


def as_text(report: Json) -> str:
    """The report for people."""
    lines: list[str] = []
    if "run" in report:
        lines += run_lines(report["run"])
    if "damaged" in report:
        problems = report["damaged"]
        lines += [f"DAMAGED: {line}" for line in problems] or ["whole: every byte agrees with its checksum"]
    if "checkpoint" in report:
        lines += checkpoint_lines(report["checkpoint"])
    if "tensors" in report:
        lines += tensor_lines(report["tensors"])
    if "diff" in report:
        lines += diff_lines(report["diff"])
    return "\n".join(lines)


def run_lines(run: Json) -> list[str]:
    from megalite.progress import amount

    lines = [f"run {run['path']}"]
    for row in run["checkpoints"]:
        lines.append(f"  {row['name']:14} {row['error'] if 'error' in row else amount(row['bytes'], 'B')}")
    return lines + [f"  {name} (interrupted; swept when the run continues)" for name in run["interrupted"]]


def checkpoint_lines(checkpoint: Json) -> list[str]:
    from megalite.progress import amount

    lines = [
        f"checkpoint {checkpoint['path']}",
        f"  step {checkpoint['step']}, {amount(checkpoint['bytes'], 'B')}, "
        f"saved by {checkpoint['saved_by_ranks']} rank(s), save id {checkpoint['save_id']}",
    ]
    for name, group in checkpoint["groups"].items():
        lines.append(
            f"  {name:28} {group['tensors']:5} tensors {group['elements']:>15,} elements "
            f"{amount(group['bytes'], 'B'):>9} {', '.join(group['dtypes'])}"
        )
    for name, row in checkpoint["files"].items():
        layers = f"  layers {numbers(row['layers'])}" if row["layers"] else ""
        lines.append(f"  {name:28} {row['rectangles']:5} rectangles {amount(row['bytes'], 'B'):>9}{layers}")
    lines += [f"  {name:28} {amount(size, 'B'):>9}" for name, size in checkpoint["extra_files"].items()]
    for key, value in checkpoint["meta"].items():
        text = json.dumps(value)
        lines.append(f"  {key}: {text if len(text) <= 100 else text[:97] + '...'}")
    return lines


def numbers(ascending: Sequence[int]) -> str:
    """`0-3, 8`: runs of numbers by their ends."""
    runs: list[list[int]] = []
    for number in ascending:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def tensor_lines(tensors: Json) -> list[str]:
    width = max((len(name) for name in tensors), default=0)
    lines = [f"{'tensor':{width}}  dtype shape                      min          max         mean          std"]
    for name, row in tensors.items():
        columns = [row[key] for key in ("min", "max", "mean", "std")]
        numbers = " ".join("           -" if value is None else f"{value:12.5g}" for value in columns)
        bad = f"  {row['not_finite']} NOT FINITE" if row["not_finite"] else ""
        lines.append(f"{name:{width}}  {row['dtype']:5} {row['shape']!s:20} {numbers}{bad}")
    return lines


def diff_lines(diff: Json) -> list[str]:
    lines = [f"compared with {diff['paths'][1]}: {diff['equal_tensors']} tensors equal"]
    lines += [f"  only in the first: {name}" for name in diff["only_first"]]
    lines += [f"  only in the second: {name}" for name in diff["only_second"]]
    for what in ("shapes", "dtypes"):
        lines += [f"  {name}: {pair[0]} / {pair[1]}" for name, pair in diff[what].items()]
    for name, row in diff["values"].items():
        lines.append(f"  {name}: {row['elements']} elements differ, by at most {row['max_abs']:.3g}")
    return lines + [f"  meta {key}: {pair[0]!r} / {pair[1]!r}" for key, pair in diff["meta"].items()]


if __name__ == "__main__":
    sys.exit(main())
