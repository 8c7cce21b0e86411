"""Prediction against measurement: many layouts on local processes, one a core.

    OMP_NUM_THREADS=1 python tools/check_plan.py [<flags of pretrain_gpt.py>] [--layouts 24] [--quick] [--json FILE]

Profiles the layers here (before and after; the mean counts), predicts every layout, runs it through pretrain_gpt.py,
and prints the spread of repeated runs first, then predicted against measured time and memory, the errors, the rank
correlation, and how far the plan's first choice of all legal layouts is from the best that was measured. A step counts
only when other programs used less than 0.3 of a core while it ran; a layout without enough such steps is run again.
With --json the rows are kept in FILE, and a second start measures only what is missing there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import MOST, ToolParser, check_numbers, run_tool
from disturbance import BusyClock, Watch
from megalite.config import Config, TrainingLength, dump_yaml, read_unjudged
from megalite.errors import RuntimeFailure
from megalite.extras import require_core
from megalite.planner import (
    Hardware,
    Layout,
    Profile,
    apply,
    layout_text,
    legal_layouts,
    load_hardware,
    load_profile,
    mean_profile,
    predict,
)

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --global-batch-size 8 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 1024 --mock-data"
)
#: Steps at the start of a run that do not count: the first three are watched for memory.
WARM_UP = 4
SAMPLE = 1
MOST_STEPS = 60
ATTEMPTS = 3


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = ToolParser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--num-devices", type=int, default=2, metavar="N", help="local processes (default 2)")
    p.add_argument("--layouts", type=int, default=24, metavar="K", help="how many to measure (default 24)")
    p.add_argument("--steps", type=int, default=8, metavar="N", help="quiet steps of a run that are wanted (default 8)")
    p.add_argument("--patience", type=float, default=60.0, metavar="S", help="wait so long for a quiet machine")
    p.add_argument("--hardware", default="cpu-2core", metavar="NAME|FILE", help="what a profile does not measure")
    p.add_argument("--quick", action="store_true", help="4 layouts, 3 steps, a quick profile")
    p.add_argument("--json", metavar="FILE", help="keep the rows here")
    return p


@dataclass(frozen=True)
class Measured:
    """One run: median seconds of its quiet steps, how many there were, and what it printed about its memory."""

    seconds: float
    quiet_steps: int
    predicted_memory: int | None
    measured_memory: int | None


def choose(config: Config, world_size: int, number: int) -> list[Layout]:
    """A sample of all legal layouts, the same one every time."""
    found = sorted(legal_layouts(config, world_size, frozenset()), key=str)
    return random.Random(SAMPLE).sample(found, min(number, len(found)))


def first_choice(config: Config, world_size: int, hardware: Hardware, profile: object) -> Layout:
    """What a user who profiles first would be told to take, of all legal layouts."""
    source = source_of(profile, hardware)

    def seconds(layout: Layout) -> float:
        return predict(apply(config, layout), world_size, source.hardware, source).step_time

    return min(sorted(legal_layouts(config, world_size, frozenset()), key=str), key=seconds)


def source_of(profile: object, hardware: Hardware) -> Profile:
    """A profile that is at hand as its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(profile))
        return load_profile(str(path), hardware)


def run(config: Config, world_size: int, wanted: int, watch: Watch) -> Measured:
    """Runs the product until it has made enough quiet steps, and ends it. Raises RuntimeFailure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = replace(
            config,
            parallel=replace(config.parallel, nprocs=world_size),
            training=replace(config.training, length=TrainingLength(train_iters=MOST_STEPS), eval_iters=0),
            logging=replace(config.logging, log_interval=1),
            data=replace(config.data, num_workers=0),
            checkpoint=replace(config.checkpoint, save=str(folder / "run")),
        )
        path = folder / "config.yaml"
        path.write_text(dump_yaml(whole), encoding="utf-8")
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--config", str(path)]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
            try:
                while True:
                    ended = process.poll() is not None
                    found = read_steps(folder / "run" / "metrics.jsonl", watch)
                    if ended or found.quiet_steps >= wanted:
                        break
                    time.sleep(0.2)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # a checkpoint of it would be of no use
                process.wait()
        if ended and process.returncode:
            text = (folder / "output").read_text()[-2000:]
            raise RuntimeFailure(f"{' '.join(command)}: exit status {process.returncode}\n{text}")
    return found


def read_steps(path: Path, watch: Watch) -> Measured:
    """What the metrics say so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    quiet: list[float] = []
    disturbed: list[float] = []
    memory: tuple[int | None, int | None] = (None, None)
    for record in [record for record in records if record["kind"] == "train"]:
        if "measured_memory_bytes" in record:
            memory = (record["predicted_memory_bytes"], record["measured_memory_bytes"])
        seconds, end = record["iteration_time_ms"] / 1e3, datetime.fromisoformat(record["time"]).timestamp()
        if record["iteration"] > WARM_UP:
            noise = watch.others(end - seconds, end)
            (quiet if noise < BusyClock.QUIET else disturbed).append(seconds)
    return Measured(statistics.median(quiet or disturbed or [0.0]), len(quiet), *memory)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's."""
    n = len(first)
    if n < 2:
        return 1.0
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    distance: int = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * distance / (n * (n * n - 1))


