"""A rank is slow beside the ranks that do the same work; stages that differ are said once, as that."""

from __future__ import annotations

import random
from io import StringIO
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import pytest

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.observe.hooks import Hook, Hooks, TrainerView
from megalite.observe.loggers import ConsoleHook, evened
from megalite.observe.slow_ranks import SlowRankHook, by_stage, slowest, slowest_rank, way_out
from megalite.observe.stats import IntervalStats, Record
from megalite.schedule import expand_layout
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
    assert (slowest(by_stage(flat, stages)) or (None,))[0] == stage


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


def said_of(**record: Any) -> str:
    """The console's line about uneven stages."""
    stream, trainer = StringIO(), FakeTrainer(tiny_config())
    interval = IntervalStats(trainer.config, world_size=2, device=trainer.device)
    interval.add(trainer.step())
    uneven = {"slowest_stage": 0, "slowest_stage_ratio": 4.1, "slowest_stage_hosts": "vm"}
    ConsoleHook(stream).on_log(trainer, interval.record() | uneven | record)
    return next(line for line in stream.getvalue().splitlines() if "uneven stages" in line)


def test_the_line_names_a_division_only_where_the_times_allow_one() -> None:
    assert said_of(slowest_stage_layout="Et|tL").endswith("--pipeline-model-parallel-layout 'Et|tL'")
    assert said_of(slowest_stage_layout=None).endswith("; these times show no division of the layers that is faster")
    loaded = said_of(slowest_stage_core=0.31)
    assert "it had 31% of a core meanwhile" in loaded and "layout" not in loaded
    assert "if no other program runs there, give it fewer layers by --pipeline" in said_of()
    of_module = evened({}, foreign=True)
    assert "layers of --model-module" in of_module and "--pipeline-model-parallel-layout" not in of_module


def test_obeying_never_leads_back() -> None:
    """Layers of known times are dealt as the line says until it names no further division: the slowest stage has become
    faster with each, and none is left."""
    generator = random.Random(36)
    for _ in range(200):
        stages, layers = generator.randint(2, 5), generator.randint(2, 12)
        true = [generator.uniform(0, 3), *[generator.uniform(0.5, 1.5)] * layers, generator.uniform(0, 6)]
        edges = [0, *sorted(generator.sample(range(1, layers + 2), min(stages, layers + 2) - 1)), layers + 2]
        cuts = [range(*pair) for pair in pairwise(edges)]
        slowest = inf
        for _ in range(layers + 3):
            seconds = [sum(true[item] for item in cut) for cut in cuts]
            assert max(seconds) < slowest, (true, cuts)
            slowest = max(seconds)
            layout = way_out(cuts, seconds, [1.0] * layers, core=1.0)["slowest_stage_layout"]
            if layout is None:
                break
            sizes = [len(stage) for stage in expand_layout(layout).split("|")]
            cuts = [range(*pair) for pair in pairwise([0, *accumulate(sizes)])]
        else:
            raise AssertionError("it goes round")
    two = [range(3), range(3, 4)]
    assert way_out(two, [4.1, 1.0], [1.0] * 2, core=1.0) == {"slowest_stage_layout": "Et|tL"}
    assert way_out(two, [4.1, 1.0], [1.0] * 2, core=0.5) == {"slowest_stage_core": 0.5}
