"""Faults between ranks are found and named by both ranks and lines, and sound layouts have none: whole runs, rehearsed
rank by rank without values, with a fault of this file planted into the step. `FAULTS` is the list of them."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from source_tree import ROOT
from unit.rehearsal import test_planted_races as planted

from megalite.comm import Axis, Channel, all_gather_into, all_reduce_, start_all_to_all_rows
from megalite.errors import ConfigError
from megalite.nn.norm import Norm
from megalite.rehearsal import DEVICE, Fault, rehearse_run, rehearsed
from megalite.train.run_state import RunState
from megalite.train.trainer import Trainer

FAULTS: dict[int, tuple[str, str]] = {
    1: ("synchronous all-gather on a side stream", "a_collective_of_another_stream"),
    2: ("the host packs strided rows that have not arrived", "packs_rows_that_have_not_arrived"),
    3: ("no wait before a copy", "reads_before_it_is_computed"),
    4: ("no wait after a copy", "reads_before_it_has_arrived"),
    5: ("event recorded before the work", "records_the_event_before_the_work"),
    6: ("no record_stream", "frees_what_another_stream_uses"),
    7: ("resize_(0) under a running gather", "a_gather_into_memory_that_goes"),
    8: ("page-locked staging rewritten early", "rewrites_staging"),
    9: ("the host reads an asynchronous copy", "reads_on_the_host_too_early"),
    10: ("the optimizer's thread reads what is in flight", "a_thread_does_not_wait"),
    11: ("handle never waited for", "not_waited_for"),
    12: ("a send dropped", "test_a_message_that_differs_is_found"),
    13: ("dtype differs between sender and receiver", "test_a_message_that_differs_is_found"),
    14: ("two collectives exchanged on one rank", "exchanged"),
    15: ("an all-reduce under `if rank == 0`", "by_one_rank_only"),
    16: ("a circle of four receives", "a_circle"),
    17: ("two communicators in opposite order", "opposite_orders"),
    18: ("a communicator made by some ranks only", "made_by_one_rank"),
    19: ("a wrong all-to-all table", "wrong_table"),
    20: ("item() in a layer", "test_a_value_that_is_read_in_a_layer_is_named"),
    21: ("an activation kept by a closure", "test_a_kept_activation_is_named"),
    22: ("a second copy of the weights", "test_a_second_copy_of_the_weights_is_named"),
    23: ("fragmentation, reserved 1.3 x allocated", "test_torn_memory_is_named"),
    24: ("pairs of ranks whose NCCL memory does not fit", "test_pairs_whose_buffers_do_not_fit_are_named"),
    25: ("two ranks save one piece", "test_a_piece_that_two_ranks_save_is_named"),
}
"""Number -> (what it is, what plants it: a scene of `test_planted_races.py`, or one of this file)."""
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 4 --bf16 --lr 1e-2 "
    "--micro-batch-size 1 --train-iters 50 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 0"
).split()


def faults(layout: str, ranks: int, body: Callable[[Trainer], Any] | None = None, steps: int = 1) -> list[Fault]:
    """What a rehearsal finds where `body` runs before each step."""
    right = Trainer.train_step

    def step(trainer: Trainer, **more: Any) -> Any:
        if body is not None:
            body(trainer)
        return right(trainer, **more)

    with patch.object(Trainer, "train_step", step):
        return list(rehearse_run(rehearsed([*SMALL, *layout.split()], ranks, steps=steps)).faults)


def new(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (8,), device=DEVICE)


def world(trainer: Trainer) -> Axis:
    return trainer.mesh.world


def exchanged(trainer: Trainer) -> None:
    x, many = new(), new(16)
    if trainer.mesh.rank == 0:
        all_reduce_(x, world(trainer))  # one
    all_gather_into(many, x, world(trainer))  # other
    if trainer.mesh.rank == 1:
        all_reduce_(x, world(trainer))


def by_one_rank_only(trainer: Trainer) -> None:
    if trainer.mesh.rank == 0:
        all_reduce_(new(), world(trainer))  # one


def not_waited_for(trainer: Trainer) -> None:
    all_reduce_(new(), world(trainer), async_op=True)  # one


def made_by_one_rank(trainer: Trainer) -> None:
    if trainer.mesh.rank == 1:
        dist.new_group([0, 1])  # one


def wrong_table(trainer: Trainer) -> None:
    traffic = [[1, 2], [3, 1]] if trainer.mesh.rank == 0 else [[1, 3], [2, 1]]
    _, arrival = start_all_to_all_rows(new(3, 2), traffic, world(trainer))  # one
    arrival.wait()


def a_circle(trainer: Trainer) -> None:
    rank, x = trainer.mesh.rank, new()
    dist.irecv(x, (rank - 1) % 4).wait()  # one
    dist.isend(x, (rank + 1) % 4).wait()  # other


def opposite_orders(trainer: Trainer) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if trainer.mesh.rank == 0 else groups[::-1]:
        dist.all_reduce(new(), group=group)  # one


PLANTED: dict[Callable[[Trainer], Any], tuple[str, str]] = {
    exchanged: ("match: collective", "rank 0 starts all_reduce"),
    by_one_rank_only: ("match: collective", "rank 0 starts all_reduce"),
    not_waited_for: ("match: rank 0", "nobody waits for all_reduce"),
    made_by_one_rank: ("match: rank 0 makes", "and rank 1 makes"),
    wrong_table: ("match: rank 0 sends rank 1", "2 rows"),
    a_circle: ("deadlock: 4 ranks wait in a circle: 0 -> 3 -> 2 -> 1 -> 0\n", "rank 3: recv from rank 2"),
    opposite_orders: ("deadlock: 2 ranks wait in a circle", "rank 1: all_reduce"),
}


def test_each_planted_fault_has_its_test() -> None:
    here = {name for name in vars(sys.modules[__name__]) if name.startswith("test_")}
    races = {scene.__name__ for scene in (*planted.SCENES, *planted.MESSAGES)}
    known = {body.__name__ for body in PLANTED} | here
    assert all(name in (races if number <= 10 else known) for number, (_, name) in FAULTS.items())
    assert list(FAULTS) == list(range(1, 26))


@pytest.mark.parametrize("right", [pytest.param(True, marks=pytest.mark.landing), False], ids=["right", "planted"])
def test_races_of_a_step_are_named_by_rank_and_lines(right: bool) -> None:
    """Faults 1 to 10, all in one step."""
    scenes = [getattr(planted, FAULTS[number][1]) for number in range(1, 11)]

    def race(trainer: Trainer) -> None:
        for scene in scenes:
            scene(right, *([world(trainer)] if scene in planted.MESSAGES else []))
            gc.collect()
            torch.cuda.synchronize()  # what one leaves behind is none of the next one's

    found = [str(fault) for fault in faults("--num-layers 1", 2, race)]
    for scene in scenes:
        own = [each for each in found if f" {scene.__name__} " in each or f" {scene.__name__}\n" in each]
        planted.check(scene, right, own)
        assert all(re.match("race: rank [01]: ", each) for each in own)
        found = [each for each in found if each not in own]
    assert found == [] or not right and all("nobody waits" in each for each in found)


@pytest.mark.parametrize("body", PLANTED, ids=lambda body: body.__name__)
def test_a_planted_fault_is_found_and_named(body: Callable[[Trainer], Any]) -> None:
    begins, says = PLANTED[body]
    found = [str(fault) for fault in faults("--num-layers 1", 4 if body is a_circle else 2, body, steps=2)]
    assert any(each.startswith(begins) and says in each for each in found), found
    named = next(each for each in found if each.startswith(begins))
    lines, first = inspect.getsourcelines(body)
    marked = [number for number, line in enumerate(lines, first) if line.endswith(("# one\n", "# other\n"))]
    assert all(f"test_rehearsal.py:{number} {body.__name__}" in named for number in marked), (marked, named)


@pytest.mark.parametrize("kind", ["dropped", "of another type"])
def test_a_message_that_differs_is_found(kind: str) -> None:
    right = Channel.send

    def send(channel: Channel, x: torch.Tensor, **more: Any) -> None:
        if more["label"].kind == "B" and more["label"].microbatch == 1:
            if kind == "dropped":
                return
            x = x.to(torch.float16)
        right(channel, x, **more)

    with patch.object(Channel, "send", send):
        (found, *_) = map(str, faults("--pipeline-model-parallel-size 2", 2))
    assert re.search(r"match: message 3 of \d from rank 1 to rank 0", found)
    assert "rank 0 starts recv from rank 1" in found and "pipeline/executor.py" in found
    assert (" float16, (send" in found) == (kind != "dropped")


@pytest.mark.parametrize(
    "layout, ranks",
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel", 4),
        ("--zero-stage 3", 2),
    ],
)
def test_a_sound_layout_has_no_fault(layout: str, ranks: int) -> None:
    assert faults(f"{layout} --eval-iters 1", ranks, steps=2) == []


def test_a_kept_activation_is_named() -> None:
    kept = []

    def keep(trainer: Trainer) -> None:
        kept.append(new(1 << 14))  # one

    (found,) = map(str, faults("--num-layers 1", 1, keep, steps=3))
    assert found.startswith("memory: rank 0: every iteration leaves 65,536 bytes")
    assert "test_rehearsal.py" in found and " new < " in found


def test_a_second_copy_of_the_weights_is_named() -> None:
    right = Trainer.__post_init__

    def doubled(trainer: Trainer) -> None:
        right(trainer)
        trainer.copy = [torch.empty(1 << 28, device=DEVICE)]  # type: ignore[attr-defined]

    with patch.object(Trainer, "__post_init__", doubled):
        (found,) = map(str, faults("--num-layers 1", 1))
    assert found.startswith("warning: memory: rank 0 allocates 1.00 GiB, the plan says 0.06")
    assert "weights, gradients and optimizer differ" in found and "test_rehearsal.py" in found


def test_a_value_that_is_read_in_a_layer_is_named() -> None:
    right = Norm.forward

    def forward(norm: Norm, x: torch.Tensor) -> torch.Tensor:
        return right(norm, x) * x.abs().max().clamp(1, 1).item()

    with patch.object(Norm, "forward", forward):
        found = [str(fault) for fault in faults("--num-layers 1", 1)]
    assert len(found) == 3 and all("the host waits for the device 4 times a step" in each for each in found)
    assert all("item() at equivalence/test_rehearsal.py" in each for each in found)


def test_a_device_that_is_too_small_is_told_with_the_largest_lines() -> None:
    report = rehearse_run(rehearsed([*SMALL, "--num-layers", "1"], 1, steps=1), device_bytes=1 << 20)
    (found,) = map(str, report.faults)
    assert found.startswith("memory: rank 0 needs ") and "zero/flat_weights.py" in found and report.fails


def marked(function: Callable[..., Any]) -> list[int]:
    lines, first = inspect.getsourcelines(function)
    return [number for number, line in enumerate(lines, first) if line.endswith(("# one\n", "# other\n"))]


def test_torn_memory_is_named() -> None:
    def torn(trainer: Trainer) -> None:
        blocks = [torch.empty(96 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
        del blocks[::2]
        torch.empty(300 << 20, dtype=torch.uint8, device=DEVICE)  # one

    found = [str(fault) for fault in faults("--num-layers 1", 1, torn)]
    (named,) = (each for each in found if "reserves" in each)
    assert named.startswith("warning: memory: rank 0 reserves 1.0 GiB for 0.8 that are allocated")
    assert f"the last segment is for equivalence/test_rehearsal.py:{marked(torn)[0]} torn" in named


def test_pairs_whose_buffers_do_not_fit_are_named() -> None:
    ranks = 16

    def all_with_all(trainer: Trainer) -> None:
        rank, work = trainer.mesh.rank, []
        for other in range(ranks):
            if other != rank:
                ends = [dist.isend, dist.irecv] if rank < other else [dist.irecv, dist.isend]
                work += [start(new(), other) for start in ends]  # one
        for each in work:
            each.wait()

    def found(device_bytes: int) -> list[str]:
        run = rehearsed([*SMALL, "--num-layers", "1", "--global-batch-size", "16"], ranks, steps=1)
        return [str(fault) for fault in rehearse_run(run, [0, 1], device_bytes=device_bytes).faults]

    right = Trainer.train_step
    with patch.object(Trainer, "train_step", lambda trainer, **more: all_with_all(trainer) or right(trainer, **more)):
        assert found(400 << 20) == []
        named = found(200 << 20)[0]
    assert named.startswith("memory: rank 0 needs 0.0") and "NCCL 0.23 for messages" in named
    assert "in 30 directions" in named and f"test_rehearsal.py:{marked(all_with_all)[0]} all_with_all" in named


def test_a_piece_that_two_ranks_save_is_named() -> None:
    right = RunState._shards

    def shards(state: RunState, version: int) -> Any:
        return [replace(shard, replica=0) for shard in right(state, version)]  # one

    with patch.object(RunState, "_shards", shards):
        found = [str(fault) for fault in faults("--num-layers 1 --zero-stage 0", 2)]
    at = f"[0:32] at equivalence/test_rehearsal.py:{marked(shards)[0]}"
    assert len(found) == 1 and found[0].startswith("save: rank 0 saves ") and "and rank 1 saves " in found[0]
    assert found[0].count(at.partition(" ")[2]) == 2, found


@pytest.mark.parametrize("ranks", [[0, 32], pytest.param(None, marks=pytest.mark.landing)], ids=["two", "all"])
def test_a_module_of_somebody_else_is_rehearsed_on_64_ranks(ranks: list[int] | None) -> None:
    words = f"--model-module {ROOT}/examples/model_module.py:small --pipeline-model-parallel-size 2 --zero-stage 1"
    words += " --seq-length 64 --micro-batch-size 2 --global-batch-size 256 --lr 1e-3 --train-iters 4 --vocab-size 256"
    report = rehearse_run(rehearsed([*words.split(), "--mock-data"], 64), ranks)
    assert report.faults == []
    first, last = report.records[0].calls, report.records[32].calls
    assert {call.kind for call in first} >= {"send", "recv", "reduce_scatter", "all_gather"}
    assert len([c for c in first if c.kind == "send"]) == len([c for c in last if c.kind == "recv"]) > 8


def test_flags_that_no_rank_would_start_with_are_one_line() -> None:
    with pytest.raises(ConfigError, match="has no function of that name"):
        rehearse_run(rehearsed([*SMALL[6:], "--model-module", f"{ROOT}/examples/model_module.py:no"], 2))
