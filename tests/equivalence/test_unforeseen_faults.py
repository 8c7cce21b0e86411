"""Ten faults that no check was written for, planted into functions of the product: they were written down before the
first of them was rehearsed. docs/rehearsal.md says which were found at once, and what was mended for the others.

Each is one mistake in one place, on one rank where that is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from equivalence.test_rehearsal import SMALL
from megalite.comm import Channel, mesh
from megalite.generation import Generator
from megalite.parallel.expert import plan
from megalite.parallel.tensor import late_messages
from megalite.parallel.tiers import Arrival
from megalite.parallel.zero.streamed_gradient import ScratchPool, StreamedGradient
from megalite.parallel.zero.unshard import ComingWeights
from megalite.rehearsal import Fault, rehearse_run, rehearsed
from megalite.train import validation
from megalite.train.run_state import RunState
from megalite.train.trainer import Trainer


@contextmanager
def a_sum_over_the_wrong_axis() -> Iterator[None]:
    """The last rank sums what tensor parallelism has cut over its replicas."""
    right, began, axes = late_messages.all_reduce_, Trainer.train_step, {}

    def step(trainer: Trainer, **more: Any) -> Any:
        axes[dist.get_rank()] = trainer.mesh["dp"]
        return began(trainer, **more)

    def wrong(x: Tensor, axis: Any, **more: Any) -> Any:
        return right(x, axes.get(dist.get_rank(), axis) if dist.get_rank() == 3 else axis, **more)

    with patch.object(late_messages, "all_reduce_", wrong), patch.object(Trainer, "train_step", step):
        yield


@contextmanager
def a_message_one_element_short() -> Iterator[None]:
    right = Channel._isend

    def short(channel: Channel, x: Tensor, peer: int) -> None:
        right(channel, x.reshape(-1)[:-1] if dist.get_rank() == 1 and x.is_floating_point() else x, peer)

    with patch.object(Channel, "_isend", short):
        yield


@contextmanager
def activations_come_back_too_late() -> Iterator[None]:
    """No stream waits for what the mover has fetched."""

    def forgets(arrival: Arrival) -> None:
        arrival.ends = ()

    with patch.object(Arrival, "wait", forgets):
        yield


@contextmanager
def scratch_goes_back_too_early() -> Iterator[None]:
    """The gradient of a bucket is given back while it is being reduced."""
    right, wait = StreamedGradient.launch, ScratchPool.wait

    def launch(gradient: StreamedGradient, *, async_op: bool) -> None:
        right(gradient, async_op=async_op)
        assert gradient._reducing is not None
        gradient._pool._free.append(gradient._reducing)

    with patch.object(StreamedGradient, "launch", launch), patch.object(ScratchPool, "give_back", lambda *_: None):
        assert wait is ScratchPool.wait
        yield


@contextmanager
def a_transposed_table() -> Iterator[None]:
    right = plan.start_all_to_all_rows

    def wrong(x: Tensor, traffic: Sequence[Sequence[int]], axis: Any) -> Any:
        return right(x, [*map(list, zip(*traffic, strict=True))] if dist.get_rank() == 1 else traffic, axis)

    with patch.object(plan, "start_all_to_all_rows", wrong):
        yield


@contextmanager
def updated_weights_that_nobody_waits_for() -> Iterator[None]:
    def forgets(weights: ComingWeights) -> None:
        weights._arriving = None

    with patch.object(ComingWeights, "wait", forgets):
        yield


@contextmanager
def communicators_in_another_order() -> Iterator[None]:
    """One rank makes the lines of an axis from the last to the first."""
    right = mesh.make_axis

    def reversed_(name: str, lines: Sequence[Sequence[int]], rank: int, **more: Any) -> Any:
        return right(name, lines[::-1] if rank == 1 else lines, rank, **more)

    with patch.object(mesh, "make_axis", reversed_):
        yield


@contextmanager
def a_stage_that_leaves_out_the_sum_of_an_evaluation() -> Iterator[None]:
    right = validation.all_reduce_

    def only_first(x: Tensor, axis: Any) -> Any:
        return right(x, axis) if dist.get_rank() == 0 else x

    with patch.object(validation, "all_reduce_", only_first):
        yield


@contextmanager
def a_stage_that_stops_generating() -> Iterator[None]:
    """The last stage leaves the loop before the last episode."""
    right = Generator._next

    def leaves(generator: Generator, slots: Sequence[Any], waiting: Iterator[Any]) -> list[Any]:
        return [] if dist.get_rank() == 1 else right(generator, slots, waiting)

    with patch.object(Generator, "_next", leaves):
        yield


@contextmanager
def a_tensor_that_is_saved_twice() -> Iterator[None]:
    right = RunState._shards

    def twice(state: RunState, version: int) -> Any:
        shards = right(state, version)
        own = [x for x in shards if not x.replica and x.local.numel()] if dist.get_rank() == 1 else []
        return [*shards, *own[:1]]

    with patch.object(RunState, "_shards", twice):
        yield


PP, EP = "--pipeline-model-parallel-size 2", "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
SAMPLES = "--sample-interval 2 --sample-prompts there_is_no_such_file.txt"
Planted = tuple[Callable[[], Any], str, int, str, str]
UNFORESEEN: list[Planted] = [
    (a_sum_over_the_wrong_axis, "--tensor-model-parallel-size 2", 4, "match: collective", r"rank 3 .*late_messages"),
    (a_message_one_element_short, PP, 2, "match: message", r"rank 1 starts send .*comm/p2p\.py"),
    (activations_come_back_too_late, "--offload activations=2", 1, "race: rank 0", r"tiers/mover\.py"),
    (scratch_goes_back_too_early, "--zero-stage 2", 2, "race: rank 0", r"zero/(streamed_gradient|bucket)\.py"),
    (a_transposed_table, EP, 2, "step: rank 1 fails", r"expert/plan\.py"),
    (updated_weights_that_nobody_waits_for, "--zero-stage 1", 2, "match: rank 0", r"all_gather.*zero/"),
    (communicators_in_another_order, "--tensor-model-parallel-size 2", 4, "match: rank 0 makes", r"and rank 1 makes"),
    (a_stage_that_leaves_out_the_sum_of_an_evaluation, f"{PP} --eval-iters 1", 2, "match: collective",
     r"rank 0 starts all_reduce .*train/validation\.py"),
    (a_stage_that_stops_generating, f"{PP} {SAMPLES}", 2, "match: ",
     r"rank 0 starts .*generation/engine\.py.*rank 1 starts no further one"),
    (a_tensor_that_is_saved_twice, "--zero-stage 1", 2, "save: rank 1", r"and rank 1 saves"),
]  # fmt: skip
"""(Mistake, layout, ranks, how the fault begins that names it, what it says of rank and line)."""


def told(mistake: Callable[[], Any], layout: str, ranks: int) -> list[str]:
    with mistake():
        found: Sequence[Fault] = rehearse_run(rehearsed([*SMALL, *layout.split()], ranks)).faults
    return [str(fault) for fault in found]


@pytest.mark.full
@pytest.mark.parametrize(
    "mistake, layout, ranks, begins, says", UNFORESEEN, ids=[mistake.__name__ for mistake, *_ in UNFORESEEN]
)
def test_an_unforeseen_fault_is_named(
    mistake: Callable[[], Any], layout: str, ranks: int, begins: str, says: str
) -> None:
    found = told(mistake, layout, ranks)
    named = [each for each in found if each.startswith(begins)]
    assert any(re.search(says, each.replace("\n", " ")) for each in named), found
    assert torch.is_grad_enabled()
