"""TensorBoard and wandb get Megatron's tags, offline and without a key, and are read back to prove it."""

from __future__ import annotations

import json
import logging
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest

from megalite.observe.hooks import Hooks, guarded
from megalite.observe.loggers import TensorBoardHook, WandbHook, tags
from megalite.observe.stats import evaluation_record
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config


def _train(trainer: FakeTrainer, hooks: Hooks) -> None:
    hooks.on_start(trainer)
    for _ in range(2):
        hooks.after_step(trainer, trainer.step())
    hooks.on_evaluation(trainer, evaluation_record("valid", trainer.iteration, loss_sum=3.0, num_tokens=2))
    hooks.on_samples(trainer, [{"kind": "sample", "iteration": trainer.iteration, "prompt": "On", "text": "ce"}])
    hooks.on_end(trainer, "completed")


def test_tags_of_experts() -> None:
    numbers = {"load_balancing_loss": 1.1, "z_loss": 0.2, "fullest_expert": 1.5, "dropped_fraction": 0.0}
    record = {
        "kind": "train",
        "iteration_time_ms": 1.0,
        "expert_load": {"0": [100, 100]},
        "load_entropy": 0.9,
    } | numbers
    found = tags(record)
    assert found.pop("iteration-time") == 1e-3
    assert sorted(found.values()) == [0.0, 0.2, 0.9, 1.1, 1.5]


def test_tags_of_a_validation() -> None:
    assert tags(evaluation_record("test", 3, loss_sum=0.0, num_tokens=2)) == {
        "lm loss test": 0.0,
        "lm loss test ppl": 1.0,
    }


def test_tensorboard_holds_the_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _train(FakeTrainer(tiny_config(log_interval=1)), Hooks([TensorBoardHook(str(tmp_path))]))
    resumed = FakeTrainer(tiny_config(log_interval=1), iteration=2, consumed_samples=6)
    _train(resumed, Hooks([TensorBoardHook(str(tmp_path))]))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [3, 6, 9, 12]
    assert events.Scalars("lm loss validation")[-1].value == 1.5
    assert events.Scalars("learning-rate")[0].value == pytest.approx(1e-3)
    assert [event.step for event in events.Tensors("sample 0/text_summary")] == [2, 4]
    assert b"On**ce**" in events.Tensors("sample 0/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_on_a_full_disk_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread dies with the error (here: of a file that may not grow); no traceback, and training continues."""
    pytest.importorskip("tensorboard")
    printed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    trainer = FakeTrainer(tiny_config(log_interval=1))
    hooks = Hooks([guarded(TensorBoardHook(str(tmp_path)), "TensorBoard")])
    hooks.on_start(trainer)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limit[1]))
        for _ in range(9):
            hooks.after_step(trainer, trainer.step())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    hooks.on_end(trainer, "completed")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "TensorBoard stopped, training continues: OSError: [Errno 27] File too large"
    ]
    assert printed == []


@pytest.mark.landing
def test_wandb_without_a_key_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a key could be kept
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = FakeTrainer(tiny_config(log_interval=1, wandb_project="tiny", wandb_save_dir=str(tmp_path / "w")))
    _train(trainer, Hooks([WandbHook()]))
    assert list((tmp_path / "w" / "wandb").glob("offline-run-*/run-*.wandb"))
    (table,) = (tmp_path / "w" / "wandb").glob("offline-run-*/files/media/table/samples*.json")
    assert json.loads(table.read_text())["data"] == [["On", "ce"]]


@pytest.mark.parametrize("full_from", ["start", "first log"])
def test_wandb_on_a_full_disk_is_one_line(
    full_from: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The free space is faked: a full disk needs a mount of its own."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = FakeTrainer(tiny_config(log_interval=1, wandb_project="tiny", wandb_save_dir=str(tmp_path)))
    answers = [1, 0] if full_from == "first log" else [0]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=answers.pop(0)))
    _train(trainer, Hooks([guarded(WandbHook(), "wandb")]))
    ended = "did not start" if full_from == "start" else "stopped"
    assert [record.message for record in caplog.records if "training continues" in record.message] == [
        f"wandb {ended}, training continues: no space left under {tmp_path}; what was logged last may be lost"
    ]
    for handler in logging.getLogger("wandb").handlers:
        handler.handleError(logging.makeLogRecord({}))
    assert "Logging error" not in capfd.readouterr().err
    wandb.finish()
