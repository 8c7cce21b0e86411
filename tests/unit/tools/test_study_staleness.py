"""The study of stale gradients says what is wrong before it trains, and goes on where it was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.errors import ConfigError
from tools import study_staleness
from tools.study_staleness import Run, main, read

RUN = Run("character", "adam", "flush", 1, 4e-3)
LINE = {**vars(RUN), "valid_loss": 1.75, "iterations": 2000, "train_loss": [[100, 2.5]]}


def trained(run: Run, data: Path | None, cache: Path) -> dict[str, Any]:
    return {**LINE, **vars(run)}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("foo: flush", "give 'OPTIMIZER: VARIANT' with one of adam, muon"),
        ("adam: flush banana 2", "no such variant"),
        ("adam: flush ahead", "no such variant"),
        ("adam: 2bw nesterov 2", "no such variant"),
        ("adam: flush @ abc", "no such variant"),
        ("adam: flush after 60", "no such variant"),
        ("adam: flush @ 1.5", "no such variant"),
    ],
)
def test_a_wrong_variant_is_refused_before_any_training(run: str, why: str, tmp_path: Path) -> None:
    results = tmp_path / "study.jsonl"
    with mock.patch.object(study_staleness, "train", trained), pytest.raises(ConfigError, match=f"'{run}': {why}"):
        main(["run", "--runs", "adam: flush", run, "--results", str(results)])
    assert not results.exists()


def test_results_that_cannot_be_written_are_refused_before_any_training(tmp_path: Path) -> None:
    with mock.patch.object(study_staleness, "train") as train, pytest.raises(ConfigError, match="cannot be written"):
        main(["run", "--runs", "adam: flush", "--results", str(tmp_path / "missing" / "study.jsonl")])
    assert not train.called


@pytest.mark.parametrize(("end", "trainings"), [("\n", 2), ("", 2), ('\n{"recipe": "char', 2), ("\n\n", None)])
def test_a_killed_study_continues(end: str, trainings: int | None, tmp_path: Path) -> None:
    results = tmp_path / "study.jsonl"
    results.write_text(json.dumps(LINE) + end)
    with mock.patch.object(study_staleness, "train", side_effect=trained) as train:
        if trainings is None:
            with pytest.raises(ConfigError, match="line 2 is no result; delete the line"):
                read(results)
            return
        main(["run", "--runs", "adam: flush", "--results", str(results), "--seeds", "1", "2", "3"])
    assert train.call_count == trainings
    assert [json.loads(line)["seed"] for line in results.read_text().splitlines()] == [1, 2, 3]
    assert len(read(results)) == 3


def test_first_iterations_may_have_no_delay() -> None:
    flags = Run("quickstart", "adam", "2bw predict 2 after 60 @ 0.5", 1, 1e-3).flags()
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--pipeline-flush-steps"] == "60" and given["--train-iters"] == "165"
    assert given["--staleness-correction"] == "predict" and given["--staleness-lookahead"] == "2"


def test_eight_stages_take_a_sample_for_each_update() -> None:
    flags = " ".join(Run("deep", "adam", "pipedream8 predict 2", 1, 1e-3).flags())
    assert "--nprocs 8 --pipeline-model-parallel-size 8" in flags and "--pipeline-schedule pipedream " in flags
    assert flags.rindex("--micro-batch-size 1") > flags.index("--micro-batch-size 8") and "--num-layers 8" in flags
    assert "--nprocs 4" in " ".join(Run("character", "muon", "pipedream none", 1, 1e-3).flags())
