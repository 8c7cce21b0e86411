"""The console line is read by other people's scripts: field names and order as Megatron-LM prints them."""

from __future__ import annotations

import io
import re
from datetime import datetime

from megalite.observe.hooks import Hooks
from megalite.observe.loggers import ConsoleHook, evaluation_line, train_line
from megalite.observe.stats import evaluation_record
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
    hooks = Hooks([ConsoleHook(stream, now=lambda: datetime(2026, 1, 2, 3, 4, 5))])
    hooks.on_start(trainer)
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
