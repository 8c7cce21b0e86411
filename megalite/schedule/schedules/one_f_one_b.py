"""1F1B, also called PipeDream-Flush and DAPPLE (Narayanan et al. 2021, arXiv:2006.09503; Fan et al. 2021,
arXiv:2007.01045).

    p=3, m=4
    rank 0  F0 F1 F2 .. .. .. .. B0-B0 F3 B1-B1 .. B2-B2 .. B3-B3
    rank 1  .. F0 F1 .. .. B0-B0 F2 B1-B1 F3 B2-B2 .. B3-B3 .. ..
    rank 2  .. .. F0 B0-B0 F1 B1-B1 F2 B2-B2 F3 B3-B3 .. .. .. ..

The bubble of GPipe, (p-1)(tF+tB) per rank, but rank r holds only min(m, p-r) micro-batches: a backward runs as soon as
it can.
"""

from collections.abc import Iterator

from megalite.schedule.action import Action, backward, backward_input, backward_weight, forward
from megalite.schedule.definition import flush_schedule
from megalite.schedule.program import PeakActivations


def one_f_one_b(stage: int, m: int, warmup: int, delay: int | None = None) -> Iterator[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that remain. delay: backwards
    are split, and each weight gradient comes so many micro-batches after its input gradient."""
    warmup = min(warmup, m)
    yield from (forward(stage, k) for k in range(warmup))
    for k in range(m):
        if warmup + k < m:
            yield forward(stage, warmup + k)
        yield backward(stage, k) if delay is None else backward_input(stage, k)
        if delay is not None and k >= delay:
            yield backward_weight(stage, k - delay)
    if delay is not None:
        yield from (backward_weight(stage, k) for k in range(max(m - delay, 0), m))


SCHEDULE = flush_schedule(
    "1f1b",
    "1F1B: one forward, one backward in turn, a flush per batch",
    "Narayanan et al. 2021, arXiv:2006.09503",
    lambda shape: shape.placement,
    lambda rank, shape: one_f_one_b(shape.stage_of(rank), shape.m, warmup=shape.ahead(rank)),
    lambda rank, shape: PeakActivations(min(shape.m, shape.ahead(rank) + 1)),
    aliases=("pipedream-flush", "dapple"),
    takes_turns=True,
)
