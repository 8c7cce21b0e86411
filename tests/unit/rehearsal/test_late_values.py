"""With streams that are late a planted race ends with other values; with the order that it lacks, with the same."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from unit.rehearsal import test_planted_races as planted
from unit.rehearsal.test_planted_races import Scene

from megalite.comm import Axis, World
from megalite.rehearsal import watched_gpu
from megalite.rehearsal.late import COMPUTE, OTHERS
from megalite.testing import run_ranks


def outcome(scene: Scene, right: bool, late: str | None, *more: Any) -> tuple[Any, list[str]]:
    """The values it ends with, and what went wrong without any."""
    with watched_gpu(late=late) as gpu:
        found = scene(right, *more)
        gc.collect()
        torch.cuda.synchronize()
        with gpu.state(quiet=True, true_device=True):
            values = found.detach().clone().tolist() if isinstance(found, Tensor) else found
    return str(values), getattr(gpu.kernels, "wrong", [])


@pytest.mark.parametrize("right", [True, False], ids=["right", "planted"])
@pytest.mark.parametrize("scene", planted.SCENES, ids=lambda scene: scene.__name__)
def test_values_agree_with_the_checker(scene: Scene, right: bool) -> None:
    expected = outcome(scene, True, None)
    assert all(outcome(scene, right, late) == expected for late in (COMPUTE, OTHERS)) is right


def witness(world: World) -> list[bool]:
    """Whether the values are those of a device on which nothing is late, of each scene, right and planted."""
    axis = Axis("dp", 2, world.rank, (0, 1), dist.group.WORLD)
    found = []
    for scene in planted.MESSAGES:
        expected = outcome(scene, True, None, axis)
        found += [
            all(outcome(scene, right, late, axis) == expected for late in (COMPUTE, OTHERS)) for right in (True, False)
        ]
    return found


def test_values_of_messages_agree_with_the_checker() -> None:
    for found in run_ranks(witness, 2):
        assert [(scene.__name__, found[2 * i : 2 * i + 2]) for i, scene in enumerate(planted.MESSAGES)] == [
            (scene.__name__, [True, False]) for scene in planted.MESSAGES
        ]
