"""A rank is slow beside the ranks that do the same work; stages that differ are said once, as that."""

from __future__ import annotations

import pytest

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.observe.hooks import Hook, Hooks, TrainerView
from megalite.observe.slow_ranks import SlowRankHook, slowest_rank, slowest_stage
from megalite.observe.stats import Record
from megalite.testing import run_ranks
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config

# Seconds of work by stage, each a list by rank; the slow rank; the slow stage.
CASES: dict[str, tuple[list[list[float]], int | None, int | None]] = {
    "even": ([[1.0, 1.0], [1.0, 1.0]], None, None),
    "large head": ([[0.1, 0.1], [0.6, 0.6]], None, 1),
    "large head, one rank a stage": ([[0.1], [0.608]], None, 1),
    "large embedding": ([[0.9, 0.9], [0.3, 0.3], [0.3, 0.3]], None, 0),
    "one stage with fewer layers": ([[1.0], [1.0], [1.0], [0.2]], None, None),
    "slow rank of the fast stage": ([[0.1, 0.4], [0.6, 0.6]], 1, 1),
    "slow rank of the slow stage": ([[0.1, 0.1], [0.6, 1.2]], 3, 1),
    "slow rank of even stages": ([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]], 4, None),
    "slow rank of two": ([[1.0, 2.0]], 1, None),
    "slow rank of a run without pipeline": ([[1.0, 1.0, 1.4, 1.0]], 2, None),
    "at the bound": ([[1.0, 1.3]], None, None),
    "less than ten milliseconds": ([[0.001, 0.008]], None, None),
    "less than ten milliseconds, stages": ([[0.001], [0.008]], None, None),
    "two slow ranks, the slower is named": ([[1.0, 2.0, 1.0], [1.0, 3.0, 1.0]], 4, None),
    "two slow ranks of four, the first is named": ([[1.0, 1.0, 2.0, 2.0]], 2, None),
    "everyone else idle": ([[0.0, 0.0, 1.0]], 2, None),
    "a stage with one idle rank": ([[0.0, 1.0], [1.0, 1.0]], 1, 1),
    "single rank": ([[1.0]], None, None),
    "four stages, the last heavy": ([[1.0], [1.0], [1.0], [1.5]], None, 3),
    "jitter": ([[1.0, 1.1, 0.9], [1.05, 1.2, 1.0]], None, None),
}


@pytest.mark.parametrize(("work", "rank", "stage"), CASES.values(), ids=CASES)
def test_who_stands_out(work: list[list[float]], rank: int | None, stage: int | None) -> None:
    flat = [seconds for seconds_of_stage in work for seconds in seconds_of_stage]
    stages = [number for number, seconds_of_stage in enumerate(work) for _ in seconds_of_stage]
    assert (slowest_rank(flat, stages) or (None,))[0] == rank
    assert (slowest_stage(flat, stages) or (None,))[0] == stage


class _Keep(Hook):
    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        self.records.append(dict(record))


def body_watched(world: World, pp: int, work: list[list[float]], cores: int = 64) -> list[Record]:
    """All iterations take a second, of which `work[interval][rank]` is work."""
    mesh = ParallelMesh.build(pp=pp, rank=world.rank, size=world.size)
    _ = mesh.world
    mesh.complete()  # as a run does: no communicator is made afterwards
    trainer, keep = FakeTrainer(tiny_config(log_interval=10), mesh=mesh), _Keep()
    hooks = Hooks([SlowRankHook(cores), keep])
    hooks.on_start(trainer)
    for seconds in work:
        for _ in range(10):
            hooks.after_step(trainer, trainer.step(iteration_time_s=1.0, wait_time_s=1.0 - seconds[world.rank]))
    return keep.records


def test_a_slow_rank_is_named_from_the_second_interval_on() -> None:
    for records in run_ranks(body_watched, 3, 1, [[0.33, 0.99, 0.33]] * 2):
        assert [record.get("slowest_rank") for record in records] == [None, 1]
        assert records[1]["slowest_rank_ratio"] == pytest.approx(3.0)
        assert all("slowest_stage" not in record for record in records)


def test_ranks_that_share_cores_are_not_called_slow() -> None:
    for records in run_ranks(body_watched, 3, 1, [[0.33, 0.99, 0.33]] * 2, 2):
        assert all("slowest_rank" not in record for record in records)


def test_uneven_stages_are_said_once_and_again_when_they_get_worse() -> None:
    healthy, worse = [0.1, 0.1, 0.4, 0.4], [0.1, 0.1, 0.9, 0.9]
    for records in run_ranks(body_watched, 4, 2, [healthy] * 4 + [worse] * 2):
        assert all("slowest_rank" not in record for record in records)
        assert [record.get("slowest_stage") for record in records] == [None, 1, None, None, 1, None]
        assert [records[at]["slowest_stage_ratio"] for at in (1, 4)] == pytest.approx([4.0, 9.0])
