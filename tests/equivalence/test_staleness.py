"""Every optimizer x correction for delay is the sequential delayed reference: bit for bit where sums have one order."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from equivalence.delayed import Reference
from equivalence.layouts import TINY, assert_close, saved_tensors
from megalite.comm.world import World
from megalite.config import OPTIMIZER_SPECS, parse
from megalite.optim import Delay
from megalite.optim.staleness import Predict
from megalite.parallel.zero import ShardedOptimizer
from megalite.testing import run_ranks
from megalite.testing.harness import RanksFailed
from megalite.train.run import open_run
from megalite.train.run_state import RunState

BASE = (
    *TINY, "--vocab-size", "64", "--lr-decay-style", "linear", "--train-iters", "10", "--num-layers", "3",
    "--global-batch-size", "4", "--micro-batch-size", "1", "--disable-bias-linear",
)  # fmt: skip
UNTIED = ("--untie-embeddings-and-output-weights", "--clip-grad", "0")
TIED = ("--no-untie-embeddings-and-output-weights", "--clip-grad", "0.5")
METHODS = {
    "none": ("none",),
    "predict": ("predict", "--staleness-lookahead", "1"),
    "predict 2": ("predict", "--staleness-lookahead", "2"),
    "predict 1 3": ("predict", "--staleness-lookahead", "1", "3"),
    "error-feedback": ("error-feedback",),
    "nesterov": ("nesterov",),
}
CASES = [
    (optimizer, method)
    for optimizer, method in product(("adam", "sgd", "lion", "muon", "adafactor"), METHODS)
    if method not in ("nesterov", "predict 1 3")
    or (method == "nesterov" and OPTIMIZER_SPECS[optimizer].nesterov is None)
    or (method == "predict 1 3" and optimizer == "muon")
]


def flags(optimizer: str, method: str, p: int = 1, schedule: str = "2bw") -> tuple[str, ...]:
    layout = ("--pipeline-schedule", schedule, "--pipeline-model-parallel-size", str(p))
    rate = ("--lr", "1e-3") if optimizer == "lion" else ()
    return ("--optimizer", optimizer, *rate, *layout, "--staleness-correction", *METHODS[method])


def reference(optimizer: str, method: str, model: tuple[str, ...], **more: int) -> Reference:
    rate = ("--lr", "1e-3") if optimizer == "lion" else ()
    word, *ahead = method.split()
    lookahead = [float(steps) for steps in ahead or ["1"]]
    return Reference((*BASE, *model, "--optimizer", optimizer, *rate), method=word, lookahead=lookahead, **more)


@dataclass(frozen=True)
class Draws:
    """Cases, all or some that differ from commit to commit."""

    rng: random.Random
    full: bool

    def __call__(self, number: int) -> list[tuple[str, str]]:
        return CASES if self.full else self.rng.sample(CASES, number)


@pytest.fixture
def drawn(request: pytest.FixtureRequest, full: bool, fresh: int) -> Draws:
    return Draws(random.Random(f"{request.node.name} {fresh}"), full)


def body(world: World, argv: list[str], steps: int, every: int, mutation: str | None) -> list[list[float]]:
    """Losses of the iterations, validation losses after every so many of them; the state is saved at the end."""
    losses, seen = [], []
    broken = MUTATIONS[mutation][0]() if mutation else nullcontext()
    with broken, open_run(parse(argv, world_size=world.size), world) as run:
        trainer = run.trainer
        for step in range(1, steps + 1):
            losses.append(float(trainer.train_step(drain=step % every == 0 or step == steps).lm_loss))
            if step % every == 0:
                seen += [record["lm_loss"] for record in trainer.evaluate(step, False)]
        run.state.save(trainer.progress)
    return [losses, seen]


@dataclass(frozen=True)
class Runs:
    """Trains the product. mutation: what is broken in it."""

    mutation: str | None = None

    def train(self, argv: Sequence[str], p: int, steps: int, save: Path, every: int = 99) -> list[list[float]]:
        cache = str(Path(tempfile.gettempdir()) / "megalite-test-cache")
        places = ["--save", str(save), "--data-cache-path", cache]
        return run_ranks(body, p, [*argv, *places], steps, every, self.mutation)[0]

    def compare(
        self, expected: Reference, losses: list[float], argv: Sequence[str], p: int, steps: int, tolerance: float
    ) -> None:
        where = f"pretrain_gpt.py --nprocs {p} {' '.join(argv)}"
        with tempfile.TemporaryDirectory() as folder:
            found, _ = self.train(argv, p, steps, Path(folder))
            tensors = saved_tensors(folder)
        assert_close(found, losses, tolerance or 1e-12, f"loss of {where}")
        for name, parameter in expected.parameters.items():
            worst = float((tensors[name] - parameter.w).abs().max())
            assert worst <= tolerance, f"{name} differs by {worst:.3g}: {where}"


compare = Runs().compare


@pytest.mark.in_turn
@pytest.mark.parametrize("method", [method for method in METHODS if ("adam", method) in CASES])
def test_adam_is_bitwise_the_delayed_reference(method: str) -> None:
    expected = reference("adam", method, UNTIED)
    losses = expected.run(5)
    compare(expected, losses, [*BASE, *UNTIED, *flags("adam", method, 2)], 2, 5, 0.0)


def test_every_optimizer_is_the_delayed_reference_with_every_correction(drawn: Draws) -> None:
    for optimizer, method in drawn(3):
        expected = reference(optimizer, method, UNTIED)
        losses = expected.run(5)
        # sums over a whole tensor (Adafactor's sizes) are the one thing that runs in another order here
        tolerance = 1e-13 if optimizer == "adafactor" else 0.0
        for p in (1, 2):
            compare(expected, losses, [*BASE, *UNTIED, *flags(optimizer, method, p)], p, 5, tolerance)


def test_every_layout_is_the_delayed_reference(drawn: Draws, full: bool) -> None:
    """Tensor-parallel x pipeline x ZeRO-1, tied and clipped."""
    layouts = (("--tensor-model-parallel-size", "2"), ("--zero-stage", "1"))
    for number, (optimizer, method) in enumerate(drawn(2)):
        expected = reference(optimizer, method, TIED)
        losses = expected.run(4)
        for layout in layouts if full else layouts[number % 2 :][:1]:
            argv = [*BASE, *TIED, *flags(optimizer, method, 2), *layout]
            compare(expected, losses, argv, 4, 4, 1e-13)  # of all cases the farthest was 2.3e-15 off


def test_pipedream_corrects_each_stage_by_its_own_delay(drawn: Draws) -> None:
    for optimizer, method in drawn(2):
        expected = reference(optimizer, method, UNTIED, stages=3)
        losses = expected.run(3)
        argv = [*BASE, *UNTIED, *flags(optimizer, method, 3, "pipedream")]
        compare(expected, losses, argv, 3, 3, 1e-12)


@pytest.mark.in_turn
@pytest.mark.parametrize("method", ["predict 2", "error-feedback", "nesterov"])
def test_the_switch_from_flushes_is_exact(method: str) -> None:
    """Batches that run without delay are not corrected, the first that does is."""
    expected = reference("adam", method, UNTIED)
    losses = expected.run(6, synchronous_steps=3)
    argv = [*BASE, *UNTIED, *flags("adam", method, 2), "--pipeline-flush-steps", "3"]
    compare(expected, losses, argv, 2, 6, 0.0)


def resumes_bitwise(runs: Runs, argv: Sequence[str], folder: Path) -> None:
    runs.train(argv, 2, 5, folder / "whole")
    for number in (3, 2):
        runs.train([*argv, "--auto-resume"], 2, number, folder / "part")
    whole, resumed = saved_tensors(folder / "whole"), saved_tensors(folder / "part")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), f"{name} of {' '.join(argv)}"


def test_a_resumed_run_is_the_same_bits(drawn: Draws, tmp_path: Path) -> None:
    for number, (optimizer, method) in enumerate([("adam", "predict 2"), *drawn(1)]):
        resumes_bitwise(Runs(), [*BASE, *UNTIED, *flags(optimizer, method, 2)], tmp_path / str(number))


def evaluates_masters(runs: Runs, folder: Path) -> None:
    """A checkpoint evaluated by a run without delay has the loss that the run itself saw; no evaluation changes one."""
    argv = [*BASE, *UNTIED, "--eval-iters", "1", "--split", "80,20,0"]
    training = [*argv, *flags("adam", "predict 2", 2)]
    _, seen = runs.train(training, 2, 3, folder / "often", every=1)
    runs.train(training, 2, 3, folder / "never")
    often, never = saved_tensors(folder / "often"), saved_tensors(folder / "never")
    for name, value in often.items():
        assert torch.equal(value, never[name]), f"an evaluation changed {name}"
    again = run_ranks(evaluation_body, 1, [*argv, "--load", str(folder / "never"), "--skip-train"])[0]
    assert len(seen) == 3 and abs(again - seen[-1]) < 1e-13


def evaluation_body(world: World, argv: list[str]) -> float:
    with open_run(parse(argv, world_size=world.size), world) as run:
        [record] = run.trainer.evaluate(0, False)
        return record["lm_loss"]


def test_evaluation_sees_the_masters_and_changes_nothing(tmp_path: Path) -> None:
    evaluates_masters(Runs(), tmp_path)


# Ways in which a correction can go quietly wrong.


def rate_of_the_peak():
    right = Predict.write_compute_weights

    def wrong(self: Predict, master, target) -> None:
        self.delay.learning_rate = 1e-2
        right(self, master, target)

    return patch.object(Predict, "write_compute_weights", wrong)


@contextmanager
def from_the_version_before():
    write, step = Predict.write_compute_weights, Predict.step

    def stepped(self: Predict) -> None:
        self.before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        step(self)

    def wrong(self: Predict, master, target) -> None:
        now = master.clone()
        write(self, master.copy_(self.before[master]), target)
        master.copy_(now)

    with patch.object(Predict, "step", stepped), patch.object(Predict, "write_compute_weights", wrong):
        yield


def predicted_during_flushes():
    return patch.object(Delay, "at", lambda self, iteration: self.updates)


def evaluated_where_it_is_extrapolated():
    return patch.object(ShardedOptimizer, "masters_as_weights", lambda self, version: nullcontext())


def lost_on_resume():
    return patch.object(RunState, "_take_up_delay", lambda self, progress, meta: None)


def trains_as_the_reference(runs: Runs, folder: Path) -> None:
    expected = reference("adam", "predict 2", UNTIED)
    losses = expected.run(5, synchronous_steps=2)
    argv = [*BASE, *UNTIED, *flags("adam", "predict 2"), "--pipeline-flush-steps", "2"]
    runs.compare(expected, losses, argv, 1, 5, 1e-12)


def goes_on_where_it_stopped(runs: Runs, folder: Path) -> None:
    resumes_bitwise(runs, [*BASE, *UNTIED, *flags("adam", "predict 2", 2)], folder)


MUTATIONS: dict[str, tuple[Callable, Callable[[Runs, Path], None]]] = {
    made.__name__: (made, proof)
    for made, proof in (
        (rate_of_the_peak, trains_as_the_reference),
        (from_the_version_before, trains_as_the_reference),
        (predicted_during_flushes, trains_as_the_reference),
        (evaluated_where_it_is_extrapolated, evaluates_masters),
        (lost_on_resume, goes_on_where_it_stopped),
    )
}


@pytest.mark.landing
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_seen(mutation: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as seen:
        MUTATIONS[mutation][1](Runs(mutation), tmp_path)
    assert not isinstance(seen.value, RanksFailed), "it did not run at all"
