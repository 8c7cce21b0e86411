"""PipeDream-2BW and PipeDream against their own sequential references, and the proof that a fake would not pass."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from equivalence.layouts import TINY, Layout, assert_close, compare, saved_tensors, train, train_body
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.testing import run_ranks
from megalite.testing.oracle import pipedream_reference, reference
from megalite.train.run import open_run

UNTIED = ("--num-layers", "4", "--untie-embeddings-and-output-weights", "--clip-grad", "0")


def two_buffered_weights(p: int, m: int, *more: str, dp: int = 1) -> Layout:
    flags = ("--pipeline-model-parallel-size", str(p), "--pipeline-schedule", "2bw", "--micro-batch-size", "1")
    return Layout(UNTIED, (*flags, "--global-batch-size", str(m * dp), *more), p * dp, delay=1)


@pytest.mark.parametrize("p", [*(pytest.param(p, marks=pytest.mark.landing) for p in (1, 3)), 2, 4])
def test_2bw_is_bitwise_the_delayed_reference(p: int, full: bool) -> None:
    """Untied and unclipped the order of additions is the same: not one bit differs (pipeline.md 4.10, step 1)."""
    for m in sorted({max(p - 1, 1), p, p + 1, 2 * p}) if full else [max(p - 1, 1), p + 1]:
        case = two_buffered_weights(p, m)
        expected = reference((*TINY, "--micro-batch-size", "1", *UNTIED, "--global-batch-size", str(m)), 5, delay=1)
        found = train([*TINY, *case.model, *case.layout], case.world_size, 5)
        for name, value in expected.tensors.items():
            assert torch.equal(found.tensors[name], value), f"p={p} m={m}: {name}; replay: {case.command}"


def test_2bw_differs_from_the_synchronous_run() -> None:
    argv = (*TINY, "--micro-batch-size", "1", *UNTIED)
    delayed, synchronous = reference(argv, 5, delay=1), reference(argv, 5)
    name = "layers.0.mlp.fc1.weight"
    assert float((delayed.tensors[name] - synchronous.tensors[name]).abs().max()) > 1e-6


@pytest.mark.parametrize(
    "flags",
    [
        ("--zero-stage", "1"),
        ("--tensor-model-parallel-size", "2"),
        ("--recompute-granularity", "full", "--recompute-method", "uniform"),
    ],
)
def test_2bw_composes(flags: tuple[str, ...]) -> None:
    tied_and_clipped = ("--num-layers", "4", "--clip-grad", "0.5")
    size = 4 if "--recompute-granularity" not in flags else 2
    layout = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw", "--micro-batch-size", "1", *flags)
    compare(Layout(tied_and_clipped, layout, size, delay=1), steps=4)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("p", "m", "zero"), [(2, 1, None), (2, 2, None), (2, 3, None), (3, 2, None), (2, 1, 0), (2, 1, 1)]
)
def test_2bw_sums_tied_embeddings_while_the_next_batch_runs(p: int, m: int, zero: int | None) -> None:
    """With few micro-batches a rank begins the sum of batch t + 1 before the loss of batch t, its peer after it; with
    p-1 of them even before the norm of batch t. zero: the stage of ZeRO with two replicas, None for one replica."""
    dp = 1 if zero is None else 2
    layout = ["--pipeline-model-parallel-size", str(p), "--pipeline-schedule", "2bw", "--micro-batch-size", "1"]
    layout += [] if zero is None else ["--zero-stage", str(zero)]
    model = ("--num-layers", "4", "--global-batch-size", str(m * dp))
    compare(Layout(model, tuple(layout), p * dp, delay=1), steps=6)


def test_2bw_holds_both_versions_and_resumes_bitwise(tmp_path: Path) -> None:
    layout = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw", "--micro-batch-size", "1"]
    argv = [*TINY, *UNTIED, "--hidden-dropout", "0.1", *layout, "--data-cache-path", str(tmp_path / "cache")]
    run_ranks(train_body, 2, [*argv, "--save", str(tmp_path / "whole")], 6)
    run_ranks(train_body, 2, [*argv, "--save", str(tmp_path / "part")], 3)
    half = saved_tensors(tmp_path / "part")
    name = "layers.0.mlp.fc1.weight"
    assert not torch.equal(half[name], half["previous/" + name])
    run_ranks(train_body, 2, [*argv, "--save", str(tmp_path / "part"), "--auto-resume"], 3)
    whole, resumed = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "part")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_2bw_begins_with_flushes_when_asked(tmp_path: Path) -> None:
    """Two synchronous iterations, then 2BW: the switch is exact, W(t-1) is the weights of the last flush."""
    layout = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw", "--micro-batch-size", "1"]
    found = train([*TINY, *UNTIED, *layout, "--pipeline-flush-steps", "2"], 2, 5)
    expected = reference((*TINY, "--micro-batch-size", "1", *UNTIED), 5, delay=1, synchronous_steps=2)
    for name, value in expected.tensors.items():
        assert torch.equal(found.tensors[name], value), name


@pytest.mark.in_turn
@pytest.mark.parametrize("p", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_pipedream_is_its_sequential_reference(p: int) -> None:
    layout = ("--pipeline-model-parallel-size", str(p), "--pipeline-schedule", "pipedream", "--micro-batch-size", "1")
    argv = (*TINY, *UNTIED, "--global-batch-size", "4")
    expected = pipedream_reference((*argv, "--micro-batch-size", "1"), 3, stages=p)
    found = train([*argv, *layout], p, 3)
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    for name, value in expected.tensors.items():
        assert float((found.tensors[name] - value).abs().max()) < 1e-12, name


@pytest.mark.parametrize("p", [3, pytest.param(4, marks=pytest.mark.full)])
def test_pipedream_holds_every_version_and_resumes_bitwise(p: int, tmp_path: Path) -> None:
    """Stage r computes with the weights of p-1-r updates ago: all of these are in the checkpoint."""
    layout = ["--pipeline-model-parallel-size", str(p), "--pipeline-schedule", "pipedream", "--micro-batch-size", "1"]
    argv = [*TINY, *UNTIED, *layout, "--data-cache-path", str(tmp_path / "cache")]
    run_ranks(train_body, p, [*argv, "--save", str(tmp_path / "whole")], 4)
    run_ranks(train_body, p, [*argv, "--save", str(tmp_path / "part")], 2)
    half = saved_tensors(tmp_path / "part")
    kept = [f"previous/{prefix}layers.0.mlp.fc1.weight" for prefix in ("", *(f"{n}/" for n in range(2, p)))]
    assert all(not torch.equal(half[a], half[b]) for a, b in pairwise(kept))
    assert f"previous/{p}/layers.0.mlp.fc1.weight" not in half
    run_ranks(train_body, p, [*argv, "--save", str(tmp_path / "part"), "--auto-resume"], 2)
    whole, resumed = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "part")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_pipedream_continues_with_more_stages_on_the_newest_weights_that_it_has(tmp_path: Path) -> None:
    """Two stages keep one older version of the first half of the layers; three ask for more, and take
    the next newer ones."""
    argv = [*TINY, *UNTIED, "--pipeline-schedule", "pipedream", "--micro-batch-size", "1"]
    argv += ["--data-cache-path", str(tmp_path / "cache")]
    two, three = (["--pipeline-model-parallel-size", p] for p in "23")
    run_ranks(train_body, 2, [*argv, *two, "--save", str(tmp_path / "run")], 2)
    start = saved_tensors(tmp_path / "run")
    run_ranks(train_body, 3, [*argv, *three, "--load", str(tmp_path / "run"), "--save", str(tmp_path / "moved")], 0)
    moved = saved_tensors(tmp_path / "moved")
    for name, value in start.items():
        assert torch.equal(moved[name], value), name
    first, middle = "layers.0.mlp.fc1.weight", "layers.2.mlp.fc1.weight"
    assert torch.equal(moved[f"previous/2/{first}"], start[f"previous/{first}"])
    assert f"previous/{middle}" not in start and torch.equal(moved[f"previous/{middle}"], start[middle])


@pytest.mark.landing
@pytest.mark.parametrize("method", ["predict", "error-feedback"])
@pytest.mark.parametrize(
    "optimizer",
    [
        "soap --optimizer-args soap_eps=1e-5 soap_precondition_frequency=2",
        "shampoo --optimizer-args shampoo_precondition_frequency=2",
    ],
)
def test_preconditioned_steps_are_corrected_alike_at_every_depth(optimizer: str, method: str) -> None:
    """What their matrices add is the last step, as for Muon; the rest is AdamW's."""
    argv = [*TINY, *UNTIED, "--optimizer", *optimizer.split(), "--micro-batch-size", "1", "--pipeline-schedule", "2bw"]
    plain = train(argv, 1, 5)
    argv += ["--staleness-correction", method]
    one, two = (train([*argv, "--pipeline-model-parallel-size", str(p)], p, 5) for p in (1, 2))
    assert any("last_step" in name for name in one.tensors)
    assert one.tensors.keys() == two.tensors.keys()
    for name, value in one.tensors.items():
        assert torch.equal(two.tensors[name], value), name
    assert not torch.equal(one.tensors["layers.0.mlp.fc1.weight"], plain.tensors["layers.0.mlp.fc1.weight"])


