"""Batches of a few micro-batches in the place of hundreds: what repeats is rehearsed once.

The run gets the smallest batch that its schedule takes. Of a flushed program a rank runs the first two micro-batches of
each stage and the one whose gradient comes last: what is begun cold, what repeats, and what starts the reductions. All
ranks leave out the same micro-batches, so messages still have both ends; that the whole program has no circle is proved
at every start (`schedule.validate`), and how much memory its order needs is composed from what was seen (`memory.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megalite.config import Config, config_problems
from megalite.schedule import GRADIENT_KINDS, NORM, REDUCE, RESHARD, STEP, UNSHARD, Action, BatchRange, Program

EVALUATED = 2
"""Micro-batches of an evaluation."""
FEWEST = 3
WHOLE = 8
"""Micro-batches of a batch that is rehearsed as it is."""
OF_WEIGHTS = frozenset({REDUCE, NORM, STEP, UNSHARD, RESHARD})


def shortest(config: Config, size: int) -> Config:
    """The run with the fewest micro-batches that its schedule takes: two for the ends and one that repeats at least.
    CUDA graphs are captured for all that are in flight, so these are."""
    stages, graphs = config.parallel.pipeline_model_parallel_size, config.parallel.hardware.cuda_graph_impl != "none"
    fewest = max(FEWEST, 2 * stages * graphs)
    unit = config.training.micro_batch_size * config.data_parallel_size(size)
    before = set(config_problems(config, size))
    for count in sorted({fewest, *(n * stages for n in (1, 2, 4) if n * stages > fewest)}):
        short = replace(config, training=replace(config.training, global_batch_size=count * unit))
        if WHOLE < config.num_microbatches(size) > count and before.issuperset(config_problems(short, size)):
            return short
    return config


def shortened(program: Program) -> Program:
    """The program of the micro-batches that stand for all."""
    if program.asynchronous or program.update_per_microbatch:
        return program

    @cache
    def kept(batch: BatchRange) -> frozenset[int]:
        found: set[int] = set()
        for rank in range(program.num_ranks):
            forwards: dict[Any, list[int]] = {}
            last: dict[Any, int] = {}
            for action in program.order(rank, batch):
                for part in action.parts or (action,):
                    if part.kind == "F":
                        forwards.setdefault(part.stage_key, []).append(part.microbatch)
                    if part.kind in GRADIENT_KINDS:
                        last[part.stage_key] = part.microbatch
            found |= {*last.values(), *(n for each in forwards.values() for n in each[:2])}
        return frozenset(found)

    def order(rank: int, batch: BatchRange) -> list[Action]:
        return [*filter(None, (_only(action, kept(batch)) for action in program.order(rank, batch)))]

    return program.with_order(order)


def _only(action: Action, kept: frozenset[int]) -> Action | None:
    if action.parts:
        parts = [part for part in action.parts if part.microbatch in kept]
        return action if len(parts) == len(action.parts) else parts[0] if parts else None
    return action if action.kind in OF_WEIGHTS or action.microbatch in kept else None


@contextmanager
def once_for_all_ranks(kept: dict[Any, Any]) -> Iterator[None]:
    """What every rank works out alike is worked out once: programs, proofs, lines of the grid, JSON of the others.

    kept: between the ranks of one rehearsal.
    """

    def remembered(name: str, real: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            at = (name, key(*args, **kwargs))
            if at not in kept:
                kept[at] = real(*args, **kwargs)
            return kept[at]

        return call

    programs, grid = import_module("megalite.train.programs"), import_module("megalite.comm.mesh").ParallelMesh
    texts, data = import_module("megalite.comm.gathered_json"), import_module("megalite.train.run_data").RunData
    evaluation, loader = data.evaluation, data._loader
    values = SimpleNamespace(dumps=texts.json.dumps, loads=remembered("json", texts.json.loads, lambda text: text))

    def few(*args: Any) -> Any:
        batches, number = evaluation(*args)
        return (microbatches[:EVALUATED] for microbatches in batches), number

    def of_first(*args: Any, **kwargs: Any) -> Any:
        """Every replica reads what the first one does: which rows of a table on the host are read is then the same."""
        made = loader(*args, **kwargs)
        made.dp_rank = 0
        return made

    with ExitStack() as stack:
        for owner, name, value in (
            (programs, "lowered_program", remembered(
                "program", programs.lowered_program, lambda config, n, name, *, plan, waits: (n, name, waits))),
            (programs, "validate", remembered("proof", programs.validate, lambda of, run: (id(of), str(run)))),
            (grid, "_lines", remembered("lines", grid._lines, lambda mesh, view, bases: (view, *bases))),
            (texts, "json", values),
            (data, "evaluation", few),
            (data, "_loader", of_first),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        yield
