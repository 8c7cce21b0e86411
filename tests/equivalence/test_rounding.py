"""The number formats that people train in, against the oracle in the same format, within the rounding model's bounds
(`megalite/testing/rounding.py`); and that these bounds see what fp64's proofs cannot."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import OPTIMIZERS, TINY, Layout, draw, train_body
from megalite.comm.world import World
from megalite.parallel.zero.sharded_optimizer import PendingNorm, ShardedOptimizer
from megalite.testing import run_ranks
from megalite.testing.rounding import FP32, Bounds, permuted_sums, rerun

SINGLE = [flag for flag in TINY if flag != "--fp64"]
FORMATS = {"fp32": [], "bf16": ["--bf16"]}


def bounds_of(case: Layout, flags: Sequence[str], steps: int) -> Bounds:
    more = {"stages": case.stages, "together": case.together} if case.stages else {"delay": case.delay}
    return Bounds([*SINGLE, *flags, "--micro-batch-size", "1", *case.model], steps, **more)


def comparable(case: Layout) -> bool:
    """For a rounding a token takes another expert, and an operand another number of float8, a sixteenth away:
    everything after it is another run."""
    return not {"--num-experts", "--fp8-format"} & {*case.model, *case.layout} and case.world_size > 1


@pytest.mark.parametrize("name", FORMATS)
def test_random_layouts_are_the_oracle_to_rounding(name: str, full: bool, fresh: int) -> None:
    """All draws that differ are named; and in fp32 a first norm that is 1e-5 off is seen in each that has one."""
    failures = []
    for seed, count in ((3, 20 if full else 0), (fresh, 10 if full else 1)):
        rng = random.Random(f"{name} {seed}")
        for number in range(count):
            case = draw(rng, want=lambda case: comparable(case) and (full or case.world_size <= 4))
            problems = distances(case, name)
            failures += [f"seed {seed}, configuration {number}: {problems}\n{case.command}, in {name}"] * bool(problems)
    assert not failures, "\n".join([f"{len(failures)} draws differ", *failures])


def distances(case: Layout, name: str) -> list[str]:
    argv = [*SINGLE, *FORMATS[name], *case.model, *case.layout]
    losses, norms = run_ranks(train_body, case.world_size, argv, 3)[0]
    bounds = bounds_of(case, FORMATS[name], 3)
    norms = norms if bounds.expected.norms else []
    problems = bounds.problems(losses, norms)
    if norms and bounds.exact and not problems:
        mutated = bounds.problems(losses, [norms[0] * (1 + 1e-5), *norms[1:]])
        assert [line.split(":")[0] for line in mutated] == ["norms of step 0"], mutated
    return problems


@pytest.mark.landing
def test_the_oracles_soap_has_eigenvectors_in_fp32_too() -> None:
    """The product's are made in fp64; by eigenvectors in fp32 the oracle was 3e-4 away, at every layout alike."""
    argv = [*SINGLE, "--num-layers", "2", *OPTIMIZERS["soap"].split(), "--micro-batch-size", "1"]
    _, norms = run_ranks(train_body, 1, argv, 3)[0]
    assert norms == pytest.approx(rerun(argv, 3).norms, rel=FP32)


DP2 = ("--zero-stage", "1", "--micro-batch-size", "1")
MODEL = ("--num-layers", "2", "--clip-grad", "0.5")


def norm_off_body(world: World, argv: list[str], factor: float) -> tuple[list[float], list[float | None]]:
    right = PendingNorm.wait
    with patch.object(PendingNorm, "wait", lambda self: right(self) * factor):
        return train_body(world, argv, 1)


def plain_norm_body(world: World, argv: list[str], steps: int) -> tuple[list[float], list[float | None]]:
    """The norm as it was: of each tensor at once, which a CPU adds up one by one in fp32."""

    def squares(self: ShardedOptimizer, device: torch.device) -> Tensor:
        norms = [torch.linalg.vector_norm(master.gradient) for master in self._counted]
        return torch.stack(norms).double().square().sum().view(1)

    with patch.object(ShardedOptimizer, "squares", squares):
        return train_body(world, argv, steps)


