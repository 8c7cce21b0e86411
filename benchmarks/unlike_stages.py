"""What stages that differ are worth, and how well the plan knows it: blocks that wait, on ranks of two speeds.

    python benchmarks/unlike_stages.py                    # PipeDream's case, a mixed cluster, ten plans in order
    python benchmarks/unlike_stages.py --unit-ms 40
    python benchmarks/unlike_stages.py --cases uniform --rounds 100      # are stages that are alike as fast as ever?

three       PipeDream's case: two blocks that cannot be split, costs 2 : 1, the second with a gradient that is dear to
            reduce; three ranks
two         the same blocks on two ranks
mixed       blocks 2, 3, 1 on four ranks, the first two at half speed
order       ten plans of blocks 1, 2, 1, 3 on four ranks
uniform     a pipeline of two ranks that computes: by its sizes, and by --stage-meshes 1x1,1x1

Everything but the waits is as in a run: programs, messages, updates. A block waits --unit-ms times its cost forward and
twice that backward; a gradient that is dear waits in its reduction, as a ring over a slow link would. `plan` waits for
as long as the simulator says that the case's best layout takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant
from benchmarks.waiting import wait_beside
from megalite.config import StageMesh
from megalite.planner import StageCost, plan_stages

if TYPE_CHECKING:
    from megalite.schedule import Action

MICROBATCHES = 12


class Blocks(NamedTuple):
    """costs: of the blocks. dear: of the reduction of the last one's gradient, a transfer. slow: ranks at half speed,
    the first ones."""

    costs: tuple[float, ...]
    ranks: int
    dear: float = 0.0
    slow: int = 0

    def cost(self, begin: int, end: int, first: int, replicas: int) -> tuple[float, float]:
        """Of a stage: (forward of a micro-batch, reduction)."""
        forward = sum(self.costs[begin:end]) * (2.0 if first < self.slow else 1.0)
        return forward, self.dear * 2 * (replicas - 1) / replicas * (end == len(self.costs))

    def seconds(self, layout: str) -> float:
        """What a batch takes in units, by the simulator."""
        from megalite.config import ParallelConfig
        from megalite.schedule import BACKWARD, FORWARD, Costs, build_program, simulate

        exact: dict[tuple[int, str], float] = {}
        after, workers = 0.0, list[int]()
        for number, (begin, end, first, replicas) in enumerate(stages_of(layout)):
            forward, reduce = self.cost(begin, end, first, replicas)
            exact[number, FORWARD], exact[number, BACKWARD] = forward, 2 * forward
            after, workers = max(after, reduce), [*workers, replicas]
        alike = len(set(workers)) == 1
        m = MICROBATCHES // workers[0] if alike else MICROBATCHES
        program = build_program(ParallelConfig().schedule, len(workers), m, workers=() if alike else tuple(workers))
        return float(simulate(program, Costs(exact=exact)).makespan) + after

    def best(self) -> str:
        """The dynamic programme's choice."""

        def cost(begin: int, end: int, mesh: StageMesh, left: int) -> StageCost | None:
            first = self.ranks - left
            if first < self.slow < first + mesh.size:
                return None
            forward, reduce = self.cost(begin, end, first, mesh.dp)
            return StageCost(3 * forward, 3 * forward / mesh.dp + reduce / MICROBATCHES)

        meshes = [StageMesh(1, dp) for dp in range(1, self.ranks + 1) if MICROBATCHES % dp == 0]
        found = plan_stages(len(self.costs), self.ranks, meshes, cost, MICROBATCHES)
        assert found is not None
        cuts = "|".join("t" * (stage.end - stage.begin) for stage in found.stages)
        return f"{'+'.join(str(stage.mesh.dp) for stage in found.stages)}:{cuts}"


def stages_of(layout: str) -> list[tuple[int, int, int, int]]:
    """`2+1:t|t` (replicas of each stage: blocks of each) -> (first block, last and one, first rank, replicas)."""
    replicas, cuts = layout.split(":")
    found, block, rank = [], 0, 0
    for count, part in zip(map(int, replicas.split("+")), cuts.split("|"), strict=True):
        found.append((block, block + len(part), rank, count))
        block, rank = block + len(part), rank + count
    return found


