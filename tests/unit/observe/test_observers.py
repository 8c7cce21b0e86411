"""metrics.jsonl over kills and resumes, and the profiler's window."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.errors import DataError
from megalite.observe.hooks import Hooks
from megalite.observe.observers import JsonlHook, ProfileHook, make_hooks, read_metrics
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config


def _run(path: Path, trainer: FakeTrainer, steps: int, **changes: Any) -> Hooks:
    hooks = Hooks([JsonlHook(path)])
    hooks.on_start(trainer)
    for _ in range(steps):
        hooks.after_step(trainer, trainer.step(**changes))
    return hooks


def test_every_line_is_strict_json_with_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    trainer = FakeTrainer(tiny_config(log_interval=1))
    hooks = _run(path, trainer, 1, grad_norm=math.inf)
    hooks.on_end(trainer, "completed")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    start, train, summary = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert start["kind"] == "start" and start["layout"] == "one process" and "Megatron" in start["flops_convention"]
    keys = (
        "iteration consumed_samples consumed_tokens lm_loss grad_norm learning_rate loss_scale skipped_iterations "
        "iteration_time_ms tokens_per_second tflops_per_device peak_memory_bytes"
    )
    assert set(keys.split()) <= train.keys()
    assert train["lm_loss"] == 2.0 and train["grad_norm"] is None
    assert train["peak_memory_bytes"] > 10_000_000
    assert summary["kind"] == "summary" and summary["status"] == "completed"


def test_a_resumed_run_appends_and_the_later_line_holds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _run(path, FakeTrainer(tiny_config(log_interval=1)), 4, lm_loss=1.0)
    with path.open("a") as file:  # killed in the middle of a line
        file.write('{"kind": "train", "iteration": 5, "lm_lo')
    _run(path, FakeTrainer(tiny_config(log_interval=1), iteration=2), 3, lm_loss=0.5)
    records = read_metrics(path)
    assert [record["iteration"] for record in records if record["kind"] == "start"] == [0, 2]
    losses = {record["iteration"]: record["lm_loss"] for record in records if record["kind"] == "train"}
    assert losses == {1: 1.0, 2: 1.0, 3: 0.5, 4: 0.5, 5: 0.5}


TRAIN = '{"kind": "train", "iteration": 2, "lm_loss": 2.5, "grad_norm": null}'


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"kind": "train", "it\xff', "is no record"),
        (b"[1,2]", "is no record"),
        (b'{"iteration": 2}', "is no record"),
        (b'{"kind": ["train"], "iteration": 2}', "is no record"),
        (b'{"kind": "valid", "iteration": {}}', "has no iteration"),
        (b'{"kind": "train", "iteration": 2, "grad_norm": 1.0}', "has no lm_loss"),
        (TRAIN.replace("2.5", '"abc"').encode(), "has 'abc' for lm_loss, which is no number"),
        (TRAIN.replace("null", "true").encode(), "has True for grad_norm, which is no number"),
    ],
)
def test_a_damaged_line_is_named_unless_it_is_a_torn_last_one(tmp_path: Path, line: bytes, wrong: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(TRAIN.encode() + b"\n" + line)
    assert read_metrics(path) == [json.loads(TRAIN)]
    path.write_bytes(TRAIN.encode() + b"\n" + line + b"\n" + TRAIN.encode() + b"\n")
    with pytest.raises(DataError) as error:
        read_metrics(path)
    assert str(error.value) == f"{path}: line 2 {wrong}; the file is damaged: mend or remove that line"


@pytest.mark.parametrize(
    ("start", "first", "steps", "name"),
    [
        (0, 3, 8, "trace_rank0_iterations_3-4.json"),
        (3, 3, 8, "trace_rank0_iterations_4-4.json"),  # resumed inside the window
        (0, 3, 3, "trace_rank0_iterations_3-3.json"),  # ended inside the window
        (0, 0, 8, "trace_rank0_iterations_1-4.json"),
    ],
)
def test_the_profiler_traces_its_window(tmp_path: Path, start: int, first: int, steps: int, name: str) -> None:
    trainer = FakeTrainer(tiny_config(profile_step_start=first, profile_step_end=5), iteration=start)
    hooks = Hooks([ProfileHook(tmp_path)])
    hooks.on_start(trainer)
    for _ in range(steps):
        torch.ones(8, 8).mm(torch.ones(8, 8))
        hooks.after_step(trainer, trainer.step())
    hooks.on_end(trainer, "completed")
    assert [file.name for file in tmp_path.iterdir()] == [name]
    products = [e for e in json.loads((tmp_path / name).read_text())["traceEvents"] if e.get("name") == "aten::mm"]
    window = name.removesuffix(".json").rsplit("_", 1)[1].split("-")
    assert len(products) == int(window[1]) - int(window[0]) + 1


def test_who_writes_what(tmp_path: Path) -> None:
    config = tiny_config(save=str(tmp_path), profile=True, profile_ranks=(1,), tensorboard_dir=str(tmp_path))

    def names(rank: int) -> list[str]:
        return [f"{type(hook).__name__} {hook.fails_alone_as}" for hook in make_hooks(config, rank)._hooks]

    everywhere = ["SlowRankHook None", "MemoryCheckHook None"]
    metrics = f"JsonlHook {tmp_path / 'metrics.jsonl'}"
    first = ["PaceHook None", "ConsoleHook None", metrics, "TensorBoardHook TensorBoard"]
    assert names(0) == [*everywhere, *first, "PictureHook loss.svg"]
    assert names(1) == [*everywhere, "ProfileHook the profiler"]
    assert names(2) == everywhere
