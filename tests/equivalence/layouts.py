"""Running the product on ranks and comparing what it saved with the oracle; drawing layouts."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import Checkpointer, resolve
from megalite.checkpoint.storage import read_manifest
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.testing import run_ranks
from megalite.testing.harness import PATIENCE_SECONDS
from megalite.testing.oracle import Trajectory, reference
from megalite.train.run import open_run

VOCABULARY = 61
TINY = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 8 --train-iters 50 --lr 1e-2 "
    "--lr-decay-style constant --weight-decay 0.1 --adam-eps 1e-5 --fp64 --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --eval-iters 0 --num-workers 0 "
    "--no-exit-signal-handler --distributed-timeout-minutes 0.2"
).split()


def train_body(world: World, argv: list[str], steps: int) -> tuple[list[float], list[float | None]]:
    """Losses and norms of `steps` iterations through the product; the state is saved at the end."""
    config = parse(argv, world_size=world.size)
    losses, norms = [], []
    with open_run(config, world) as run:
        for step in range(steps):
            stats = run.trainer.train_step(drain=step == steps - 1)
            losses.append(float(stats.lm_loss))
            norms.append(None if stats.grad_norm is None else float(stats.grad_norm))
        if config.checkpoint.save is not None:
            run.state.save(run.trainer.progress)
    return losses, norms


def saved_tensors(directory: Path | str) -> dict[str, Tensor]:
    """Every logical tensor of a checkpoint (of the newest one of a run directory), whole."""
    path = resolve(directory)
    shapes = {name: tuple(stored.shape) for name, stored in read_manifest(path).tensors.items()}
    shards = [
        TensorShard(name, shape, (0,) * len(shape), torch.empty(shape, dtype=torch.float64), 0)
        for name, shape in shapes.items()
        if name != "optimizer/step"
    ]
    Checkpointer(path.parent, world=Axis.single("world")).load(path, shards)
    return {shard.name: shard.local for shard in shards}


def train(argv: list[str], world_size: int, steps: int, timeout: float = PATIENCE_SECONDS) -> Trajectory:
    """The product's trajectory on `world_size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        full = [*argv, "--save", folder, "--data-cache-path", str(Path(folder).parent / "megalite-test-cache")]
        results = run_ranks(train_body, world_size, full, steps, timeout=timeout)
        losses, norms = results[0]
        assert all(result == results[0] for result in results), "the ranks disagree about losses or norms"
        return Trajectory(losses, norms, saved_tensors(folder))


@dataclass(frozen=True)
class Layout:
    """A drawn configuration: what the model is, and how it is spread."""

    model: tuple[str, ...]
    layout: tuple[str, ...]
    world_size: int
    delay: int = 0

    @property
    def command(self) -> str:
        flags = " ".join([*TINY, *self.model, *self.layout])
        return f"python pretrain_gpt.py --nprocs {self.world_size} {flags}"


def compare(case: Layout, *, steps: int = 3, tolerance: float = 1e-12, timeout: float = PATIENCE_SECONDS) -> float:
    """Asserts that the layout trains as the oracle does; returns the largest difference of a tensor."""
    expected = reference((*TINY, "--micro-batch-size", "1", *case.model), steps, case.delay)
    found = train([*TINY, *case.model, *case.layout], case.world_size, steps, timeout)
    worst = 0.0
    try:
        assert_close(found.losses, expected.losses, tolerance, "loss")
        assert_close(found.norms, expected.norms, tolerance, "gradient norm")
        missing = set(expected.tensors) ^ {name for name in found.tensors if not name.startswith("previous/")}
        assert not missing, f"names differ: {sorted(missing)[:4]}"
        for name, value in expected.tensors.items():
            difference = float((found.tensors[name] - value).abs().max())
            worst = max(worst, difference)
            # A weight has taken `steps` Adam steps, which magnify rounding by 1 / eps at most (eps 1e-5).
            assert difference <= 10 * tolerance, f"{name} differs by {difference:.3g}"
    except AssertionError as error:
        raise AssertionError(f"{error}\nreplay: {case.command}") from None
    return worst


def assert_close(found, expected, tolerance: float, what: str) -> None:
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a is b is None or (a is not None and b is not None and abs(a - b) <= tolerance * max(1.0, abs(b))), (
            f"{what} of step {step}: {a} instead of {b}"
        )


def draw(rng: random.Random) -> Layout:
    """A random configuration that the product's own validator accepts."""
    while True:
        case = _draw(rng)
        try:
            parse([*TINY, *case.model, *case.layout], world_size=case.world_size)
        except ConfigError:
            continue
        return case


FLUSH = "1f1b gpipe eager-1f1b interleaved breadth-first zb-h1 zb-h2 zb-v chimera dualpipe-v".split()


def _draw(rng: random.Random) -> Layout:
    pick = rng.choice
    grids = [(tp, pp, dp) for tp in (1, 1, 2, 4) for pp in (1, 1, 2, 3, 4) for dp in (1, 1, 2, 4) if tp * pp * dp <= 8]
    tp, pp, dp = pick(grids)
    schedule = pick([*FLUSH, "2bw"]) if pp > 1 else pick(["1f1b", "1f1b", "2bw"])
    model = ["--num-layers", pick(["4", "6"])]
    model += pick(
        [[], ["--model-type", "llama"], ["--model-type", "llama", "--num-query-groups", "2", "--qk-layernorm"]]
    )
    model += pick([[], ["--untie-embeddings-and-output-weights"], ["--no-untie-embeddings-and-output-weights"]])
    model += pick(
        [[], ["--clip-grad", "0"], ["--calculate-per-token-loss"], ["--eod-mask-loss", "--calculate-per-token-loss"]]
    )
    model += pick([[], [], ["--reset-position-ids", "--reset-attention-mask"]])
    layout = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    layout += ["--pipeline-schedule", schedule, "--zero-stage", pick(["0", "1", "2", "3"])]
    layout += ["--virtual-pipeline-model-parallel-size", "2"] if schedule in ("interleaved", "breadth-first") else []
    layout += ["--micro-batch-size", pick(["1", "1", "2"])]
    layout += ["--sequence-parallel"] if tp > 1 and rng.random() < 0.5 else []
    layout += pick(
        [[], ["--recompute-activations"], ["--recompute-granularity", "full", "--recompute-method", "uniform"]]
    )
    layout += pick([[], ["--no-overlap-grad-reduce"], ["--ddp-bucket-size", "3000"]])
    layout += ["--num-distributed-optimizer-instances", "2"] if dp > 2 and rng.random() < 0.5 else []
    layout += pick([[], ["--make-vocab-size-divisible-by", "128"]])  # the last of several ranks hold padding only
    return Layout(tuple(model), tuple(layout), tp * pp * dp, delay=int(schedule == "2bw"))
