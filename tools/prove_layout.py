"""A certificate that a configuration computes what one process computes.

    python tools/prove_layout.py --config mine.yaml --num-devices 64 [flags of pretrain_gpt.py]
    torchrun ... tools/prove_layout.py --preflight 3 --config mine.yaml        on the cluster, at full size

The model is made small, everything that composes is kept (tensor, pipeline and data parallelism, schedule, ZeRO stage,
recomputation, optimizer, dropout, tied embeddings, clipping, a growing batch), and runs here in fp64 beside a single
process, a checkpoint that is taken to another layout included. Prints PASS with the numbers, or the first tensor, layer
and action that differ (exit status 1).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import MOST, ToolParser, check_numbers, name_ignored, run_tool, say
from megalite.config import Config, config_problems, read_unjudged
from megalite.errors import ConfigError
from megalite.proof import made_data, shrink

STEPS = 5


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = ToolParser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--num-devices", type=int, metavar="N", help="ranks of the run; unset: --nprocs, or one replica")
    p.add_argument("--max-ranks", type=int, default=64, metavar="N", help="ranks that are started here at most")
    p.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"iterations, at least 3 (default {STEPS})")
    p.add_argument("--keep", metavar="DIR", help="leave the small configuration and all numbers in this folder")
    p.add_argument("--preflight", type=int, metavar="N", help="instead: N steps at full size on the ranks of the run")
    return p


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status: 0 proved, 1 a difference, 2 a bad configuration."""
    return run_tool(_run, argv)


def _run(argv: list[str]) -> int:
    args, rest = parser().parse_known_args(argv)
    check_numbers(args, preflight=(1, MOST), num_devices=(1, MOST), max_ranks=(1, 1 << 16), steps=(-MOST, 10**4))
    if args.preflight is not None:
        from megalite.proof import run_preflight

        return run_preflight(rest, args.preflight, say)
    if args.steps < 3:
        raise ConfigError(f"--steps={args.steps}: must be >= 3: a step, a checkpoint and a step after it")
    if args.keep is not None:
        try:  # now, not after minutes
            Path(args.keep).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--keep={args.keep}: {error.strerror}; give a directory that can be written") from None
    config, world_size = resolve(rest, args.num_devices)
    name_ignored(rest)
    small = shrink(config, world_size, steps=args.steps, most_ranks=args.max_ranks)
    from megalite.proof import prove  # torch comes with it: not before the configuration is known to be right

    return prove(small, args.steps, say, keep=args.keep)


def resolve(argv: list[str], num_devices: int | None) -> tuple[Config, int]:
    """The configuration, and the ranks that it is meant for. Raises ConfigError where it is not legal."""
    config, _ = read_unjudged(argv)
    if config.model.is_foreign:
        raise ConfigError("--model-module: the certificate is of megalite's own models, which it can make smaller")
    if num_devices is not None and num_devices < 1:
        raise ConfigError(f"--num-devices={num_devices}: must be >= 1")
    parallel = config.parallel
    world_size = (
        num_devices or parallel.nprocs or parallel.model_parallel_size * (parallel.num_distributed_optimizer_instances)
    )
    wrong = config_problems(made_data(config), world_size)  # of this machine's files nothing is asked
    if wrong:
        raise ConfigError(wrong)
    return config, world_size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
