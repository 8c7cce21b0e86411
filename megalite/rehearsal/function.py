"""A function of the library's users on ranks that are not there: `megalite.rehearse`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

from megalite.comm import World
from megalite.rehearsal.memory import of_log
from megalite.rehearsal.pieces import Piece
from megalite.rehearsal.rank import and_the_first, record_rank
from megalite.rehearsal.record import Communicators
from megalite.rehearsal.report import Report, judged, recorded
from megalite.rehearsal.streams import Gpu

TEXT = 1 << 14
"""Bytes of a text that travel in one collective: what one rank says may be a digit longer than what another does."""


def rehearse(function: Callable[[World], object], nprocs: int, *, ranks: Sequence[int] | None = None) -> Report:
    """Rehearses `function(world)`, which `megalite.run` would start on `nprocs` GPUs, one rank after the other.

    ranks: these and rank 0 only; None: all. A few are enough where they are one of each kind: the ends of every axis.

    Numbers that `function` reads from the device are 1 (a loss, a norm): its loops must end by their count. Returns
    what was found: `print` it, or read `faults`. Raises ConfigError where no rank would start.
    """

    def trains(gpu: Gpu, world: World) -> Sequence[Piece]:
        steps = count(1)

        @contextmanager
        def watched(executor: object, *_: object) -> Iterator[None]:
            gpu.calls.enter(f"iteration {next(steps)}")
            vars(executor)["mark"] = gpu.calls.mark
            yield

        with (
            patch("megalite.comm.gathered_json._HEAD_BYTES", TEXT),
            patch("megalite.library.pipeline.watched", watched),
        ):
            function(world)
        gpu.calls.enter("the end")
        return ()

    known, chosen = Communicators(), and_the_first(range(nprocs) if ranks is None else ranks, nprocs)
    records = recorded(chosen, lambda rank: record_rank(trains, rank, nprocs, known))
    return judged(records, nprocs, lambda: [of_log(record, record.log, None) for record in records.values()])
