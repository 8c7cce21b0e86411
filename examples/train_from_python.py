"""pretrain_gpt.py's training from Python: a configuration, a run, and what it leaves.

python examples/train_from_python.py
"""

import json
import sys
import tempfile
from pathlib import Path

from megalite.comm import World
from megalite.config import Config, parse
from megalite.launch import launch, read_environment

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 64 --mock-data"
TRAINING = "--micro-batch-size 2 --global-batch-size 8 --train-iters 40 --lr 1e-2 --lr-warmup iters=0 --log-interval 10"
LAYOUT = "--nprocs 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"


def train(config: Config, world: World) -> int:
    """On every rank. `megalite.train.open_run` gives the parts, for a loop of your own."""
    from megalite.train import run_training

    return run_training(config, world)


def main(folder: Path) -> int:
    flags = f"{SIZES} {TRAINING} {LAYOUT} --eval-iters 0 --data-cache-path {folder / 'cache'}"
    config = parse([*flags.split(), "--save", str(folder / "run")])  # raises ConfigError: every problem, a line each
    status = launch(config, train, read_environment())
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            print(f"step {record['iteration']}: loss {record['lm_loss']:.4f}, norm {record['grad_norm']:.3f}")
    return status


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(Path(place)))
