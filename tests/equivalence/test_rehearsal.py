"""Faults between ranks are found and named by both ranks and lines, and sound layouts have none: whole runs, rehearsed
rank by rank without values, with a fault of this file planted into the step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalite.comm import Axis, Channel, all_gather_into, all_reduce_, start_all_to_all_rows
from megalite.nn.norm import Norm
from megalite.rehearsal import DEVICE, Fault, rehearse, rehearsed
from megalite.train.trainer import Trainer

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
        return list(rehearse(rehearsed([*SMALL, *layout.split()], ranks, steps=steps)).faults)


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
    a_circle: ("deadlock: 4 ranks wait in a circle", "rank 3: recv from rank 2"),
    opposite_orders: ("deadlock: 2 ranks wait in a circle", "rank 1: all_reduce"),
}


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
    assert found.startswith("warning: memory: rank 0 allocates 1.00 GiB, the plan says 0.00")
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
    report = rehearse(rehearsed([*SMALL, "--num-layers", "1"], 1, steps=1), device_bytes=1 << 20)
    (found,) = map(str, report.faults)
    assert found.startswith("memory: rank 0 needs ") and "zero/flat_weights.py" in found and report.fails
