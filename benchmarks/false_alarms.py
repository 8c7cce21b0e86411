"""How often `--spikes` calls an update of an unharmed run a spike: short runs of small forms of the recipes.

    python benchmarks/false_alarms.py --text input.txt --runs 20

Each run logs the norms that are above mean + 6 deviations of the latest 128, the numbers of the documentation
(docs/observability.md), and one line a run says how many there were. Learning rates and batches are the recipes'; the
models are smaller, so that a run takes seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALLER = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --eval-iters 0 --no-full-validation"
RECIPES = {
    "shakespeare_char": f"{SMALLER} --tokenizer-type CharTokenizer",
    "quickstart": f"{SMALLER} --ffn-hidden-size 160 --seq-length 64 --float32-matmul-precision highest",
}


def alarms(recipe: str, seed: int, steps: int, text: Path, folder: str) -> int:
    """Spikes that one run has named. Raises CalledProcessError where it fails."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--config", str(ROOT / "configs" / f"{recipe}.yaml")]
    command += [*RECIPES[recipe].split(), "--data-path", str(text), "--data-cache-path", folder, "--seed", str(seed)]
    command += ["--train-iters", str(steps), "--spikes", "action=log", "sigma=6", "window=128"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return (done.stdout + done.stderr).count("the mean of those before and 6 deviations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="the text to train on")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    flags = parser.parse_args()
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        for run in range(flags.runs):
            recipe, seed = list(RECIPES)[run % 2], 1 + run // 2
            found = alarms(recipe, seed, flags.steps, flags.text, folder)
            total += found
            print(f"{recipe}, seed {seed}, {flags.steps} updates: {found} alarms", flush=True)
    print(f"{flags.runs} runs, {flags.runs * flags.steps:,} updates: {total} alarms")


if __name__ == "__main__":
    main()
