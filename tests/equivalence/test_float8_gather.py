"""Weights that ZeRO-3 gathers in float8: half the bytes, and the bits of a run that gathers them as they are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY, saved_tensors
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.parallel.zero import rounded_weights, unshard
from megalite.testing import run_ranks
from megalite.train.run import open_run

BASE = [*TINY, *"--num-layers 3 --zero-stage 3 --micro-batch-size 1 --fp8 format=hybrid".split()]
BF16 = [flag for flag in BASE if flag != "--fp64"] + ["--bf16"]


def body(world: World, argv: list[str], folder: str) -> tuple[list[float], int, dict[str, Tensor]]:
    """Losses and norms of three updates and of an evaluation between them; bytes that this rank gathered of weights;
    what was saved."""
    gathered = 0

    def counting(right):
        def call(out, x, axis, **more):
            nonlocal gathered
            gathered += out.nbytes
            return right(out, x, axis, **more)

        return call

    with (
        patch.object(unshard, "all_gather_into", counting(unshard.all_gather_into)),
        patch.object(rounded_weights, "all_gather_into", counting(rounded_weights.all_gather_into)),
        open_run(parse([*argv, "--save", folder], world_size=world.size), world) as run,
    ):
        numbers = []
        for step in range(3):
            stats = run.trainer.train_step(drain=step == 2)
            numbers += [float(stats.lm_loss), float(stats.grad_norm)]
        run.state.save(run.trainer.progress)
    return numbers, gathered, saved_tensors(folder) if world.is_first else {}


def train(argv: list[str], ranks: int) -> tuple[list[float], int, dict[str, Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        cache = ["--data-cache-path", str(Path(folder).parent / "megalite-test-cache")]
        results = run_ranks(body, ranks, [*argv, *cache], folder)
    assert all(numbers == results[0][0] for numbers, _, _ in results)
    return results[0]


@pytest.mark.parametrize(
    ("base", "flags", "ranks"),
    [
        (BF16, "", 2),
        pytest.param(BASE, "--fp8-recipe delayed --fp8-amax-history-len 2", 3, marks=pytest.mark.landing),
        pytest.param(BASE, "--tensor-model-parallel-size 2 --swiglu --disable-bias-linear", 4, marks=pytest.mark.full),
        pytest.param(BASE, "--num-distributed-optimizer-instances 2", 4, marks=pytest.mark.full),
        pytest.param(BASE, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 4, marks=pytest.mark.full),
        pytest.param(BASE, "--recompute-granularity full --recompute-method uniform", 2, marks=pytest.mark.full),
        pytest.param(BASE, "--optimizer muon --no-overlap-param-gather", 2, marks=pytest.mark.full),
    ],
)
def test_bits_are_the_same_and_bytes_are_fewer(base: list[str], flags: str, ranks: int) -> None:
    argv = [*base, *flags.split(), *(["--global-batch-size", "6"] if ranks == 3 else [])]
    plain, rounded = train(argv, ranks), train([*argv, "--fp8-param-gather"], ranks)
    assert rounded[0] == plain[0]
    unlike = [name for name, value in plain[2].items() if not torch.equal(value, rounded[2][name])]
    assert plain[2] and rounded[2].keys() == plain[2].keys() and not unlike, unlike
    assert rounded[1] < plain[1]


def test_the_bytes_of_layers_are_half() -> None:
    wide = [*BF16, *"--hidden-size 64 --untie-embeddings-and-output-weights --vocab-size 16".split()]
    (_, plain, _), (_, rounded, _) = (train([*wide, *more], 2) for more in ([], ["--fp8-param-gather"]))
    # the embedding, the head and the positions travel as they are: 2 x 16 + 16 rows of 64 beside 12 x 64 x 64 a layer
    assert 0.50 < rounded / plain < 0.53, (plain, rounded)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-recipe blockwise", "--fp8-param-gather: not with --fp8-recipe=blockwise, whose scales shards cut"),
        ("--fp8-recipe rowwise", "--fp8-param-gather: not with --fp8-recipe=rowwise, whose scales shards cut"),
        ("--offload params", "--fp8-param-gather: not with --offload params, whose weights come from the host"),
    ],
)
def test_what_shards_cannot_agree_on_is_refused_by_name(flags: str, message: str) -> None:
    wide = ["--hidden-size", "256", "--seq-length", "256"]
    with pytest.raises(ConfigError) as refused:
        parse([*BF16, *wide, *flags.split(), "--fp8-param-gather"], world_size=2)
    assert message in str(refused.value), str(refused.value)
