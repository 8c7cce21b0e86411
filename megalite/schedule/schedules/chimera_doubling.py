"""Chimera for more micro-batches than ranks, with slots of equal length: forward doubling, and backward halving (Li and
Hoefler 2021, arXiv:2107.06925, section 3.5).

    p=4, m=8, one pair (f=1), tB = 2 tF; micro-batches 0 to 3 run down, 4 to 7 (small letters) run up
    rank 0  F0 F1 F2 F3 f4 f5 b4-b4 f6 f7 b5-b5 .. B0-B0 b6-b6 B1-B1 b7-b7 B2-B2 .. .. B3-B3
    rank 1  .. F0 F1 f4 f5 F2 F3 f6 f7 b4-b4 B0-B0 b5-b5 B1-B1 b6-b6 B2-B2 b7-b7 B3-B3 .. ..
    rank 2  .. f4 f5 F0 F1 f6 f7 F2 F3 B0-B0 b4-b4 B1-B1 b5-b5 B2-B2 b6-b6 B3-B3 b7-b7 .. ..
    rank 3  f4 f5 f6 f7 F0 F1 B0-B0 F2 F3 B1-B1 .. b4-b4 B2-B2 b5-b5 B3-B3 b6-b6 .. .. b7-b7

A backward takes as long as two forwards, so the slots of `chimera.py` leave gaps between its units. Here a slot is the
forwards of two micro-batches, or one backward. A pipeline runs w = p/(2f) pairs ahead, then two backwards for each new
pair. Its q-th slot of work begins, on stage s, at slot s (forwards) or p-1-s (backwards) after

    (q div w) p + 2 (q mod w)

so that the 2f pipelines never meet on a rank. The two forwards run one after the other, each as in any other schedule.
Which of the paper's two remedies it is depends on the size of the micro-batches alone (docs/schedules.md).

Idle (p-2f)/(2f) * (tF+tB) with tB = 2 tF, once for all units, three quarters of the paper's, where the forwards of a
slot are one kernel; 2f copies of the weights; up to 2p micro-batches held.
"""

from collections.abc import Iterator

from megalite.schedule.action import Action, backward, forward
from megalite.schedule.definition import ScheduleShape, flush_schedule
from megalite.schedule.memory import peak_activations
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules import chimera
from megalite.schedule.stage_placement import bidirectional


def slots_of_work(pairs: int, ahead: int) -> Iterator[tuple[bool, int]]:
    """Of one pipeline, in order: (True, a pair of micro-batches that it begins) or (False, one whose backward it
    runs)."""
    yield from ((True, pair) for pair in range(ahead))
    for pair in range(pairs):
        yield from ((False, 2 * pair), (False, 2 * pair + 1))
        if pair + ahead < pairs:
            yield True, pair + ahead


def rank_order(rank: int, shape: ScheduleShape) -> list[Action]:
    """One batch of `rank`: of every 2p micro-batches, the first p/f go to replica 0, the next to replica 1, ..."""
    p, m, _, f = shape[:4]
    ahead = p // (2 * f)
    slots: list[tuple[int, Action]] = []
    for stage, replica in bidirectional(p, f).stages_of(rank):

        def number(own: int, replica: int = replica) -> int:
            """Of the replica's `own`-th micro-batch, among all."""
            unit, turn = divmod(own, 2 * ahead)
            return 2 * p * unit + 2 * ahead * replica + turn

        for place, (begins, item) in enumerate(slots_of_work(m // (4 * f), ahead)):
            slot = place // ahead * p + 2 * (place % ahead)
            if begins:
                for own in (2 * item, 2 * item + 1):
                    slots.append((slot + stage, forward(stage, number(own), replica=replica)))
            else:
                slots.append((slot + p - 1 - stage, backward(stage, number(item), replica=replica)))
    return [action for _, action in sorted(slots)]


def peak(rank: int, shape: ScheduleShape) -> PeakActivations:
    """Counted: after two units a rank's list repeats itself."""
    return PeakActivations(int(peak_activations(rank_order(rank, shape._replace(m=min(shape.m, 4 * shape.p))))))


SCHEDULE = flush_schedule(
    "chimera-doubling",
    "Chimera with two forwards for each slot of a backward: forward doubling, backward halving",
    "Li and Hoefler 2021, arXiv:2107.06925",
    lambda shape: bidirectional(shape.p, shape.f),
    rank_order,
    peak,
    lambda shape: chimera.problems(shape, "chimera-doubling", 2),
    aliases=("chimera-halving",),
    paired=True,
    idle=lambda f, i, w, v: (f + i + w) / 2,
    in_flight=lambda shape: 2 * shape.p,
)
