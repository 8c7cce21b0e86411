"""TensorBoard and wandb get Megatron's tags, offline and without a key, and are read back to prove it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.observe.hooks import Hooks
from megalite.observe.stats import evaluation_record
from megalite.observe.tracking import TensorBoardHook, WandbHook, tags
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config


def _train(trainer: FakeTrainer, hooks: Hooks) -> None:
    hooks.on_start(trainer)
    for _ in range(2):
        hooks.after_step(trainer, trainer.step())
    hooks.on_evaluation(trainer, evaluation_record("valid", trainer.iteration, loss_sum=3.0, num_tokens=2))
    hooks.on_end(trainer, "completed")


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


def test_wandb_without_a_key_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a key could be kept
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = FakeTrainer(tiny_config(log_interval=1, wandb_project="tiny", wandb_save_dir=str(tmp_path / "w")))
    _train(trainer, Hooks([WandbHook()]))
    assert list((tmp_path / "w" / "wandb").glob("offline-run-*/run-*.wandb"))
