"""The console line is read by other people's scripts: field names and order as Megatron-LM prints them."""

from __future__ import annotations

import io
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.observe.hooks import Hooks
from megalite.observe.loggers import _FIELDS, ConsoleHook, evaluation_line, progress_line, train_line
from megalite.observe.stats import IntervalStats, evaluation_record
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config

MEGATRON_FIELDS = [
    "consumed samples",
    "elapsed time per iteration (ms)",
    "throughput per GPU (TFLOP/s/GPU)",
    "learning rate",
    "global batch size",
    "lm loss",
    "loss scale",
    "grad norm",
    "number of skipped iterations",
    "number of nan iterations",
]


def _printed(**step: object) -> str:
    stream = io.StringIO()
    trainer = FakeTrainer(tiny_config(log_interval=1), train_iters=2000)
    hooks = Hooks([ConsoleHook(stream)])
    hooks.on_start(trainer)
    with mock.patch("megalite.observe.loggers.datetime") as clock:
        clock.now.return_value = datetime(2026, 1, 2, 3, 4, 5)
        hooks.after_step(trainer, trainer.step(**step))
    return stream.getvalue()


def test_field_names_and_order() -> None:
    line = _printed()
    names = [part.rsplit(":", 1)[0].strip() for part in line.split("|")[1:-1]]
    assert names[: len(MEGATRON_FIELDS)] == MEGATRON_FIELDS
    assert line.startswith(
        " [2026-01-02 03:04:05.000000] iteration        1/    2000 | consumed samples:            3 |"
    )
    assert line.endswith("|\n")


def test_values_as_scripts_search_for_them() -> None:
    line = _printed()
    match = re.search(
        r"iteration\s+(\d+)/\s*(\d+) .* lm loss: ([-+.E\d]+) \| loss scale: ([.\d]+) \| grad norm: ([.\d]+)", line
    )
    assert match is not None
    assert match.groups() == ("1", "2000", "2.000000E+00", "1.0", "1.500")


def test_a_skipped_step_shows_neither_loss_nor_norm() -> None:
    line = _printed(skipped=True)
    assert "lm loss" not in line and "grad norm" not in line
    assert "number of skipped iterations:   1 |" in line


def test_evaluation_line() -> None:
    line = evaluation_line(evaluation_record("valid", 50, loss_sum=8.0, num_tokens=4, num_bytes=8))
    assert line == (
        " validation loss at iteration 50 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 "
        "| bits per byte: 1.4427 |"
    )


def test_mfu_is_shown_where_it_is_known() -> None:
    record = {"iteration": 1, "mfu": 0.517}
    assert "MFU (%): 51.7" in train_line(record, 10, datetime(2026, 1, 1))


def _rows(heading: str) -> list[list[str]]:
    """Cells of the tables under a heading of the page."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "observability.md").read_text()
    section = page.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:3] == "| `"
    ]


def _whole_record() -> dict[str, Any]:
    """Of an interval in which everything was measured."""
    trainer = FakeTrainer(tiny_config(), train_iters=2000)
    interval = IntervalStats(trainer.config, world_size=2, device=trainer.device)
    interval.add(trainer.step(lm_loss=math.nan, further=(torch.tensor(1.0),)))
    record = {key: 1 for _, key, _, _ in _FIELDS} | interval.record()
    return record | {"mfu": 0.5, "skipped_iterations": 1, "lm_loss_by_part": {"NAME": 1.0}, "eta_s": 9.0}


def test_the_page_explains_every_field_of_every_line() -> None:
    rows = _rows("What each number means")
    explained, short = {row[0].strip("` ") for row in rows}, " ".join(row[1] for row in rows if len(row) == 3)
    record = _whole_record()
    line = train_line(record, 2000, datetime(2026, 1, 2))
    names = ["iteration"] + [part.partition(":")[0].strip() for part in line.split(" | ")[1:] if ":" in part]
    assert len(names) == len(_FIELDS) + 4, "iteration, a part of the loss, a further loss, ETA"
    evaluation = evaluation_record("valid", 3, loss_sum=2.0, num_tokens=1, num_bytes=4, ema_lm_loss=1.0)
    names += [part.partition(":")[0] for part in evaluation_line(evaluation).split(" | ")[1:]]
    assert set(names) <= explained, set(names) - explained
    for part in progress_line(record | {"grad_norm": 1.0}, 2000).split(" | "):
        words = re.sub(r"\d[\d.,]*( s\b)?|\bof\b|\bnan\b", "", part).split()
        assert f"`{' '.join(words)}`" in short, part


def test_the_formulas_of_the_page_are_those_of_the_line() -> None:
    """A loss of 2 nats over 3 tokens that spell 12 bytes."""
    line = evaluation_line(evaluation_record("valid", 3, loss_sum=6.0, num_tokens=3, num_bytes=12))
    found = {name.strip(): float(value) for name, value in re.findall(r"([a-zA-Z ]+): ([\d.E+-]+)", line)}
    wanted = {"lm loss value": 2.0, "lm loss PPL": math.e**2, "bits per byte": 2.0 / math.log(2) * 3 / 12}
    assert found == pytest.approx(wanted, rel=1e-4)
