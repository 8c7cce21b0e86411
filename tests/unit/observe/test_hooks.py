"""When hooks are called, with what, and that a failing tracker never reaches the trainer."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megalite.observe.hooks import Hook, Hooks, TrainerView, guarded
from megalite.observe.stats import Record, evaluation_record
from tests.unit.observe.fake_trainer import FakeTrainer, timed_by, tiny_config


class Recorder(Hook):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, trainer: TrainerView) -> None:
        self.calls.append(("start", trainer.iteration))

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        self.calls.append(("log", (record["iteration"], record["iterations"])))

    def on_evaluation(self, trainer: TrainerView, record: Record) -> None:
        self.calls.append((record["kind"], record["lm_loss"]))

    def on_save(self, trainer: TrainerView, record: Record) -> None:
        self.calls.append(("save", record["path"]))

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self.calls.append(("end", summary))


class Broken(Hook):
    """Fails when something is logged."""

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        raise OSError("no space left")


def test_intervals_close_at_multiples_at_the_last_iteration_and_at_the_end() -> None:
    recorder = Recorder()
    trainer, hooks = FakeTrainer(tiny_config(log_interval=4), train_iters=10), Hooks([recorder])
    hooks.on_start(trainer)
    for _ in range(10):
        hooks.after_step(trainer, trainer.step())
    assert recorder.calls == [("start", 0), ("log", (4, 4)), ("log", (8, 4)), ("log", (10, 2))]

    stopped = Recorder()
    trainer, hooks = FakeTrainer(tiny_config(log_interval=4), train_iters=10), Hooks([stopped])
    hooks.on_start(trainer)
    for _ in range(5):
        hooks.after_step(trainer, trainer.step())
    hooks.on_end(trainer, "exit_signal")
    assert [call for call in stopped.calls if call[0] == "log"] == [("log", (4, 4)), ("log", (5, 1))]


def test_the_summary_tells_how_it_ended_and_the_last_values() -> None:
    recorder = Recorder()
    trainer = FakeTrainer(tiny_config(log_interval=1))
    with timed_by(iter([0.0, 0.0, *[1.0] * 4, 2.0]).__next__):
        hooks = Hooks([recorder])
        hooks.on_start(trainer)
        hooks.after_step(trainer, trainer.step(iteration_time_s=0.5))
        hooks.after_step(trainer, trainer.step(iteration_time_s=0.5, skipped=True, lm_loss=9.0))
        hooks.on_evaluation(trainer, evaluation_record("valid", 2, loss_sum=3.0, num_tokens=2, num_bytes=4))
        hooks.on_save(trainer, iteration=2, path="runs/a/iter_0000002", seconds=0.1)
        hooks.on_end(trainer, "exit_interval")
    summary = recorder.calls[-1][1]
    assert summary["status"] == "exit_interval"
    assert summary["iteration"] == 2
    assert summary["consumed_tokens"] == 24
    assert summary["valid_lm_loss"] == 1.5
    assert summary["goodput"] == 0.25, "half a second of 2 went into a step that counted"
    assert ("save", "runs/a/iter_0000002") in recorder.calls


def test_a_guarded_hook_fails_once_and_alone(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    trainer = FakeTrainer(tiny_config(log_interval=1))
    hooks = Hooks([guarded(Broken(), "the broken one"), recorder])
    hooks.on_start(trainer)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            hooks.after_step(trainer, trainer.step())
        hooks.on_end(trainer, "completed")
    assert [name for name, _ in recorder.calls] == ["start", "log", "log", "log", "end"]
    assert caplog.messages == ["the broken one stopped, training continues: OSError: no space left"]


def test_after_a_failure_the_open_interval_is_left_alone() -> None:
    recorder = Recorder()
    trainer, hooks = FakeTrainer(tiny_config(log_interval=10)), Hooks([recorder])
    hooks.on_start(trainer)
    hooks.after_step(trainer, trainer.step())
    hooks.on_end(trainer, "failed")
    assert [name for name, _ in recorder.calls] == ["start", "end"]
