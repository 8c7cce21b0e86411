"""Replay at the run's own layout asks for every digit: one flipped exponent bit is named where it first shows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from cli.test_preflight import GradSink
from torch import Tensor

from megalite.comm import World
from megalite.config import parse
from megalite.launch import LaunchEnvironment
from megalite.observe import Record
from megalite.proof.numbers import Numbers, compared, not_logged, unlike
from megalite.proof.outliers import Sample, chance_of, outliers, scatter_of
from megalite.proof.replay import Replay
from megalite.proof.replay_config import again
from megalite.testing import run_ranks
from megalite.train import run_training
from megalite.train.trainer import Trainer

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 8"
    " --train-iters 10 --lr 1e-3 --lr-decay-style constant --log-interval 1 --save-interval 5 --eval-iters 0"
    " --device cpu --tokenizer-type NullTokenizer --vocab-size 64 --mock-data --num-workers 0 --seed 3"
).split()
WHEN = 7
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "2bw": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"),
    "zero1": (2, "--zero-stage 1"),
}
FIRST_BIT = {2: (torch.int16, 7), 4: (torch.int32, 23)}
"""Bytes of a number -> as which integer its bits are read, and the lowest bit of its exponent."""


def flip(x: Tensor) -> None:
    whole, bit = FIRST_BIT[x.element_size()]
    x.detach().view(-1).view(whole)[1000] ^= 1 << bit


def with_fault(world: World, flags: list[str], fault: str) -> None:
    """Trains; before iteration 7 the last rank has a bit flipped in a tensor of its own."""
    right, add, armed = Trainer.train_step, GradSink.addmm, []

    def train_step(self: Trainer, *, drain: bool, **more: bool) -> object:
        here = self.iteration + 1 == WHEN and world.rank == world.size - 1
        if here and fault == "gradient":
            armed.append(True)
        elif here and fault == "weights":
            modules = [module for stage in self.executor.stages.values() for module in stage.modules]
            named = [pair for module in modules for pair in module.named_parameters()]
            flip(next(weight for name, weight in named if "fc1.weight" in name))  # which every token reads
        elif here and fault:
            optimizer = self.updater.weights.optimizer
            flip(next(s.local for s in optimizer.shards() if s.name.startswith(fault) and s.local.numel() > 2000))
        return right(self, drain=drain, **more)

    def addmm(self: GradSink, a: Tensor, b: Tensor) -> None:
        add(self, a, b)
        if armed and armed.pop():
            flip(self.buffer)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Trainer, "train_step", train_step))
        stack.enter_context(patch.object(GradSink, "addmm", addmm))
        run_training(parse(flags, world_size=world.size), world)


def verdict(world: World, run: str, iteration: int, flags: list[str]) -> str:
    config, past = again(run, iteration, flags, LaunchEnvironment())
    path = Path(run) / "verdict"
    Replay(past, 3, 1, path, print)(config, world)
    return path.read_text() if world.is_first else ""


FAULTS = ["weights", "gradient", "optimizer/exp_avg/", "optimizer/exp_avg_sq/", ""]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("layout", "precision", "fault"),
    [
        pytest.param(layout, precision, fault, marks=() if sample else pytest.mark.full)
        for i, layout in enumerate(LAYOUTS)
        for j, precision in enumerate(("", "--bf16"))
        for k, fault in enumerate(FAULTS)
        if (layout, fault) != ("2bw", "weights")  # overwritten by the prediction before anything has read it
        for sample in [(i + j + k) % 5 == 1 or (layout == "one" and not fault)]
    ],
)
def test_a_flipped_exponent_bit_is_named(layout: str, precision: str, fault: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    argv = [*TINY, *flags.split(), *precision.split(), "--nprocs", str(ranks), "--save", str(tmp_path)]
    run_ranks(with_fault, ranks, argv, fault)
    found = run_ranks(verdict, ranks, str(tmp_path), 9, [])[0]
    if not fault:
        assert found.startswith("0 the numbers are the run's in every digit"), found
        return
    # a state is used by the update of its iteration, which the next one shows; with 2BW the one after that
    first = WHEN + (fault not in ("weights", "gradient")) + (layout == "2bw")
    assert found.startswith("1 numbers: ") and f" of iteration {first} is " in found, found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("clean")
    run_ranks(with_fault, 1, [*TINY, "--save", str(run)], "")
    return run


def edited(run: Path, change: Callable[[Record], Record | None]) -> None:
    log = run / "metrics.jsonl"
    records = [change(json.loads(line)) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(one) + "\n" for one in records if one is not None))


def at_7(**values: object) -> Callable[[Record], Record | None]:
    return lambda one: {**one, **values} if (one["kind"], one["iteration"]) == ("train", WHEN) else one


def start(**values: object) -> Callable[[Record], Record | None]:
    return lambda one: {**one, **values} if one["kind"] == "start" else one


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (at_7(lm_loss=4.0), "1 numbers: lm_loss of iteration 7 is 4.0"),
        (at_7(lm_loss=float("nan")), "metrics.jsonl has no finite number"),
        (at_7(grad_norm=None), "1 numbers: grad_norm of iteration 7 is 0."),
        (at_7(learning_rate=2e-3), "1 numbers: learning_rate of iteration 7 is 0.001, metrics.jsonl has 0.002"),
        (at_7(skipped_iterations=1), "1 numbers: skipped_iterations of iteration 7 is 0, metrics.jsonl has 1"),
        (at_7(kind="lost"), "0 the numbers .* every digit; metrics.jsonl lacks the line of iterations 7 to 7"),
        (at_7(iterations=0), "0 the numbers .* the mean loss of line 7 is also of iterations"),
        (start(torch_version="2.4.0"), r"0 .* as far as the rounding of another torch \(2.4.0, here 2"),
        (start(threads=-3), r"0 .* another number of threads \(-3, here 1\)"),
        (start(kind="lost"), r"0 .* another megalite or torch or .*, of which metrics.jsonl does not tell"),
    ],
)
def test_a_log_that_is_not_the_runs_is_named_in_a_line(
    change: Callable[[Record], Record | None], line: str, clean: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(clean, tmp_path / "run")
    edited(run, change)
    found = run_ranks(verdict, 1, str(run), 8, [])[0]
    assert re.search(line, found), found


def test_two_runs_in_one_log_are_named(clean: Path, tmp_path: Path) -> None:
    run = shutil.copytree(clean, tmp_path / "run")
    log = run / "metrics.jsonl"
    mine = log.read_text()
    edited(run, lambda one: {**one, "lm_loss": one["lm_loss"] + 0.1} if one["kind"] == "train" else one)
    log.write_text(mine + log.read_text())
    found = run_ranks(verdict, 1, str(run), 8, [])[0]
    assert found.startswith("1 numbers: lm_loss of iteration 6 ") and "two runs in one file" in found, found


def test_threads_are_the_runs_whatever_the_environment_says(clean: Path, tmp_path: Path) -> None:
    run = shutil.copytree(clean, tmp_path / "run")
    edited(run, start(threads=2))
    assert "another number" not in run_ranks(verdict, 1, str(run), 8, [])[0]


def test_gaps_are_told_from_kills() -> None:
    lines: list[Record] = [{"iteration": at, "iterations": 3} for at in (3, 9)]
    assert not_logged(0, lines, [0]) == [(4, 6)]
    assert not_logged(0, [lines[0], {"iteration": 6, "iterations": 2}], [0, 4]) == []  # killed after 4, which it saved


def test_what_cannot_be_asked_for_digits_is_said() -> None:
    config = parse([*TINY, "--save", "run", "--compile"])
    facts = {"megalite_version": "1", "torch_version": "2", "device": "cpu", "processor": "a", "threads": 1, "hosts": 1}
    facts["float32_matmul_precision"] = "highest"
    assert unlike(config, [facts], facts) == ["kernels that --compile builds anew"]
    plain = parse([*TINY, "--save", "run"])
    assert unlike(plain, [facts], facts) == []
    assert unlike(plain, [facts, {**facts, "processor": "b"}], facts) == ["another processor (b, here a)"]
    assert unlike(plain, [{**facts, "device": "cuda"}], {**facts, "device": "cuda"}) == [
        "kernels without --deterministic-mode"
    ]


def test_a_mean_is_compared_where_all_of_it_was_computed() -> None:
    numbers = {at: Numbers(1.0 + at, 2.0) for at in (5, 6)}
    line: Record = {"iteration": 6, "iterations": 3, "lm_loss": 9.0, "grad_norm": 2.0}
    assert [name for name, *_ in compared(numbers, line)] == ["grad_norm"]
    assert [*compared(numbers, {**line, "iterations": 2})][0] == ("lm_loss", 6.5, 9.0)


def documents(count: int, seed: int, *, between: float = 0.3, within: float = 1.5) -> list[Sample]:
    """Lengths and losses of documents as the model of outliers.py has them, with tails of a t of 5 degrees."""
    noise = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = int(2 ** (8 * torch.rand((), generator=noise)))
        normal = torch.randn(6, generator=noise)
        t = float(normal[0] / normal[1:].square().mean().sqrt())
        found.append(Sample(2.5 + 2 / tokens + t * (between**2 + within**2 / tokens) ** 0.5, tokens))
    return found


@pytest.mark.landing
def test_ordinary_documents_are_not_blamed_and_broken_ones_are() -> None:
    """In 60 batches of documents of 1 to 256 tokens; the median and its deviation had blamed the short ones."""
    blamed = 0
    for place in range(60):
        groups = {i: documents(20, 100 * place + i) for i in range(8)}
        batch = groups.pop(0)
        blamed += bool(outliers(batch, groups))
        for broken in (Sample(9.0, 128), Sample(11.0, 40)):
            assert outliers([*batch, broken], groups)[-1] == len(batch)
    assert blamed <= 1
    scatter = scatter_of(batch, groups)
    assert scatter is not None and 0.1 < scatter.between**0.5 < 0.5 and 0.8 < scatter.within**0.5 < 2.2
    assert scatter_of(batch[:5], {}) is None


@pytest.mark.parametrize(("deviations", "chance"), [(0.0, 0.5), (2.015, 0.05), (4.032, 0.005), (6.869, 0.0005)])
def test_chances_are_those_of_the_tables(deviations: float, chance: float) -> None:
    assert chance_of(deviations) == pytest.approx(chance, rel=2e-3)
