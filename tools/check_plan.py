"""Prediction against measurement: many layouts on local processes, one a core.

    OMP_NUM_THREADS=1 python tools/check_plan.py [<flags of pretrain_gpt.py>] [--layouts 24] [--quick] [--json FILE]

Profiles the layers here, predicts every layout, runs it through pretrain_gpt.py, and prints the spread of repeated runs
first, then predicted against measured time, the median error, the rank correlation, and how far the plan's first choice
is from the best that was measured. A machine that does something else meanwhile measures that.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config import Config
from megalite.config.cli import read_unjudged
from megalite.config.saved import dump_yaml
from megalite.errors import MegaliteError, RuntimeFailure
from megalite.planner.hardware import load_hardware
from megalite.planner.predict import Prediction, predict
from megalite.planner.profile import load_profile
from megalite.planner.report import layout_text
from megalite.planner.space import Layout, apply, legal_layouts

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --global-batch-size 8 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 1024 --mock-data"
)
WARM_UP = 3
SAMPLE = 1


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = argparse.ArgumentParser(prog="check_plan.py", description=__doc__, allow_abbrev=False)
    p.add_argument("--num-devices", type=int, default=2, metavar="N", help="local processes (default 2)")
    p.add_argument("--layouts", type=int, default=24, metavar="K", help="how many to measure (default 24)")
    p.add_argument("--iterations", type=int, default=12, metavar="N", help="of each run (default 12)")
    p.add_argument("--hardware", default="cpu-2core", metavar="NAME|FILE", help="links between the processes")
    p.add_argument("--quick", action="store_true", help="4 layouts, 5 iterations, a quick profile")
    p.add_argument("--json", metavar="FILE", help="write the rows here")
    return p


def choose(config: Config, world_size: int, number: int) -> list[Layout]:
    """A sample of all legal layouts, the same one every time."""
    found = sorted(legal_layouts(config, world_size, frozenset()), key=str)
    return random.Random(SAMPLE).sample(found, min(number, len(found)))


def run(config: Config, world_size: int, iterations: int) -> float:
    """Median seconds of a step, the first ones left out. Raises RuntimeFailure."""
    with tempfile.TemporaryDirectory() as folder:
        parallel = replace(config.parallel, nprocs=world_size)
        training = replace(config.training, train_iters=iterations, eval_iters=0)
        logging = replace(config.logging, log_interval=1)
        data = replace(config.data, num_workers=0)
        checkpoint = replace(config.checkpoint, save=str(Path(folder) / "run"))
        whole = replace(config, parallel=parallel, training=training, logging=logging, data=data, checkpoint=checkpoint)
        path = Path(folder) / "config.yaml"
        path.write_text(dump_yaml(whole))
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise RuntimeFailure(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    times = [record["iteration_time_ms"] / 1e3 for record in records if record["kind"] == "train"]
    return statistics.median(times[min(WARM_UP, len(times) - 1) :])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's."""
    n = len(first)
    if n < 2:
        return 1.0
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    distance = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * distance / (n * (n * n - 1))


def report(rows: Sequence[tuple[Prediction, float]]) -> str:
    """The table and its three figures."""
    lines = [f"{'predicted ms':>12} {'measured ms':>12} {'error':>7}  layout"]
    for prediction, seconds in rows:
        error = prediction.step_time / seconds - 1
        lines.append(
            f"{prediction.step_time * 1e3:12.1f} {seconds * 1e3:12.1f} {error:+7.1%}  "
            f"{layout_text(prediction.config, prediction.world_size)}"
        )
    predicted, measured = [p.step_time for p, _ in rows], [seconds for _, seconds in rows]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    chosen = measured[predicted.index(min(predicted))]
    lines.append(
        f"median error {statistics.median(errors):.1%} (wanted: 10 %), rank correlation "
        f"{rank_correlation(predicted, measured):.2f} (0.9), first choice "
        f"{chosen / min(measured) - 1:+.1%} of the best measured (5 %)"
    )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    args, rest = parser().parse_known_args(argv)
    world, iterations = args.num_devices, 5 if args.quick else args.iterations
    argv_of_run = [*(rest or DEFAULT.split()), "--train-iters", str(iterations)]
    try:
        config, _ = read_unjudged(argv_of_run, optional=["micro_batch_size"])
        chosen = choose(config, world, 4 if args.quick else args.layouts)
        hardware = load_hardware(args.hardware, devices_per_node=world)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "profile.json")
            sizes = ",".join(str(size) for size in sorted({layout.micro_batch_size for layout in chosen}))
            tool = [sys.executable, str(ROOT / "tools" / "profile_layers.py"), *argv_of_run]
            flags = ["--output", path, "--micro-batches", sizes, *(["--quick"] if args.quick else [])]
            done = subprocess.run([*tool, *flags], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeFailure(f"profile_layers.py: {done.stderr[-2000:]}")
            source = load_profile(path, hardware)
        again = [run(apply(config, chosen[0]), world, iterations) for _ in range(2 if args.quick else 4)]
        print(f"repeated runs of one layout differ by {max(again) / min(again) - 1:.1%}", flush=True)
        rows = []
        for layout in chosen:
            laid_out = apply(config, layout)
            rows.append((predict(laid_out, world, hardware, source), run(laid_out, world, iterations)))
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(report(rows))
    if args.json:
        facts = [{"layout": layout_text(p.config, world), "predicted": p.step_time, "measured": s} for p, s in rows]
        Path(args.json).write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
