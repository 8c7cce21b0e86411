"""Work that takes longer than a collective waits costs nobody the run; who dies at it, or refuses it, is heard of."""

from __future__ import annotations

import time

import pytest

from megalite.comm.mesh import ParallelMesh
from megalite.comm.patience import patiently
from megalite.comm.world import World
from megalite.errors import DataError
from megalite.faults import fault_point
from megalite.testing import run_ranks, try_ranks


def body(world: World, seconds: float, message: str) -> str | None:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world

    def work() -> str:
        fault_point("test.work")
        time.sleep(seconds)
        if message:
            raise DataError(message)
        return "done"

    return patiently(work if world.rank == 0 else None, axis)


def test_the_others_wait_as_long_as_it_takes() -> None:
    assert run_ranks(body, 3, 2.5, "", peer_timeout=1.0) == ["done", None, None]


def test_a_refusal_reaches_everybody() -> None:
    case = try_ranks(body, 2, 0.0, "--data-path=x: empty")
    texts = [end.error.text for end in case.outcome.ends if end.error is not None]
    assert texts == ["--data-path=x: empty"] * 2
    assert [end.status for end in case.outcome.ends] == [2, 2]


@pytest.mark.parametrize(("action", "named"), [("kill", "rank 0 was killed by SIGKILL"), ("raise", "ValueError: inj")])
def test_who_fails_at_it_is_named(action: str, named: str) -> None:
    case = try_ranks(body, 2, 60.0, "", faults=[f"{action}@test.work"], peer_timeout=20.0)
    assert named in case.describe().splitlines()[0] and case.outcome.seconds < 15
