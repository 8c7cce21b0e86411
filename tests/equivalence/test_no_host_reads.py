"""Between two log lines nothing is read from the device: every optimizer, ZeRO stage and kind of schedule, with what a
GPU does (`late`: an update is settled before the next one) done on the CPU. Steps that are left out are left out there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import OPTIMIZERS, TINY, saved_tensors
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.parallel.zero import ShardedOptimizer
from megalite.testing import run_ranks
from megalite.train import run as run_module
from megalite.train.batch_reader import BatchReader

READS = ("item", "tolist", "cpu", "__float__", "__bool__", "__int__", "__index__")
SCHEDULES = {
    "one process": (1, ""),
    "1f1b": (2, "--pipeline-model-parallel-size 2"),
    "2bw": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"),
    "zb-h1": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "pipedream": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule pipedream --untie-embeddings-and-output-weights "
        "--clip-grad 0",
    ),
    "dp": (2, "--no-overlap-grad-reduce"),
}


@contextmanager
def no_reads() -> Iterator[None]:
    """What would make the host wait for a device raises."""

    def read(name: str) -> Any:
        def raises(self: Tensor, *args: object, **kwargs: object) -> None:
            raise AssertionError(f"Tensor.{name} between two log lines")

        return raises

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(Tensor, name, read(name)))
        yield


def late() -> Any:
    """What `open_run` does on a GPU."""
    right = run_module.make_updater
    return patch.object(run_module, "make_updater", lambda *args, **_: right(*args, late=True))


def body_steps(world: World, argv: list[str], steps: int, reads_late: bool, overflow: int) -> list[tuple[Any, ...]]:
    """(loss, norm, learning rate, scale, skipped) of every step; the state is saved at the end.

    overflow: the number of the batch whose gradients are not finite; -1: none.
    """
    config = parse(argv, world_size=world.size)
    right = BatchReader._factors
    fetched: list[int] = []

    def factors(self: BatchReader, tokens: Tensor, scale: Any) -> list[Tensor]:
        found = right(self, tokens, scale)
        fetched.append(len(fetched))
        return [f * torch.inf for f in found] if fetched[-1] == overflow else found

    stats = []
    with ExitStack() as stack:
        if reads_late:
            stack.enter_context(late())
        stack.enter_context(patch.object(BatchReader, "_factors", factors))
        opened = stack.enter_context(run_module.open_run(config, world))
        trainer = opened.trainer
        for step in range(steps):
            last = step == steps - 1
            with no_reads() if 0 < step and not last and reads_late else ExitStack():
                stats.append(trainer.train_step(drain=last))
        trainer.updater.resolve_pending()
        opened.state.save(trainer.progress)
        counted = (trainer.progress.skipped_iterations, trainer.progress.schedule_samples)
    read = [
        (
            float(s.lm_loss),
            None if s.skipped or s.grad_norm is None else float(s.grad_norm),
            *map(float, (s.learning_rate, s.loss_scale, s.skipped)),
        )
        for s in stats
    ]
    return [*read, counted, float(opened.state.model.optimizer.step_count)]


def both(argv: list[str], world_size: int, tmp_path: Any, overflow: int = -1) -> list[Any]:
    """The run as a CPU does it, and as a GPU would: the same in every bit."""
    runs = []
    for reads_late in (False, True):
        folder = tmp_path / f"late{reads_late}"
        full = [*argv, "--save", str(folder), "--data-cache-path", str(tmp_path / "cache")]
        results = run_ranks(body_steps, world_size, full, 5, reads_late, overflow)
        runs.append((results, saved_tensors(folder)))
    (at_once, tensors), (later, same_tensors) = runs
    assert repr(at_once) == repr(later)
    for name, value in tensors.items():
        assert torch.equal(value, same_tensors[name]), name
    return at_once[0]


CASES = sorted((optimizer, zero, schedule) for optimizer in OPTIMIZERS for zero in range(4) for schedule in SCHEDULES)
SAMPLE = random.Random(20).sample(CASES, 2)


def check(optimizer: str, zero: int, schedule: str, tmp_path: Any, *more: str) -> list[Any]:
    size, layout = SCHEDULES[schedule]
    argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--lr-decay-style", "cosine", "--min-lr", "1e-4"]
    argv += [*OPTIMIZERS[optimizer].split(), *layout.split(), "--zero-stage", str(zero), *more]
    return both(argv, size, tmp_path)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_nothing_is_read_between_log_lines(case: tuple[str, int, str], tmp_path: Any) -> None:
    check(*case, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_nothing_is_read_between_any_log_lines(case: tuple[str, int, str], tmp_path: Any) -> None:
    check(*case, tmp_path)


@pytest.mark.in_turn
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_update_leaves_everything_as_it_was(optimizer: str, tmp_path: Any) -> None:
    """Batch 2 of 5 overflows: its update is left out on the device; schedules, counts and scale go on as if read at
    once, and weights and moments are those of a run that never saw the batch's gradient."""
    argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--lr-decay-style", "cosine", "--min-lr", "1e-4"]
    argv += [*OPTIMIZERS[optimizer].split(), "--nonfinite", "skip", "--zero-stage", "1"]
    *steps, counted, taken = both(argv, 1, tmp_path, overflow=2)
    assert [step[-1] for step in steps] == [0, 0, 1, 0, 0]
    assert counted == (1, 4 * 8) and taken == 4
    assert steps[3][2] == steps[2][2], "the learning rate of a skipped update is that of the next one"


