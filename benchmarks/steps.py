"""CPU time of a whole training step with other flags of the same recipe, one process and thread.

    python benchmarks/steps.py optimizers     # the optimizers on the character recipe (configs/shakespeare_char.yaml)
    python benchmarks/steps.py short          # the same on the short recipe of tools/study_staleness.py
    python benchmarks/steps.py partial        # --partial-backprop-groups 2 and 4 beside the whole backward

All variants of a table are open at once and take turns of ten steps, in which roots, bases and inverses are made once.
CPU time of this process, so other programs disturb little, and all alike; a ratio is the median over the rounds of time
/ time of the first: above 1 it is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

STEPS = 10
CHARACTERS = (
    f"--config {ROOT}/configs/shakespeare_char.yaml --tokenizer-type NullTokenizer --vocab-size 65 --eval-iters 0 "
    "--no-full-validation --split 100,0,0 --num-workers 0 --train-iters 100000"
)
SHORT = "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --micro-batch-size 8"
QUICKSTART = (
    f"--config {ROOT}/configs/quickstart.yaml --tokenizer-type NullTokenizer --vocab-size 256 --eval-iters 0 "
    "--no-full-validation --num-workers 0 --train-iters 100000 --micro-batch-size 4 --global-batch-size 16 --mock-data"
)
RULES = {
    "AdamW": "--optimizer adam",
    "Muon": "--optimizer muon",
    "SOAP": "--optimizer soap",
    "Shampoo": "--optimizer shampoo",
    "Shampoo, blocks of 128": "--optimizer shampoo --optimizer-args shampoo_max_precond_dim=128",
    "K-FAC": "--optimizer kfac",
}
TABLES = {
    "optimizers": (f"{CHARACTERS} --mock-data", RULES),
    "short": (f"{CHARACTERS} --mock-data {SHORT}", RULES),
    "partial": (QUICKSTART, {f"k = {k}": f"--partial-backprop-groups {k}" for k in (1, 2, 4)}),
}
"""What all variants have, and the variants."""


def measure(flags: str, variants: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of a step in each round, and before it one that does not count."""
    import torch

    from megalite.comm import World
    from megalite.config import parse
    from megalite.train import open_run

    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in variants}
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, own in variants.items():
            with contextlib.redirect_stdout(io.StringIO()):
                runs[name] = stack.enter_context(open_run(parse([*flags.split(), *own.split()], world_size=1), World()))
        for number in range(rounds + 1):
            for name in list(runs) if number % 2 else reversed(runs):
                begin = time.process_time()
                for _ in range(STEPS):
                    runs[name].trainer.train_step(drain=False)
                times[name].append((time.process_time() - begin) / STEPS)
    return {name: found[1:] for name, found in times.items()}


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", choices=tuple(TABLES))
    p.add_argument("--rounds", type=int, default=7)
    args = p.parse_args(argv)
    times = measure(*TABLES[args.table], args.rounds)
    first = next(iter(times.values()))
    print(f"{'':24} ms of CPU   ratio (lowest to highest of {args.rounds} rounds)")
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, first, strict=True)]
        print(
            f"{name:24} {1000 * statistics.median(found):9.1f}   {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
