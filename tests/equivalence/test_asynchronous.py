"""PipeDream-2BW and PipeDream against their own sequential references, and the proof that a fake would not pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equivalence.layouts import TINY, Layout, assert_close, compare, saved_tensors, train, train_body
from equivalence.oracle import pipedream_reference, reference
from megalite.testing import run_ranks

UNTIED = ("--num-layers", "4", "--untie-embeddings-and-output-weights", "--clip-grad", "0")


def two_buffered_weights(p: int, m: int, *more: str, dp: int = 1) -> Layout:
    flags = ("--pipeline-model-parallel-size", str(p), "--pipeline-schedule", "2bw", "--micro-batch-size", "1")
    return Layout(UNTIED, (*flags, "--global-batch-size", str(m * dp), *more), p * dp, delay=1)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
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


@pytest.mark.parametrize("p", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_pipedream_is_its_sequential_reference(p: int) -> None:
    layout = ("--pipeline-model-parallel-size", str(p), "--pipeline-schedule", "pipedream", "--micro-batch-size", "1")
    argv = (*TINY, *UNTIED, "--global-batch-size", "4")
    expected = pipedream_reference((*argv, "--micro-batch-size", "1"), 3, stages=p)
    found = train([*argv, *layout], p, 3)
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    for name, value in expected.tensors.items():
        assert float((found.tensors[name] - value).abs().max()) < 1e-12, name
