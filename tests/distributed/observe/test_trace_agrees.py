"""The simulator against real ranks: stages of known, uneven durations run in the simulated order and take as long.

The durations are slept, so that ranks that share a core do not disturb each other. A stall of the machine can only
lengthen a run: one agreement is enough, and each further attempt sleeps longer, so that stalls weigh less.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from equivalence.layouts import TINY

from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.parallel.pipeline.stage import Stage
from megalite.schedule import Costs, build_program, simulate
from megalite.testing import run_ranks
from megalite.train.run import open_run

P, M, ATTEMPTS = 2, 4, 5
SECONDS = {
    "forward": ("F", 0.020),
    "backward": ("B", 0.042),
    "backward_input": ("I", 0.026),
    "backward_weight": ("W", 0.016),
}
SAMPLED = ("1f1b", "zb-v", "chimera", "2bw")
OTHERS = ("gpipe", "eager-1f1b", "pipedream", "interleaved", "breadth-first", "zb-h1", "zb-h2", "dualpipe-v")


def uneven(stage: int) -> float:
    return 1 + 0.5 * (stage % 3)


class Slow:
    """A stage whose actions take the given seconds. (An I is made of a B: only the outermost call sleeps.)"""

    def __init__(self, stage: Stage, factor: float) -> None:
        self.inside = False
        for name, (_, seconds) in SECONDS.items():
            setattr(stage, name, self.slowed(getattr(stage, name), seconds * factor))

    def slowed(self, work: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        @functools.wraps(work)
        def slow(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return work(*args, **kwargs)
            self.inside, end = True, time.perf_counter() + seconds
            result = work(*args, **kwargs)
            time.sleep(max(0.0, end - time.perf_counter()))
            self.inside = False
            return result

        return slow


def body_traced(world: World, argv: list[str], iterations: int, slower: int) -> None:
    with open_run(parse(argv, world_size=world.size), world) as run:
        for (number, _), stage in run.trainer.executor.stages.items():
            Slow(stage, slower * uneven(number))
        for iteration in range(iterations):
            run.trainer.train_step(drain=iteration == iterations - 1)


@dataclass(frozen=True)
class Trace:
    """One of the two timelines of a file: rank -> computations in order, and milliseconds from first to last."""

    order: dict[int, list[str]]
    makespan: float


def read(path: Path, process: int) -> Trace:
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["pid"] == process and e["ph"] == "X"]
    events = sorted((e for e in events if e["cat"] != "STEP"), key=lambda e: float(e["ts"]))
    order: dict[int, list[str]] = {}
    for event in events:
        order.setdefault(event["tid"], []).extend(event["name"].split(" + "))
    begin = min(event["ts"] for event in events)
    return Trace(order, (max(event["ts"] + event["dur"] for event in events) - begin) / 1e3)


@pytest.mark.parametrize("schedule", [*SAMPLED, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_a_traced_run_takes_what_was_simulated(schedule: str, tmp_path: Path) -> None:
    iterations = 3 if schedule == "2bw" else 1
    path = tmp_path / "trace.json"
    flags = ["--num-layers", "4", "--pipeline-model-parallel-size", str(P), "--pipeline-schedule", schedule]
    flags += ["--micro-batch-size", "1", "--global-batch-size", str(M), "--trace-pipeline", str(path)]
    if schedule in ("interleaved", "breadth-first"):
        flags += ["--virtual-pipeline-model-parallel-size", "2"]
    if schedule == "pipedream":
        flags += ["--clip-grad", "0", "--untie-embeddings-and-output-weights"]
    argv = [*TINY, *flags]
    argv[argv.index("--train-iters") + 1] = str(iterations)
    errors = []
    for slower in range(1, ATTEMPTS + 1):
        run_ranks(body_traced, P, argv, iterations, slower)
        plan, run = read(path, 0), read(path, 1)
        assert run.order == plan.order
        errors.append(
            (run.makespan / plan.makespan - 1, run.makespan / (slower * known_makespan(schedule, iterations)) - 1)
        )
        if abs(errors[-1][0]) < 0.05 and abs(errors[-1][1]) < 0.15:  # the work itself is not in what was slept
            return
    pytest.fail(f"measured against its own mean times, and against what was slept: {errors}")


def known_makespan(schedule: str, iterations: int) -> float:
    """Milliseconds, from what each action sleeps."""
    program = build_program(schedule, P, M, 2 if schedule in ("interleaved", "breadth-first") else None)
    costs = {
        (stage, kind): 1e3 * seconds * uneven(stage)
        for stage in range(program.num_stages)
        for kind, seconds in SECONDS.values()
    }
    return float(simulate(program, Costs(exact=costs), batches=iterations).makespan)