SETTINGS = {
    "three": Blocks((2, 1), 3, dear=20.0),
    "two": Blocks((2, 1), 2, dear=20.0),
    "mixed": Blocks((2, 3, 1), 4, slow=2),
    "order": Blocks((1, 2, 1, 3), 4),
}
LAYOUTS = {
    "three": ("2+1:t|t", "3:tt", "1+2:t|t"),
    "two": ("1+1:t|t", "2:tt"),
    "mixed": ("2+2:t|tt", "4:ttt", "2+2:tt|t", "2+1+1:t|t|t", "1+1+2:t|t|t"),
    "order": (
        *("4:tttt", "1+1+1+1:t|t|t|t", "2+2:ttt|t", "2+2:tt|tt", "1+3:t|ttt", "3+1:ttt|t", "1+3:ttt|t"),
        *("1+1+2:tt|t|t", "2+1+1:t|tt|t", "1+2+1:t|tt|t"),
    ),
}
OURS = {name: tuple(f"megalite-{layout}" for layout in layouts) for name, layouts in LAYOUTS.items()}
FLAGS = {
    "unit_ms": Flag("forward of a block of cost 1", 30, 30),
    "cases": Flag("which", [*SETTINGS], ["three"], (*SETTINGS, "uniform")),
}
UNIFORM = ("megalite-plain", "megalite-meshes")


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for name in args.cases:
        if name == "uniform":
            found.append(Case(name, UNIFORM, (UNIFORM[::-1],), {"uniform": True}, base=UNIFORM[0], ranks=2))
            continue
        blocks, unit = SETTINGS[name], args.unit_ms / 1000
        best = blocks.best() if name != "order" else LAYOUTS[name][0]
        predicted = {f"megalite-{layout}": unit * blocks.seconds(layout) for layout in LAYOUTS[name]}
        settings = {"blocks": name, "unit": unit, "predicted": predicted, "planned": unit * blocks.seconds(best)}
        ours = f"megalite-{best}"
        pairs = tuple((ours, other) for other in ("plan", *OURS[name]) if other != ours)
        found.append(Case(name, ("plan", *OURS[name]), pairs, settings, base="plan", ranks=blocks.ranks))
    return found


def build(name: str, case: Case, place: Place) -> Variant:
    if name == "plan":
        return Variant(partial(time.sleep, case.settings["planned"]))
    from benchmarks.megalite_step import Layout, TrainingStep, Update, tiny_model
    from benchmarks.plain_gpt import batch
    from megalite.schedule import REDUCE

    if name in UNIFORM:
        return uniform(name, place)
    blocks, unit, given = SETTINGS[case.settings["blocks"]], case.settings["unit"], name.removeprefix("megalite-")
    stages, cut = stages_of(given), given.partition(":")[2]
    alike = len({replicas for *_, replicas in stages}) == 1
    m = MICROBATCHES // stages[0][3] if alike else MICROBATCHES
    model = tiny_model(len(blocks.costs))
    tokens, labels = batch(model, m, place.device)
    layout = Layout(
        pp=len(stages),
        num_microbatches=m,
        stages=() if alike else tuple((1, replicas) for *_, replicas in stages),
        cut=f"E{cut}L" if len(stages) > 1 else None,
    )
    step = TrainingStep(model, layout, Update(), place, tokens, labels)
    begin, end, first, replicas = next(s for s in reversed(stages) if s[2] <= place.rank)
    forward, reduce = blocks.cost(begin, end, first, replicas)
    for stage in step.executor.stages.values():
        for module in stage.modules:
            wait_beside(module, unit * forward)
    execute = step.updater.execute

    def waits(action: Action) -> None:
        if action.kind == REDUCE:
            time.sleep(unit * reduce)
        execute(action)

    step.updater.execute = waits  # type: ignore[method-assign]  # what is timed is the rest
    return step.variant()


def uniform(name: str, place: Place) -> Variant:
    """A batch of two stages that are alike, in one of its two spellings; everything is a run's."""
    from benchmarks.megalite_step import Layout, TrainingStep, Update
    from benchmarks.plain_gpt import batch
    from megalite.config import ModelConfig

    model = ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128, vocab_size=256)
    stages = ((1, 1), (1, 1)) if name == UNIFORM[1] else ()
    layout = Layout(pp=2, num_microbatches=MICROBATCHES, stages=stages)
    return TrainingStep(model, layout, Update(), place, *batch(model, MICROBATCHES, place.device)).variant()


NAMES = ("plan", *UNIFORM, *(name for each in OURS.values() for name in each))
BENCHMARK = Benchmark("unlike_stages", __doc__, FLAGS, cases, build, NAMES)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
