"""What `profile_layers.py` says while it measures, and what it does beside other programs."""

from __future__ import annotations

import time

import pytest
import torch

from megalite.comm import Axis, World
from megalite.config import read_unjudged
from megalite.testing import run_single
from tools import profile_layers, quiet_turns
from tools.disturbance import BusyClock

SMALL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 16 --train-iters 1 --mock-data "
    "--tokenizer-type NullTokenizer"
)


@pytest.mark.parametrize(
    ("cores", "beside_others", "turns", "notes"),
    [(0.0, False, 4, 0), (2.0, False, 16, 1), (2.0, True, 4, 1)],
    ids=["quiet", "busy: waits", "busy: goes on"],
)
def test_a_busy_machine_is_told_of_and_need_not_be_waited_for(
    cores: float, beside_others: bool, turns: int, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, told, done = time.perf_counter(), [], []
    for clock in (BusyClock, quiet_turns.BusyClock):  # the tools' folder is on the path by itself, too
        monkeypatch.setattr(clock, "busy_seconds", lambda: cores * (time.perf_counter() - begin))
    tally = quiet_turns.Tally(1, lambda *progress: told.append(progress))
    config, _ = read_unjudged(SMALL.split(), optional=["lr", "micro_batch_size"])
    bench = quiet_turns.Bench(config, Axis.single("dp"), torch.device("cpu"), 3, tally, beside_others)

    def work() -> dict[str, float]:
        time.sleep(0.002)
        done.append(1)
        return {"F": 1.0}

    assert bench.medians(work) == {"F": 1.0} and len(done) == turns and tally.done == 1
    said = [note for _, _, note in told if "other programs use 2.0 cores" in note]
    assert bool(said) == bool(cores)
    assert any("--beside-others does not wait" in note for note in said) == (cores > 0 and not beside_others)
    assert len(list(tally.remarks())) == notes


def body_measured(world: World) -> tuple[int, int]:
    config, _ = read_unjudged([*SMALL.split(), "--global-batch-size", "1"], optional=["lr", "micro_batch_size"])
    tally = quiet_turns.Tally(profile_layers.measurements(config, 1, [1, 2]))
    bench = quiet_turns.Bench(config, Axis.single("dp"), world.device, 1, tally, True)
    assert len(profile_layers.measure(bench, world, [1, 2])["points"]) == 2
    return tally.done, tally.total


def test_all_measurements_are_announced() -> None:
    done, total = run_single(body_measured)
    assert done == total
