"""`--trace-pipeline FILE`, `Pipeline.trace`: the timeline of the last iterations, in the forms of planned timelines.

    .html   plan and measurement, one above the other      .json   both as a Chrome trace (ui.perfetto.dev)
    .svg    the measurement                                 .txt    the measurement as a text grid

Each rank notes begin and end of its actions on its own clock; the clocks are set to zero at a barrier.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.comm import ParallelMesh, all_gather_json, barrier
from megalite.parallel.pipeline.executor import Executor
from megalite.schedule import (
    BatchRange,
    Costs,
    Program,
    Timeline,
    parse_action,
    render_html,
    render_svg,
    render_text,
    render_trace,
    simulate,
)

logger = logging.getLogger(__name__)

# An asynchronous schedule shows its steady state only where it has not just begun and does not end; and its forwards
# run ahead of the step of the iteration, so that the first iteration shows hardly any of its own batch.
ASYNCHRONOUS_ITERATIONS = 4


class PipelineTracer:
    """Switches the executor's notes on for the last iterations and writes them. Collective over the pipeline.

    division: which rank holds which layers, in words.
    """

    def __init__(self, path: str, executor: Executor, mesh: ParallelMesh, train_iters: int, division: str = "") -> None:
        self._path = Path(path)
        self._executor = executor
        self._pipeline = mesh["pp"]
        self._prints = mesh.rank == 0
        self._train_iters, self._division = train_iters, division
        self._zero = 0.0
        self._batches: list[BatchRange] = []

    def before(self, iteration: int, program: Program, batch: BatchRange) -> None:
        """Iteration number `iteration` is about to run `batch`."""
        shown = ASYNCHRONOUS_ITERATIONS if program.asynchronous else 1
        if iteration <= self._train_iters - shown:
            return
        if self._executor.trace is None:
            barrier(self._pipeline)
            self._zero = time.perf_counter()
            self._executor.trace = []
        self._batches.append(batch)

    def after(self, iteration: int, program: Program) -> None:
        """Writes the file after the last iteration."""
        if iteration < self._train_iters or self._executor.trace is None:
            return
        rows = [(str(s.action), s.start - self._zero, s.end - self._zero) for s in self._executor.trace]
        self._executor.trace = None
        everybody = all_gather_json(rows, self._pipeline)
        if not self._prints:
            return
        spans = [
            (rank, action, start, end)
            for rank, own in enumerate(everybody)
            for text, start, end in own
            if (action := parse_action(text)).is_compute or action.kind == "STEP"
        ]
        starts = [batch.start for batch in self._batches]
        measured = Timeline.measured(spans, title=f"{program.name}, measured", batch_starts=starts)
        measured = replace(measured, division=self._division)
        text = _render(self._path.suffix, measured, self._plan(program, measured))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("`trace_pipeline`=%s: could not be written: %s", self._path, error.strerror)
        else:
            logger.info("pipeline timeline: %s", self._path)

    def _plan(self, program: Program, measured: Timeline) -> Timeline:
        """The same batches simulated with the mean times that were measured, stage by stage and kind by kind."""
        # On paper the pipeline is empty before the first of them: of one that runs ahead of its steps, those batches
        # whose forwards have been seen.
        begun = {part.microbatch for span in measured.spans for part in span.action.computations() if part.kind == "F"}
        first, *others = [batch for batch in self._batches if batch.start in begun] or self._batches
        plan = simulate(program, mean_costs(measured), batches=[first._replace(first=True), *others])
        title = f"{program.name}, planned from the measured times"
        return replace(plan, title=title, unit=measured.unit, division=self._division)


def mean_costs(measured: Timeline) -> Costs:
    """(stage, kind) -> mean duration in ms."""
    sums: dict[tuple[int, str], list[float]] = {}
    for span in measured.spans:
        if not span.action.parts:
            sums.setdefault((span.action.stage, span.action.kind), []).append(float(span.end - span.start))
    return Costs(exact={key: sum(values) / len(values) for key, values in sums.items()})


LEGEND = (
    "F forward, R the same again, B backward, I and W its halves, X a pair of both; small letters: every second "
    "micro-batch; . waits. To scale; plan, times and shares of idling: end the name in .html"
)


def _render(suffix: str, measured: Timeline, plan: Timeline) -> str:
    timelines: Sequence[Timeline] = [plan, measured]
    if suffix == ".html":
        return render_html(timelines, heading=measured.title)
    if suffix == ".json":
        return render_trace(timelines)
    if suffix == ".svg":
        return render_svg(measured)
    return "\n".join(filter(None, (LEGEND, measured.division, render_text(measured)))) + "\n"