def scales_body(world: World, argv: list[str], steps: int, drained: tuple[int, ...]) -> list[tuple[float, bool]]:
    """Loss scale of each step and whether it was skipped; the state is saved at the end."""
    found = []
    with open_run(parse(argv, world_size=world.size), world) as run:
        for step in range(steps):
            stats = run.trainer.train_step(drain=step + 1 == steps or step in drained)
            found.append((stats.loss_scale, stats.skipped))
        run.state.save(run.trainer.progress)
    return found


@pytest.mark.landing
def test_in_fp16_2bw_skips_the_same_batches_at_every_depth(tmp_path: Path) -> None:
    """However deep the pipeline is, and whenever it drains for a checkpoint: what the update of batch t says of the
    scale counts from batch t + 2 on."""
    flags = "--fp16 --loss-scaling initial=1048576 hysteresis=1 window=3 --num-layers 4".split()
    base = [*(flag for flag in TINY if flag != "--fp64"), *flags, "--micro-batch-size", "1"]
    base += ["--pipeline-schedule", "2bw", "--data-cache-path", str(tmp_path / "cache")]
    found, steps = {}, 9
    for p, drained in ((1, ()), (2, ()), (2, (1, 2, 5)), (4, ())):
        argv = [*base, "--pipeline-model-parallel-size", str(p), "--save", str(tmp_path / f"{p}{len(drained)}")]
        found[p, drained] = run_ranks(scales_body, p, argv, steps, drained)[0]
    argv = [*base, "--pipeline-model-parallel-size", "2", "--save", str(tmp_path / "part"), "--auto-resume"]
    parts = [run_ranks(scales_body, 2, argv, n, ())[0] for n in (2, 3, 4)]
    found["resumed", ()] = [*parts[0], *parts[1], *parts[2]]
    expected, updates = [], []
    scale, good = 2.0**20, 0
    for step, (used, skipped) in enumerate(found[1, ()]):  # the rule, from what overflowed
        expected.append(2.0**20 if step < 2 else updates[step - 2])
        assert used == expected[-1], f"step {step}"
        good = 0 if skipped else good + 1
        scale = scale / 2 if skipped else scale * 2 if good == 3 else scale
        good %= 3
        updates.append(scale)
    assert {skipped for _, skipped in found[1, ()]} == {True, False}, "the case shows nothing"
    assert all(series == found[1, ()] for series in found.values()), found