@dataclass
class Bench:
    """What is measured on this machine, kept in a file between two starts."""

    config: Config
    world_size: int
    hardware: Hardware
    args: argparse.Namespace
    watch: Watch
    facts: dict[str, Any]

    def keep(self) -> None:
        """Writes the file, if one is wanted."""
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(self.facts, indent=1))

    def profile(self, number: int, argv: Sequence[str], sizes: Sequence[int]) -> None:
        """Measures profile `number`, unless it is known."""
        profiles = self.facts.setdefault("profiles", [])
        if len(profiles) > number:
            return
        self.watch.wait_for_quiet(2.0, self.args.patience)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            tool = [sys.executable, str(ROOT / "tools" / "profile_layers.py"), *argv, "--output", str(path)]
            tool += ["--num-processes", str(self.world_size), "--micro-batches", ",".join(map(str, sizes))]
            done = subprocess.run(
                [*tool, *(["--quick"] if self.args.quick else [])], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeFailure(f"profile_layers.py: {done.stderr[-2000:]}")
            profiles.append(json.loads(path.read_text()))
        self.keep()

    def measure(self, name: str, layout: Layout) -> None:
        """Runs a layout, unless a quiet measurement of it is known."""
        rows = self.facts.setdefault("rows", {})
        steps = min(3, self.args.steps) if self.args.quick else self.args.steps
        if rows.get(name, {}).get("quiet_steps", -1) >= min(3, steps):
            return
        self.watch.wait_for_quiet(1.0, self.args.patience)
        found = asdict(run(apply(self.config, layout), self.world_size, steps, self.watch))
        if found["quiet_steps"] >= rows.get(name, {}).get("quiet_steps", -1):
            rows[name] = found
        self.keep()

    def report(self, layouts: Sequence[Layout], choice: Layout) -> str:
        """The tables and their figures."""
        source = source_of(mean_profile(self.facts["profiles"]), self.hardware)
        lines = ["predicted ms  measured ms   error   predicted MB  measured MB   error  layout"]
        times, sizes = [], []
        self.facts["layouts"] = []
        for number, layout in enumerate(layouts):
            laid_out, row = apply(self.config, layout), self.facts["rows"][f"layout {number}"]
            found = predict(laid_out, self.world_size, source.hardware, source)
            seconds = row["seconds"]
            text = f"{1e3 * found.step_time:12.1f} {1e3 * seconds:12.1f} {found.step_time / seconds - 1:+7.1%}"
            if row["measured_memory"]:
                planned, peak = row["predicted_memory"], row["measured_memory"]
                text += f"   {planned / 1e6:12.1f} {peak / 1e6:12.1f} {planned / peak - 1:+7.1%}"
                sizes.append(abs(planned / peak - 1))
            disturbed = "" if row["quiet_steps"] >= 3 else "  (disturbed)"
            first = "  <-- first choice" if layout == choice else ""
            lines.append(f"{text}  {layout_text(laid_out, self.world_size)}{first}{disturbed}")
            times.append((found.step_time, row["seconds"]))
            self.facts["layouts"].append(
                {
                    "layout": layout_text(laid_out, self.world_size) + (" (first choice)" if layout == choice else ""),
                    "predicted_seconds": found.step_time,
                    "measured_seconds": seconds,
                    "seconds_error": found.step_time / seconds - 1,
                    "predicted_memory": row["predicted_memory"],
                    "measured_memory": row["measured_memory"],
                    "memory_error": row["predicted_memory"] / (row["measured_memory"] or 1) - 1,
                }
            )
        self.keep()
        return "\n".join([*lines, *_figures(times, sizes, times[layouts.index(choice)][1])])


def _figures(times: Sequence[tuple[float, float]], sizes: Sequence[float], chosen: float) -> list[str]:
    predicted, measured = [p for p, _ in times], [m for _, m in times]
    errors = [abs(p / m - 1) for p, m in times]
    lines = [
        f"time: median error {statistics.median(errors):.1%} (wanted: 10 %), rank correlation "
        f"{rank_correlation(predicted, measured):.2f} (0.9), first choice "
        f"{chosen / min(measured) - 1:+.1%} of the best measured (5 %)"
    ]
    if sizes:
        lines.append(f"memory: largest error {max(sizes):.1%}, median {statistics.median(sizes):.1%} (5 %)")
    return lines


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    return run_tool(_run, argv)


def _run(argv: list[str]) -> None:
    args, rest = parser().parse_known_args(argv)
    check_numbers(args, num_devices=(1, 1 << 10), layouts=(1, 10**6), steps=(1, 10**6), patience=(0, MOST))
    require_core()  # the layouts that it measures need torch
    world = args.num_devices
    argv_of_run = [*(rest or DEFAULT.split()), "--train-iters", str(MOST_STEPS)]
    config, _ = read_unjudged(argv_of_run, optional=["micro_batch_size"])
    chosen = choose(config, world, 4 if args.quick else args.layouts)
    hardware = load_hardware(args.hardware, devices_per_node=world)
    facts = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else {}
    with Watch() as watch:
        bench = Bench(config, world, hardware, args, watch, facts)
        sizes = sorted({layout.micro_batch_size for layout in chosen})
        repeats = [f"repeat {number}" for number in range(2 if args.quick else 4)]
        for name in repeats:
            bench.measure(name, chosen[0])
        again = [facts["rows"][name]["seconds"] for name in repeats]
        print(f"repeated runs of one layout differ by {max(again) / min(again) - 1:.1%}", flush=True)
        bench.profile(0, argv_of_run, sizes)
        choice = first_choice(config, world, hardware, facts["profiles"][0])
        chosen += [choice] if choice not in chosen else []
        for _ in range(ATTEMPTS):
            for number, layout in enumerate(chosen):
                bench.measure(f"layout {number}", layout)
        bench.profile(1, argv_of_run, sizes)
    print(bench.report(chosen, choice))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
