"""Activations moved by EVICT and PREFETCH: the same gradients, the capacity kept at every action, mistakes raise."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm import TensorSpec
from megalite.errors import RuntimeFailure, ScheduleError
from megalite.gradient import WeightGradQueue
from megalite.parallel.pipeline import Events, Executor, Stage
from megalite.parallel.pipeline.offloaded_stage import OffloadedStage
from megalite.parallel.tiers import Mover, SavedTensors
from megalite.schedule import Action, ActivationRoom, PeakActivations, Program, insert_transfers, residency
from megalite.schedule.program import flush_program
from megalite.schedule.stage_placement import loop

SPEC = TensorSpec((4, 8), torch.float64, torch.device("cpu"))


class Layers(nn.Module):
    """A first and last stage; a micro-batch is a seed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).double()

    def forward(self, x: None, microbatch: int) -> Tensor:
        x0 = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(microbatch))
        return self.layers(x0).square().sum()


class Source:
    def get(self, microbatch: int) -> tuple[Any, Tensor]:
        return microbatch, torch.tensor(0.5, dtype=torch.float64)


def program_of(actions: list[Action], count: int) -> Program:
    return flush_program("random", loop(1), count, lambda rank, m: actions, lambda rank, m: PeakActivations(m))


def random_actions(rng: random.Random, count: int) -> list[Action]:
    waiting, begun, actions = list(range(count)), [], []
    while waiting or begun:
        if waiting and (not begun or rng.random() < 0.7):
            begun.append(waiting.pop(0))
            actions.append(Action("F", 0, begun[-1]))
        else:
            actions.append(Action("B", 0, begun.pop(rng.randrange(len(begun)))))
    return actions


def gradients(program: Program, stage: Stage) -> list[Tensor]:
    executor = Executor(0, {(0, 0): stage}, program.placement, None, Events())  # type: ignore[arg-type]  # no messages
    for action in executor.run(program.order(0, program.batch(0)), Source()):
        assert action.kind == "STEP"
    assert stage.num_in_flight == 0
    return [parameter.grad for parameter in stage.modules[0].parameters() if parameter.grad is not None]


def offloaded() -> OffloadedStage:
    saved = SavedTensors(Mover(torch.device("cpu")))
    return OffloadedStage([Layers()], WeightGradQueue(), spec=SPEC, is_first=True, is_last=True, saved=saved)


def bytes_of_one() -> int:
    stage = offloaded()
    stage.forward(0, None, *Source().get(0), version=0)
    return stage.saved.peak


def test_twenty_random_programs_keep_their_capacity_and_their_bits() -> None:
    rng, one, moved = random.Random(2), bytes_of_one(), 0
    while moved < 20:
        count = rng.randint(4, 8)
        plain = program_of(random_actions(rng, count), count)
        capacity = rng.randint(4, 5) * one
        program = insert_transfers(plain, ActivationRoom((one,), (0,), (capacity,)))
        try:
            transfers = sum(action.kind == "EVICT" for action in program.order(0, program.batch(0)))
        except ScheduleError:
            continue
        if not transfers:
            continue
        moved += 1
        stage = offloaded()
        found = gradients(program, stage)
        expected = gradients(plain, Stage([Layers()], WeightGradQueue(), spec=SPEC, is_first=True, is_last=True))
        assert len(found) == 6 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert program.room is not None
        planned = residency(program.order(0, program.batch(0)), frozenset(), program.room)
        assert stage.saved.peak == planned.device <= capacity and stage.saved.now == 0


def test_what_is_on_the_host_cannot_be_used() -> None:
    stage = offloaded()
    stage.forward(0, None, *Source().get(0), version=0)
    stage.evict(0)
    stage.forward(1, None, *Source().get(1), version=0)
    assert 0 < stage.saved.now <= bytes_of_one()  # of the second alone
    with pytest.raises(RuntimeFailure, match="activations that are on the host: its program lacks a PREFETCH"):
        stage.backward(0, None)


def test_a_weight_must_not_change_before_its_backward() -> None:
    stage = offloaded()
    stage.forward(0, None, *Source().get(0), version=0)
    with torch.no_grad():
        for parameter in stage.modules[0].parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeFailure, match="a weight has been modified"):
        stage.backward(0, None)
