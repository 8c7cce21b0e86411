"""The peak of live tensors: counted exactly, printed beside the prediction, and the prediction holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from equivalence.layouts import train_body

from megalite.comm import Axis
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.observe.live_memory import LiveBytes, MemoryCheckHook
from megalite.observe.observers import read_metrics
from megalite.planner import RankMemory
from megalite.testing import run_ranks, run_single
from megalite.train.run import run_training

FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --global-batch-size 8 --lr 1e-3 "
    "--micro-batch-size 2 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --eval-iters 0 "
    "--num-workers 0 --log-interval 1 --no-exit-signal-handler"
).split()


def test_live_bytes_are_those_of_the_storages() -> None:
    with LiveBytes() as counter:
        a = torch.zeros(1000)
        b = a.view(10, 100)[3:]  # looks at the same storage
        assert (counter.now, counter.peak) == (4000, 4000)
        c = b + 1.0
        assert counter.now == 4000 + 2800
        del a, b
        assert (counter.now, counter.peak) == (2800, 6800)
        d = torch.empty(0)
        d.untyped_storage().resize_(800)
        d.set_(d.untyped_storage(), 0, (200,))
        assert counter.now == 3600
        d.untyped_storage().resize_(0)
        del c, d
    assert (counter.now, counter.peak) == (0, 6800)


def test_a_tensor_of_vmap_counts_as_nothing() -> None:
    """It has no memory of its own, and whoever keeps one, as flex attention's masks do, does not end a run."""
    kept: list[torch.Tensor] = []
    torch.vmap(lambda x: kept.append(x) or x + 1)(torch.zeros(3))
    with LiveBytes() as counter:
        counter.add_everything()
    assert len(kept) == 1


def test_a_storage_counts_as_what_it_is_resized_to() -> None:
    """As weights of ZeRO-3 do: nothing but the storage is touched between the uses."""
    a = torch.zeros(1000)
    with LiveBytes() as counter:
        counter.add_everything()
        begin = counter.now
        a.untyped_storage().resize_(0)
        assert counter.now == begin - 4000
        b = torch.ones(1000)  # in the place of the first
        assert counter.peak == begin
        a.untyped_storage().resize_(4000)  # nothing is computed with it yet
        assert counter.now == counter.peak == begin + 4000
        del a, b
        assert counter.now == begin - 4000
    c = torch.zeros(10)
    c.untyped_storage().resize_(0)
    assert counter.now == begin - 4000, "nothing listens afterwards"


def test_what_autograd_keeps_is_alive() -> None:
    with LiveBytes() as counter:
        x = torch.ones(1000, requires_grad=True)
        y = (x.exp() * 2).sum()  # exp keeps its result, which Python does not see
        assert counter.now == 8000 + 4
        del y
        assert counter.now == 4000


def body(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


LAYOUTS = [
    "--bf16 --hidden-size 256 --seq-length 256 --micro-batch-size 4",  # this host's kernels widen, or do not
    "--optimizer-offload-path {folder}",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 1 0",
]


@pytest.mark.parametrize("layout", [*LAYOUTS[:3], *(pytest.param(x, marks=pytest.mark.full) for x in LAYOUTS[3:])])
def test_the_prediction_is_within_five_per_cent_of_a_run(layout: str, tmp_path: Path) -> None:
    argv = [*FLAGS, *layout.format(folder=tmp_path).split(), "--save", str(tmp_path)]
    assert run_ranks(body, 2 if "parallel" in layout else 1, argv, timeout=120)[0] == 0
    found = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "memory_error" in record]
    assert [record["iteration"] for record in found] == [3]
    assert found[0]["predicted_memory_bytes"] == pytest.approx(found[0]["measured_memory_bytes"], rel=0.05)


@pytest.mark.landing
def test_counting_changes_no_loss(tmp_path: Path) -> None:
    assert run_single(body, [*FLAGS, "--save", str(tmp_path)]) == 0
    expected, _ = run_single(train_body, FLAGS, 10)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["lm_loss"] for record in records] == expected


@pytest.mark.parametrize("fullest", [0, 1])
def test_the_prediction_is_that_of_the_rank_that_measured_most(fullest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[1000.0 + (coordinate == fullest), coordinate] for coordinate in range(2)]
    monkeypatch.setattr("megalite.observe.live_memory.all_gather_json", lambda mine, axis: rows)
    hook = MemoryCheckHook([RankMemory(weights=100.0), RankMemory(weights=200.0)])
    hook._measured, hook._until = 1000.0, 3
    mesh = SimpleNamespace(coordinate=lambda axis: 0, world=Axis.single("world"))
    record: dict[str, Any] = {}
    hook.on_log(cast(Any, SimpleNamespace(mesh=mesh, device=torch.device("cpu"))), record)
    assert record["predicted_memory_bytes"] == 100 * (fullest + 1)
