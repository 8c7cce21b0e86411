"""A traced run, priced again with its own mean times, takes as long as it took."""

from __future__ import annotations

import pytest

from megalite.parallel.pipeline.trace import mean_costs
from megalite.schedule import Costs, build_program, simulate
from megalite.schedule.simulate import Timeline


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v"])
def test_a_trace_gives_its_own_makespan(schedule: str) -> None:
    program = build_program(schedule, 4, 8, 2 if schedule in ("interleaved", "breadth-first") else None)
    kinds = {"F": 1.0, "I": 1.3, "W": 0.8, "B": 2.1}
    uneven = {
        (stage, kind): cost * (1 + 0.3 * (stage % 3))
        for stage in range(program.num_stages)
        for kind, cost in kinds.items()
    }
    ran = simulate(program, Costs(exact=uneven))
    # seconds of some clock, as the executor's notes give them
    measured = Timeline.measured([(s.rank, s.action, 7.0 + float(s.start), 7.0 + float(s.end)) for s in ran.spans])
    again = simulate(program, mean_costs(measured))
    assert float(again.makespan) == pytest.approx(float(measured.makespan), rel=1e-9)
    order = [
        [str(s.action) for s in timeline.spans if s.rank == rank] for timeline in (measured, again) for rank in range(4)
    ]
    assert order[:4] == order[4:]