def test_the_loss_scale_falls_on_the_device(tmp_path: Any) -> None:
    argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--no-fp64", "--fp16"]
    argv += ["--loss-scaling", "initial=1024", "hysteresis=1", "window=2"]
    *steps, counted, taken = both(argv, 1, tmp_path, overflow=2)
    assert [step[3] for step in steps] == [1024, 1024, 2048, 1024, 1024]
    assert counted == (1, 4 * 8) and taken == 4


@pytest.mark.landing
def test_a_skip_with_delayed_gradients(tmp_path: Any) -> None:
    argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--pipeline-model-parallel-size", "2"]
    argv += ["--pipeline-schedule", "2bw", "--nonfinite", "skip"]
    for number, method in enumerate(("predict", "error-feedback", "nesterov")):
        given = [*argv, "--staleness-correction", method]
        *steps, _, taken = both(given, 2, tmp_path / str(number), overflow=2)
        assert taken == 4 and [step[-1] for step in steps].count(1) == 1


def test_the_kernels_that_need_no_number_on_the_host() -> None:
    """What a GPU runs in place of numbers: scales divided by in the kernel, rates as tensors."""
    from megalite.config.optimizer import OptimizerConfig
    from megalite.optim import adafactor
    from megalite.optim.adamw import AdamW

    torch.manual_seed(0)
    start, gradient = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    results = []
    for inside in (False, True):
        p = start.clone()
        rule = AdamW([{"params": [p], "lr": 0.1, "weight_decay": 0.1}], OptimizerConfig(lr=1.0))
        rule.grad_scale = torch.tensor(4.0) if inside else None
        for _ in range(3):
            p.grad = gradient.clone() if inside else gradient / 4
            rule.step()
        results.append(p)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    target = start.clone()
    adafactor.subtract_scaled(target, gradient, torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(target, start - 0.3 * gradient, rtol=1e-14, atol=1e-14)


def test_a_mutation_is_seen(tmp_path: Any) -> None:
    """An optimizer that takes the step all the same is caught by the test above."""
    right = ShardedOptimizer.step

    def step(self: ShardedOptimizer, **numbers: Any) -> None:
        right(self, **numbers | {"found_inf": torch.zeros(())})

    with patch.object(ShardedOptimizer, "step", step):
        argv = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--nonfinite", "skip"]
        argv += ["--save", str(tmp_path / "run"), "--data-cache-path", str(tmp_path / "cache")]
        results = body_steps_alone(argv)
    assert results


def body_steps_alone(argv: list[str]) -> list[Any]:
    """`body_steps` in this process: NaN reaches the weights."""
    losses = [step[0] for step in body_steps(World(rank=0, size=1, device=torch.device("cpu")), argv, 5, True, 2)[:5]]
    return [loss for loss in losses if loss != loss]
