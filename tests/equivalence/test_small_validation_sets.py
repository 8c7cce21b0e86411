"""A validation set that is smaller than the evaluation that nobody asked for is read once; a number that was given is
kept, as in Megatron-LM."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megalite.comm.world import World
from megalite.config import training
from megalite.config.cli import parse
from megalite.testing import run_ranks
from megalite.train.run import run_training
from tests.equivalence.test_validation_sets import SMALL
from tools.report import read_run

TEXT = "a quick brown fox jumps over the lazy dog. "
GLOBAL_BATCH, LENGTH = (int(SMALL[SMALL.index(flag) + 1]) for flag in ("--global-batch-size", "--seq-length"))


def run(world: World, argv: list[str], usual: int) -> list[str]:
    """Lines of warning of this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megalite.data").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "USUAL_EVAL_ITERS", usual)
        run_training(parse(argv, world_size=world.size), world)
    logging.getLogger("megalite.data").removeHandler(handler)
    return lines


def evaluated(folder: Path, save: str, ranks: int, *more: str, usual: int = 100) -> tuple[float, int]:
    """Loss and number of tokens of the evaluation at the end."""
    paths = "--train-data-path", f"{folder}/text", "--valid-data-path", f"{folder}/text"
    places = "--save", f"{folder}/{save}", "--data-cache-path", f"{folder}/cache"
    run_ranks(run, ranks, [*SMALL, "--fp64", "--micro-batch-size", "2", *paths, *places, *more], usual)
    (record,) = [record for record in read_run(f"{folder}/{save}") if record["kind"] == "valid"]
    return record["lm_loss"], record["num_tokens"]


def test_a_small_set_is_read_once_unless_a_number_is_given(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT * 20)
    tokens = len(TEXT * 20) - 1  # bytes; all but the first are labels
    loss, counted = evaluated(tmp_path, "unset", 1)
    assert counted == tokens
    for save, ranks, more in (("dp2", 2, ()), ("whole", 1, ("--full-validation",))):
        assert evaluated(tmp_path, save, ranks, *more) == (pytest.approx(loss, abs=1e-12), tokens)
    batches = -(-tokens // (GLOBAL_BATCH * LENGTH)) + 2
    _, counted = evaluated(tmp_path, "given", 1, "--eval-iters", str(batches))
    assert counted == batches * GLOBAL_BATCH * LENGTH > tokens, "Megatron-LM's repeats the set"
    _, counted = evaluated(tmp_path, "large", 1, usual=2)
    assert counted == 2 * GLOBAL_BATCH * LENGTH < tokens


def test_one_rank_says_that_there_is_no_final_test(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "%s"}\n' % (TEXT * 8) * 40)
    data = "--data-path", str(tmp_path / "text.jsonl"), "--data-cache-path", str(tmp_path / "cache")
    said = run_ranks(run, 2, [*SMALL, "--micro-batch-size", "2", *data], 100)
    (line,) = said[0]
    assert "no final test: " in line and "or go without a final test, as here" in line and "eval-iters" not in line
    assert not said[1]
