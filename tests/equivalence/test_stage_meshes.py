"""Stages that differ (`--stage-meshes`) train as one process does: named corners, checkpoints from and to other
layouts, and mutations that must be seen."""

from __future__ import annotations

import pytest

from equivalence.layouts import Layout, compare

UNTIED = "--untie-embeddings-and-output-weights"
ASYNCHRONOUS = f"{UNTIED} --clip-grad 0"
SP = "--sequence-parallel --check-pipeline-messages"
CORNERS = {
    "replicas first": ("", "1x2,1x1", "", {}),
    "sequence parallel and not": ("", "2x1,1x2", f"{SP} --zero-stage 1", {}),
    "2bw": (UNTIED, "1x1,1x2", "--pipeline-schedule 2bw", {"delay": 1}),
    "pipedream": (
        ASYNCHRONOUS,
        "1x2,1x1",
        "--pipeline-schedule pipedream",
        {"stages": 2, "together": 2, "lags": (1, 0)},
    ),
}
"""(Model, meshes, layout, what its oracle has to know)."""
MORE = {
    "tp first": (UNTIED, "2x1,1x1", "", {}),
    "tp last": ("", "1x1,2x1", "--zero-stage 2", {}),
    "three stages": ("", "1x2,1x1,1x1", "--zero-stage 3", {}),
    "replicas in the middle": ("", "1x1,1x2,1x1", "--pipeline-schedule zb-h1", {}),
    "4 x 1 and 1 x 2": ("", "4x1,1x2", f"--pipeline-schedule gpipe {SP}", {}),
    "both in one stage": ("", "2x2,1x2", f"--pipeline-schedule eager-1f1b --zero-stage 1 {SP}", {}),
    "padding only on the last ranks": ("", "4x1,2x1", "--make-vocab-size-divisible-by 128", {}),
    "tokens counted over all": ("--calculate-per-token-loss --eod-mask-loss", "1x1,1x2", "", {}),
    "2bw of three": ("", "1x2,1x1,1x1", "--pipeline-schedule 2bw --zero-stage 1", {"delay": 1}),
    "2bw with flushes first": ("", "2x1,1x2", "--pipeline-schedule 2bw", {"delay": 1}),
    "delayed update": ("", "1x2,1x1", "--delayed-parameter-update", {"delay": 1}),
    "pipedream of three": (
        ASYNCHRONOUS,
        "1x2,1x1,1x1",
        "--pipeline-schedule pipedream",
        {"stages": 3, "together": 2, "lags": (1, 1, 0)},
    ),
    "pipedream with tensor parallelism": (
        ASYNCHRONOUS,
        "2x1,1x2",
        f"--pipeline-schedule pipedream {SP}",
        {"stages": 2, "together": 2, "lags": (1, 0)},
    ),
    "pipedream in vertical sync": (
        ASYNCHRONOUS,
        "1x2,1x1",
        "--pipeline-schedule pipedream --pipedream-vertical-sync",
        {"stages": 2, "together": 2, "lags": (1, 1)},
    ),
    "llama": ("--model-type llama --num-query-groups 2", "2x1,1x1", f"{SP} --zero-stage 1", {}),
    "dropout": ("--hidden-dropout 0.1 --attention-dropout 0.1", "2x1,1x2", SP, {}),
    "muon": ("--optimizer muon", "1x2,2x1", "--zero-stage 2", {}),
    "masters on the host": ("", "1x2,1x1", "--offload optimizer --zero-stage 1", {}),
}
"""Lags by hand: NOAM of (2, 1) is ceil(3 / 2) and 1, one update of two micro-batches ahead and none; of (2, 1, 1) it is
2, 2 and 1: 2 micro-batches, 1 and 0, in whole updates 1, 1 and 0."""


def case_of(model: str, meshes: str, layout: str, oracle: dict) -> Layout:
    world = sum(int(tp) * int(dp) for tp, dp in (mesh.split("x") for mesh in meshes.split(",")))
    flags = f"--micro-batch-size 1 --stage-meshes {meshes} {layout}"
    return Layout(("--num-layers", "4", *model.split()), tuple(flags.split()), world, **oracle)


@pytest.mark.parametrize("name", CORNERS)
def test_corner(name: str) -> None:
    compare(case_of(*CORNERS[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_more_corners(name: str) -> None:
    compare(case_of(*MORE[name]))


def test_vertical_sync_is_another_training_on_uniform_stages(full: bool) -> None:
    flags = "--micro-batch-size 1 --pipeline-model-parallel-size 3 --pipeline-schedule pipedream".split()
    model = ("--num-layers", "4", *ASYNCHRONOUS.split())
    compare(Layout(model, (*flags, "--pipedream-vertical-sync"), 3, stages=3, lags=(2, 2, 2)))
    if full:
        with pytest.raises(AssertionError, match="instead of"):
            compare(Layout(model, (*flags, "--pipedream-vertical-sync"), 3, stages=3))