def test_a_norm_that_is_a_hundred_thousandth_off_is_seen() -> None:
    argv = [*SINGLE, *MODEL, *DP2]
    bounds = Bounds([*SINGLE, *MODEL, "--micro-batch-size", "1"], 1)
    right = run_ranks(norm_off_body, 2, argv, 1.0)[0]
    assert not bounds.problems(*right)
    for factor in (1 + 1e-5, 1 - 1e-5, 1 + 2e-6):
        problems = bounds.problems(*run_ranks(norm_off_body, 2, argv, factor)[0])
        assert any(line.startswith("norms of step 0") for line in problems), (factor, problems)


PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")
LAYOUTS = {
    "one process": ((), 1),
    "dp2": ((), 2),
    "dp2 zero1": (("--zero-stage", "1"), 2),
    "dp2 zero2": (("--zero-stage", "2"), 2),
    "dp2 zero3": (("--zero-stage", "3"), 2),
    "tp2": (TP2, 2),
    "pp2": (PP2, 2),
    "tp2 pp2 dp2 zero1": ((*TP2, *PP2, "--zero-stage", "1"), 8),
}
BUCKETS = ("30000", "1000000", "40000000")
WIDE = (*SINGLE, "--hidden-size", "384", "--num-layers", "2")
"""3.5 million parameters, most of them in three matrices of each block."""


@pytest.fixture(scope="module")
def wide() -> Bounds:
    return Bounds([*WIDE, "--micro-batch-size", "1"], 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_do_not_depend_on_layout_or_buckets(name: str, wide: Bounds, full: bool) -> None:
    """In fp32, of a model large enough for a plain sum to be wrong; the oracle adds up in fp64."""
    layout, world_size = LAYOUTS[name]
    if world_size > 2 and not full:
        pytest.skip("a large matrix: runs with scripts/test.sh --full")
    for size in BUCKETS if full else BUCKETS[-1:]:
        argv = [*WIDE, "--micro-batch-size", "1", *layout, "--ddp-bucket-size", size]
        assert not wide.problems(*run_ranks(train_body, world_size, argv, 1)[0]), size


LARGE = {
    "50 M": "--hidden-size 640 --num-attention-heads 10 --num-layers 10",
    "200 M": "--hidden-size 1024 --num-attention-heads 16 --num-layers 16",
}


@pytest.mark.full
@pytest.mark.parametrize("size", LARGE)
def test_norms_of_large_models(size: str) -> None:
    """The table of docs/proving.md; SGD without momentum, which has no state."""
    argv = [*SINGLE, *LARGE[size].split(), "--optimizer", "sgd", "--sgd-momentum", "0", "--micro-batch-size", "1"]
    argv += ["--global-batch-size", "2"]
    bounds = Bounds(argv, 1)
    for layout, world_size in LAYOUTS.values():
        for bucket in ("300000", "5000000", "400000000"):
            flags = [*argv, *layout, "--ddp-bucket-size", bucket]
            found = run_ranks(train_body, world_size, flags, 1, timeout=600)[0]
            print(size, " ".join(layout) or "one process", bucket, found[1][0] / bounds.expected.norms[0] - 1)
            assert not bounds.problems(*found), flags


def test_a_norm_that_is_added_up_in_fp32_is_seen(wide: Bounds) -> None:
    problems = wide.problems(*run_ranks(plain_norm_body, 1, [*WIDE, "--micro-batch-size", "1"], 1)[0])
    assert any(line.startswith("norms of step 0") for line in problems)


@pytest.mark.landing
def test_permuted_sums_are_the_same_sums() -> None:
    """In fp64 to its own rounding; in fp32 and bf16 they differ, but less than their formats' last digits."""
    argv = [*TINY, *MODEL, "--micro-batch-size", "1"]
    adapted = ["--bf16", "--lora-rank", "3"]
    for flags, least, most in (
        ([], 0.0, 1e-13),
        (["--fp32"], 1e-10, FP32),
        (["--bf16"], 1e-7, 1e-2),
        (adapted, 1e-7, 1e-2),
    ):
        whole = [*(flag for flag in argv if flag != "--fp64" or not flags), *(f for f in flags if f != "--fp32")]
        plain = rerun(whole, 2)
        with permuted_sums(1):
            permuted = rerun(whole, 2)
        apart = [abs(a - b) / b for a, b in zip(permuted.norms, plain.norms, strict=True)]
        assert least <= max(apart) <= most, (flags, apart)
