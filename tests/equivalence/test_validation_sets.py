"""Validation sets with names: each has the loss, line and metrics of a run that evaluates it alone, at any layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equivalence.layouts import TINY
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.testing import run_ranks
from megalite.train.run import run_training
from tools.report import read_run
from tools.report_page import render_report

SMALL = [flag for flag in TINY if flag not in ("--mock-data", "--eval-iters", "0", "NullTokenizer", "--tokenizer-type")]
SMALL = [*SMALL[: SMALL.index("--vocab-size")], "--num-layers", "2", "--train-iters", "2", "--log-interval", "1"]
TP2 = ("--micro-batch-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--micro-batch-size", "4", "--pipeline-model-parallel-size", "2")


def run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def evaluated(folder: Path, save: str, ranks: int, *more: str) -> list[dict]:
    argv = [*SMALL, "--fp64", "--eval-iters", "2", "--eval-interval", "1", "--train-data-path", f"{folder}/web"]
    run_ranks(run, ranks, [*argv, "--save", f"{folder}/{save}", "--data-cache-path", f"{folder}/cache", *more])
    return [record for record in read_run(f"{folder}/{save}") if record["kind"] == "valid"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "web").write_text("a quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "code").write_text("for number in range(9): print(number)\n" * 40)
    return tmp_path


@pytest.mark.parametrize("layout", [TP2, PP2], ids=["tp2", "pp2"])
def test_each_set_has_the_loss_that_it_has_alone(layout: tuple[str, ...], texts: Path) -> None:
    paths = ("--valid-data-path", f"{texts}/web", f"{texts}/code")
    both = evaluated(texts, "both", 2, *layout, *paths, "--validation-set-names", "prose", "code")
    assert [(record["iteration"], record["set"]) for record in both] == [
        (n, s) for n in (1, 2) for s in ("prose", "code")
    ]
    for name, path in (("prose", "web"), ("code", "code")):
        alone = evaluated(texts, f"{name} alone", 1, "--micro-batch-size", "2", "--valid-data-path", f"{texts}/{path}")
        found = [record for record in both if record["set"] == name]
        for one, other in zip(found, alone, strict=True):
            assert one["lm_loss"] == pytest.approx(other["lm_loss"], abs=1e-12)
            assert one["num_tokens"] == other["num_tokens"] and "set" not in other
    lines = [json.loads(line) for line in (texts / "both" / "metrics.jsonl").read_text().splitlines()]
    (summary,) = (line for line in lines if line["kind"] == "summary")
    assert summary["valid_code_lm_loss"] == both[-1]["lm_loss"] and "valid_lm_loss" not in summary
    page = render_report("run", [("run", read_run(str(texts / "both")))])
    assert "validation loss (nats per token): prose</figcaption>" in page and "per token): code</figcaption>" in page
    picture = (texts / "both" / "loss.svg").read_text()
    assert "validation loss of prose" in picture and "validation loss of code" in picture


def test_lines_and_tags_name_the_set() -> None:
    from megalite.observe.loggers import evaluation_line, tags
    from megalite.observe.stats import evaluation_record

    record = evaluation_record("valid", 7, loss_sum=6.0, num_tokens=3, set="code")
    assert evaluation_line(record).startswith(" validation code loss at iteration 7 | lm loss value: 2.0")
    assert tags(record)["lm loss validation code"] == 2.0


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a"], "--validation-set-names=a: 1 names for 2 paths of --valid-data-path (no weights); give one for each"),
        (["a", "a"], "--validation-set-names=a a: a is there twice; give each set a name of its own"),
    ],
)
def test_names_that_do_not_fit(names: list[str], problem: str, texts: Path) -> None:
    argv = [*SMALL, "--micro-batch-size", "1", "--train-data-path", f"{texts}/web"]
    with pytest.raises(ConfigError) as caught:
        parse([*argv, "--valid-data-path", f"{texts}/web", f"{texts}/code", "--validation-set-names", *names])
    assert caught.value.text == problem
