"""`--delayed-parameter-update`: 2BW's rule under every flush schedule; steps on the host run behind a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equivalence.layouts import TINY, Layout, compare, saved_tensors, train, train_body
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import OPTIMIZER_SPECS, OptimizerConfig, parse
from megalite.optim import OPTIMIZERS
from megalite.parallel.zero import DelayedOptimizer, ParameterBuffers, ZeroOptions
from megalite.schedule import SCHEDULES, build_program, simulate, validate
from megalite.schedule.passes import delay_update
from megalite.testing import run_ranks
from megalite.testing.oracle import reference
from megalite.train.run import open_run

UNTIED = ("--num-layers", "4", "--untie-embeddings-and-output-weights", "--clip-grad", "0", "--micro-batch-size", "1")
DELAYED = ("--delayed-parameter-update",)
ON_HOST = (*DELAYED, "--offload", "optimizer")
SPLIT = (*ON_HOST, "--offload", "fraction=0.5", "--ddp-bucket-size", "3000")


@pytest.mark.in_turn
@pytest.mark.parametrize(("p", "flags"), [(1, ON_HOST), (2, DELAYED), (2, SPLIT)])
def test_it_is_bitwise_the_delayed_reference(p: int, flags: tuple[str, ...]) -> None:
    """Untied and unclipped the order of additions is the same: not one bit differs."""
    expected = reference((*TINY, *UNTIED), 5, delay=1)
    found = train([*TINY, *UNTIED, *flags, "--pipeline-model-parallel-size", str(p)], p, 5)
    for name, value in expected.tensors.items():
        assert torch.equal(found.tensors[name], value), name
    synchronous = reference((*TINY, *UNTIED), 5).tensors["layers.0.mlp.fc1.weight"]
    assert float((found.tensors["layers.0.mlp.fc1.weight"] - synchronous).abs().max()) > 1e-6


LAYOUTS = {
    "zero 1": ("--zero-stage 1", 2),
    "zero 2": ("--zero-stage 2", 2),
    "zero 3": ("--zero-stage 3 --tensor-model-parallel-size 2", 4),
    "interleaved": ("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --zero-stage 2", 4),
    "zb-v": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v", 2),
    "chimera": ("--pipeline-model-parallel-size 2 --pipeline-schedule chimera --zero-stage 1", 2),
    "breadth-first": ("--pipeline-model-parallel-size 2 --pipeline-schedule breadth-first --zero-stage 2", 4),
    "dualpipe-v": ("--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v --zero-stage 3", 4),
}


@pytest.mark.parametrize("name", [n if n == "zb-v" else pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS])
def test_it_composes(name: str) -> None:
    layout, size = LAYOUTS[name]
    layout = f"{layout} --micro-batch-size 1 --delayed-parameter-update --offload optimizer"
    compare(Layout(("--num-layers", "4", "--clip-grad", "0.5"), tuple(layout.split()), size, delay=1), steps=4)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [name for name, rule in OPTIMIZER_SPECS.items() if not rule.taps])
def test_every_optimizer_is_delayed_alike(optimizer: str) -> None:
    """Adafactor's sums and Muon's matrices go over ranks: such a step does not wait in a thread."""
    own = ["--optimizer-args", "soap_eps=1e-5", "soap_precondition_frequency=1"] if optimizer == "soap" else []
    model = ("--num-layers", "4", "--position-embedding-type", "rope", "--optimizer", optimizer, *own)
    layout = "--tensor-model-parallel-size 2 --zero-stage 1 --micro-batch-size 1".split()
    compare(Layout(model, (*layout, *ON_HOST), 4, delay=1), steps=4)


def evaluated_body(world: World, argv: list[str], steps: int) -> list[float]:
    """Losses of training and validation after every second iteration; the state is saved at the end."""
    seen = []
    with open_run(parse(argv, world_size=world.size), world) as run:
        for step in range(run.trainer.iteration + 1, run.trainer.iteration + steps + 1):
            seen.append(float(run.trainer.train_step(drain=step % 2 == 0).lm_loss))
            if step % 2 == 0:
                seen += [record["lm_loss"] for record in run.trainer.evaluate(step, False)]
        run.state.save(run.trainer.progress)
    return seen


@pytest.mark.landing
def test_it_is_2bw_on_one_rank_with_its_correction_and_its_checkpoint(tmp_path: Path) -> None:
    """Losses, evaluations in between (of the masters), what is saved, and where a resumed run gets to: bit for bit."""
    base = [*TINY, *UNTIED, "--eval-iters", "1", "--data-cache-path", str(tmp_path / "cache"), "--clip-grad", "0.5"]
    base += ["--staleness-correction", "predict", "--pipeline-flush-steps", "2"]
    seen, saved = [], []
    for number, flags in enumerate((["--pipeline-schedule", "2bw"], list(SPLIT), list(SPLIT))):
        argv = [*base, *flags, "--ddp-bucket-size", "3000", "--save", str(tmp_path / str(number)), "--auto-resume"]
        parts = (3, 5) if number == 2 else (8,)
        seen.append([loss for steps in parts for loss in run_ranks(evaluated_body, 1, argv, steps)[0]])
        saved.append(saved_tensors(tmp_path / str(number)))
    assert seen[0] == seen[1] == seen[2]
    assert saved[0].keys() == saved[1].keys() == saved[2].keys()
    for name, value in saved[0].items():
        assert torch.equal(saved[1][name], value) and torch.equal(saved[2][name], value), name


@pytest.mark.full
def test_a_pipeline_resumes_bitwise_and_holds_both_versions(tmp_path: Path) -> None:
    argv = [*TINY, *UNTIED, *ON_HOST, "--pipeline-model-parallel-size", "2", "--zero-stage", "2"]
    argv += ["--data-cache-path", str(tmp_path / "cache")]
    run_ranks(train_body, 4, [*argv, "--save", str(tmp_path / "whole")], 6)
    run_ranks(train_body, 4, [*argv, "--save", str(tmp_path / "part")], 3)
    half, name = saved_tensors(tmp_path / "part"), "layers.0.mlp.fc1.weight"
    assert not torch.equal(half[name], half["previous/" + name])
    run_ranks(train_body, 4, [*argv, "--save", str(tmp_path / "part"), "--auto-resume"], 3)
    whole, resumed = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "part")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def delayed_optimizer(release: threading.Event) -> tuple[nn.Parameter, DelayedOptimizer]:
    """Over one parameter with two weight versions, on the host; its rule waits for `release`."""
    versions = [nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2)]
    buffers = ParameterBuffers(
        [[("w", parameter)] for parameter in versions], axes=ParallelMesh.single().family(), options=ZeroOptions()
    )
    optimizer = DelayedOptimizer(
        [buffers],
        make_optimizer=lambda groups: OPTIMIZERS["adam"](groups, OptimizerConfig(lr=1.0)),
        norm_axis=ParallelMesh.single().world,
        offload_fraction=1.0,
    )
    rule: Any = optimizer.sub_optimizers[0].rule
    step = rule.step
    rule.step = lambda: (release.wait(10), step())
    buffers.gradients.begin_batch(1)
    versions[0].sink.add(torch.full((8,), 2.0))
    buffers.gradients.start_reduce()
    buffers.gradients.finish_reduce()
    return versions[1], optimizer


READERS: dict[str, Callable[[DelayedOptimizer], Any]] = {
    "checkpoint": lambda optimizer: optimizer.shards(),
    "evaluation": lambda optimizer: ExitStack().enter_context(optimizer.masters_as_weights(1)),
    "next step": lambda optimizer: optimizer.step(lr=0.0, weight_decay=0.0, version=2),
    "run's end": lambda optimizer: optimizer.close(),
}


@pytest.mark.parametrize("name", READERS)
def test_the_next_batch_runs_while_the_host_steps(name: str) -> None:
    """`step` returns before the rule has run, the gradient may be overwritten, and whoever reads masters waits."""
    release = threading.Event()
    written, optimizer = delayed_optimizer(release)
    optimizer.step(lr=0.5, weight_decay=0.0, version=1)
    assert torch.equal(written.float(), torch.ones(8))
    optimizer.buffers[0].gradients.begin_batch(1)
    optimizer.masters[0].gradient.fill_(-99.0)
    threading.Timer(0.05, release.set).start()
    READERS[name](optimizer)
    assert torch.allclose(written.float(), torch.full((8,), 0.5))
    assert torch.allclose(optimizer.masters[0].tensor[:8], torch.full((8,), 0.5))


def test_what_fails_behind_a_batch_is_raised_by_the_next_step() -> None:
    release = threading.Event()
    _, optimizer = delayed_optimizer(release)
    rule: Any = optimizer.sub_optimizers[0].rule
    rule.step = lambda: 1 / 0
    optimizer.step(lr=0.5, weight_decay=0.0, version=1)
    with pytest.raises(ZeroDivisionError):
        optimizer.finish_step()


def failing_body(world: World, argv: list[str]) -> None:
    """The last step of a run fails in its thread."""
    with pytest.raises(ZeroDivisionError), open_run(parse(argv, world_size=world.size), world) as run:
        rule: Any = run.state.model.optimizer.sub_optimizers[0].rule
        rule.step = lambda: 1 / 0
        run.trainer.train_step(drain=True)


def test_what_fails_behind_the_last_batch_is_raised_by_the_run(tmp_path: Path) -> None:
    """Nothing is saved, so that nobody reads the masters."""
    run_ranks(failing_body, 1, [*TINY, *UNTIED, *ON_HOST, "--data-cache-path", str(tmp_path / "cache")])


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if not schedule.asynchronous])
def test_every_flush_schedule_is_valid_with_it(name: str) -> None:
    program = delay_update(build_program(name, 2, 4))
    validate(program, 4)
    assert simulate(program, batches=4).weight_versions_per_rank == (2, 2)
    assert {action.version for action in program.actions_for_batch(0, program.batch(7)) if action.is_compute} <= {6, -1}


def scales_body(world: World, argv: list[str], steps: int) -> list[tuple[float, bool, float | None]]:
    """Loss scale, whether it was skipped, and gradient norm of each step; the state is saved at the end."""
    found = []
    with open_run(parse(argv, world_size=world.size), world) as run:
        for step in range(steps):
            stats = run.trainer.train_step(drain=step + 1 == steps)
            found.append((stats.loss_scale, stats.skipped, stats.grad_norm))
        run.state.save(run.trainer.progress)
    return found


@pytest.mark.full
def test_in_fp16_it_skips_what_2bw_skips(tmp_path: Path) -> None:
    """A step behind a batch leaves masters and moments alone where gradients were not finite, and the scale falls."""
    argv = [*(flag for flag in TINY if flag != "--fp64"), *"--fp16 --loss-scaling initial=1048576 hysteresis=1".split()]
    argv += ["--loss-scaling", "window=3", "--num-layers", "4", "--micro-batch-size", "1", "--ddp-bucket-size", "3000"]
    found, saved = [], []
    for number, flags in enumerate((("--pipeline-schedule", "2bw"), DELAYED, ON_HOST)):
        places = ["--save", str(tmp_path / str(number)), "--data-cache-path", str(tmp_path / "cache")]
        found.append(run_ranks(scales_body, 1, [*argv, *flags, *places], 9)[0])
        saved.append(saved_tensors(tmp_path / str(number)))
    assert found[0] == found[1] == found[2]
    assert {skipped for _, skipped, _ in found[0]} == {True, False}, "the case shows nothing"
    for other in saved[1:]:
        for name, value in saved[0].items():
            assert torch.equal(other[name], value), name
