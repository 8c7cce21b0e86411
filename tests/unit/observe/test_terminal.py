"""A terminal gets a short line, everything else Megatron-LM's; what a run has cost and still takes; its last line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.observe.curves import series
from megalite.observe.hooks import Hook, Hooks
from megalite.observe.loggers import COLUMNS, ConsoleHook, progress_line
from megalite.observe.observers import JsonlHook, PaceHook, PictureHook, make_hooks, read_metrics
from tests.unit.observe.fake_trainer import FakeTrainer, timed_by, tiny_config


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _records(trainer: FakeTrainer, *, steps: int, seconds: float, metrics: Path | None = None) -> list[dict]:
    clock, seen = Clock(), []

    class Seen(Hook):
        def on_log(self, trainer: object, record: dict) -> None:
            seen.append(record)

    with timed_by(clock):
        hooks = Hooks([PaceHook(metrics), Seen(), *([JsonlHook(metrics)] if metrics else [])])
        hooks.on_start(trainer)
        for _ in range(steps):
            clock.now += seconds
            hooks.after_step(trainer, trainer.step())
        hooks.on_end(trainer, "exit_interval")
    return seen


def test_a_terminal_gets_short_lines_and_the_file_long_ones(tmp_path: Path) -> None:
    terminal, path = Terminal(), tmp_path / "train.log"
    trainer = FakeTrainer(tiny_config(log_interval=1), train_iters=2000)
    hooks = Hooks([PaceHook(None), ConsoleHook(terminal), ConsoleHook(path)])
    hooks.on_start(trainer)
    hooks.after_step(trainer, trainer.step())
    hooks.on_end(trainer, "completed")
    line = terminal.getvalue().splitlines()[0]
    assert line.startswith(" iteration 1 of 2,000 | loss 2.0000 | ") and "tokens/s" in line and " left" in line
    assert len(line) <= COLUMNS
    logged = path.read_text().splitlines()
    assert "lm loss: 2.000000E+00" in logged[0] and "device hours: " in logged[0] and "ETA: " in logged[0]
    assert logged[-1].startswith(" completed at iteration 1 ")


@pytest.mark.parametrize("skipped", [0, 10**6])
def test_the_widest_line_keeps_loss_rate_and_time(skipped: int) -> None:
    record = {
        "iteration": 12_345_678, "lm_loss": 12345.6789, "tokens_per_second": 123_456_789.0, "eta_s": 86400.0 * 9999,
        "skipped_iterations": skipped, "nan_iterations": skipped, "grad_norm": 1.23456e-9,
    }  # fmt: skip
    line = progress_line(record, 99_999_999)
    assert len(line) <= COLUMNS
    assert "loss 12345.6789" in line and "123,456,789 tokens/s" in line and "9,999 d 00 h left" in line
    assert not skipped or "not finite" in line or "grad norm" not in line


def test_time_left_is_of_samples_and_the_latest_intervals() -> None:
    """300 samples in all, 3 a step; two seconds a step: after 10 steps 90 are left, which take 180 s."""
    trainer = FakeTrainer(tiny_config(log_interval=5))
    seen = _records(trainer, steps=10, seconds=2.0)
    assert [record["eta_s"] for record in seen] == [190.0, 180.0]
    assert seen[-1]["device_hours"] == pytest.approx(20 / 3600)


def test_an_old_pace_is_forgotten() -> None:
    trainer, clock = FakeTrainer(tiny_config(log_interval=1)), Clock()
    pace, record = PaceHook(None), {}
    with timed_by(clock):
        pace.on_start(trainer)
        for step in range(60):
            clock.now += 100.0 if step < 40 else 1.0
            trainer.step()
            record = {}
            pace.on_log(trainer, record)
    assert record["eta_s"] == pytest.approx(40.0)


def test_device_hours_go_on_after_a_kill(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    trainer = FakeTrainer(tiny_config(log_interval=5))
    _records(trainer, steps=10, seconds=3600.0, metrics=metrics)
    with metrics.open("a") as file:
        file.write('{"kind": "train", "iteration": 11, "device_ho')  # a process was killed here
    again = FakeTrainer(tiny_config(log_interval=5), iteration=10, consumed_samples=30)
    assert [record["device_hours"] for record in _records(again, steps=5, seconds=3600.0, metrics=metrics)] == [15.0]
    fresh = FakeTrainer(tiny_config(log_interval=5))
    assert [record["device_hours"] for record in _records(fresh, steps=5, seconds=3600.0, metrics=metrics)] == [5.0]


def test_the_last_line_names_picture_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = FakeTrainer(tiny_config(save=str(tmp_path / "a&b"), log_interval=1))
    hooks = make_hooks(trainer.config, rank=0)
    hooks.on_start(trainer)
    for _ in range(3):
        hooks.after_step(trainer, trainer.step())
    hooks.on_end(trainer, "exit_interval")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (f" loss: {tmp_path}/a&b/loss.svg; all curves: python tools/report.py --load {tmp_path}/a&b")
    tree = ElementTree.parse(tmp_path / "a&b" / "loss.svg").getroot()
    assert tree.tag == "{http://www.w3.org/2000/svg}svg", "a file of its own, which a browser opens"
    (line,) = tree.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points", "").split()) == 3
    assert not (tmp_path / "a&b" / "train.log").exists(), "standard output is no terminal and has these lines"


def test_a_curve_begins_with_the_first_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of the log is enough for a picture; a resumed run adds none of its own."""
    trainer = FakeTrainer(tiny_config(save=str(tmp_path), log_interval=3))
    for losses in ((7.5, 6.0, 4.5), (3.0, 2.0, 1.0)):
        hooks = make_hooks(trainer.config, rank=0)
        hooks.on_start(trainer)
        for loss in losses:
            hooks.after_step(trainer, trainer.step(lm_loss=loss))
        hooks.on_end(trainer, "exit_interval")
        assert (tmp_path / "loss.svg").exists()
    assert series(read_metrics(tmp_path / "metrics.jsonl"), "train", "lm_loss") == {
        None: [(1.0, 7.5), (3.0, 6.0), (6.0, 2.0)]
    }


def test_a_run_without_a_curve_leaves_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"kind": "train", "iteration": 1, "lm_loss": 2.0, "grad_norm": 1})
    )
    hook = PictureHook(tmp_path / "metrics.jsonl")
    hook.on_end(FakeTrainer(tiny_config()), {})
    assert not (tmp_path / "loss.svg").exists() and capsys.readouterr().out == ""


def test_the_first_iteration_says_that_the_run_moves() -> None:
    """Where the first line of the log is far away; not where it comes at once, and once a start."""
    for first, every, line in ((0, 25, "(1 of 100) done after 0.5 s; if all took as long, 50 s {would}25"),
                               (30, 25, "(31 of 100) done after 0.5 s; if all took as long, 34 s {would}50"),
                               (90, 25, "(91 of 100) done after 0.5 s; if all took as long, 4 s {would}100"),
                               (0, 1, None), (24, 25, None), (99, 25, None)):  # fmt: skip
        stream, trainer = io.StringIO(), FakeTrainer(tiny_config(log_interval=every), iteration=first)
        hook = ConsoleHook(stream)
        for _ in range(2 if first < 99 else 1):
            hook.after_step(trainer, trainer.step())
        would = "would be left (most are faster); the next line comes at iteration "
        expected = "" if line is None else f" first iteration {line.format(would=would)}\n"
        assert stream.getvalue() == expected, (first, every)
