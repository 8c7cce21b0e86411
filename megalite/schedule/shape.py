"""What a schedule generator is asked for, and the value that a schedule module exports to the table in
`registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megalite.schedule.program import Program


class Shape(NamedTuple):
    """p ranks, m micro-batches per batch, v chunks per rank, f pairs of pipelines (Chimera only). The papers'
    letters.
    """

    p: int
    m: int
    v: int = 1
    f: int = 1


@dataclass(frozen=True)
class Schedule:
    """One schedule of the table.

    name, aliases: what `--pipeline-schedule` takes. title, paper: for people. build: Shape -> Program.
    problems: Shape -> reasons why this shape is illegal (empty: legal). warnings: legal, but not wise.
    num_chunks: the only v it has (1, or 2 for V shapes), None if v is the user's choice (2 or more, or `min_chunks`).
    splits_backward: uses I and W.
    """

    name: str
    title: str
    paper: str
    build: Callable[[Shape], Program]
    problems: Callable[[Shape], list[str]] = lambda shape: []
    warnings: Callable[[Shape], list[str]] = lambda shape: []
    aliases: tuple[str, ...] = ()
    num_chunks: int | None = 1
    min_chunks: int = 1
    splits_backward: bool = False
    asynchronous: bool = False
