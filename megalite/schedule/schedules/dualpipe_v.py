"""DualPipeV: DualPipe folded into a V (DeepSeek-AI 2024, arXiv:2412.19437).

    p=2, m=4: rank r holds stages r and 2p-1-r (small letters: the way back)
    rank 0  F0 F1 F2 f0 i0 w0 f1 F3b1---- .. f2B0---- b2-b2 .. f3B1---- b3-b3 I2 W2 I3 W3
    rank 1  .. F0 f0 F1 f1 F2 b0-b0 f2B0---- F3b1---- f3B1---- b2-b2 B2-B2 .. i3 I3 w3 W3

    [F+b]: forward of one micro-batch and backward of another, issued together, so that the communication inside one
    (the all-to-all of experts) hides behind the computation of the other.

    rank r   1. F x 2(p-r-1)              5. b, [f+B]  x (p-r-1)
             2. F, f x (r+1)              6. b, B      x (r+1), the second half with split weight gradients
             3. i, w, f x (p-r-1)         7. W, I      x (p-r-1)
             4. [F+b], [f+B] x (m-2p+r+1) 8. W         x (r+1)

Idle (p-1)(F&B + tB - 3tW) with chunk times, F&B = time of the fused pair. Needs m >= 2p. Rank r holds p + 1/2
micro-batches.
"""

from collections.abc import Iterator

from megalite.schedule.action import Action, overlap
from megalite.schedule.definition import ScheduleShape, fewer_than, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.schedules.zb_v import Chunks
from megalite.schedule.stage_placement import vee


def rank_order(rank: int, shape: ScheduleShape) -> Iterator[Action]:
    """One batch of `rank`."""
    p, m, _, _ = shape[:4]
    do = Chunks(rank, p)
    # 1, 2. Fill: the way down, then both ways.
    for _ in range(2 * (p - rank - 1)):
        yield do.f(0)
    for _ in range(rank + 1):
        yield do.f(0)
        yield do.f(1)
    # 3. The way back begins; its weight gradients fill the wait for the next forward.
    for _ in range(p - rank - 1):
        yield do.i(1)
        yield do.w()
        yield do.f(1)
    # 4. Steady: every forward travels with a backward of the other chunk.
    for turn in range(m - 2 * p + rank + 1):
        if turn == 0 and rank == p - 1:
            # On the last rank the two chunks are neighbours: this forward feeds the very next one, nothing overlaps
            # yet.
            yield do.f(0)
            yield do.b(1)
        else:
            yield overlap(do.f(0), do.b(1))
        yield overlap(do.f(1), do.b(0))
    # 5, 6. Drain the forwards, then the backwards; half of the last weight gradients are put off.
    for _ in range(p - rank - 1):
        yield do.b(1)
        yield overlap(do.f(1), do.b(0))
    half = rank + 1
    for turn in range(2 * (rank + 1)):
        chunk = 1 - turn % 2
        yield do.b(chunk) if turn < half else do.i(chunk)
    # 7, 8. The weight gradients that were put off fill the gaps of the last input gradients.
    for _ in range(p - rank - 1):
        yield do.w()
        yield do.i(0)
    for _ in range(rank + 1):
        yield do.w()


SCHEDULE = flush_schedule(
    "dualpipe-v",
    "DualPipeV: forward and backward in pairs on a V of two chunks",
    "DeepSeek-AI 2024, arXiv:2412.19437",
    lambda shape: vee(shape.p),
    rank_order,
    lambda rank, shape: PeakActivations(2 * shape.p + 1),
    lambda shape: fewer_than("dualpipe-v", shape, "2p", 2 * shape.p, "zb-v"),
    num_chunks=2,
    splits_backward=True,
    idle=lambda f, i, w, v: max(0.0, (f + i - w) / 2),
)
