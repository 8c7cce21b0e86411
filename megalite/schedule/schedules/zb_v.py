"""ZB-V: zero bubble with the memory of 1F1B, two chunks per rank in a V (Qi et al. 2024, arXiv:2405.15362).

    p=2, m=4: rank 0 holds stages 0 and 3, rank 1 stages 1 and 2 (small letters: the way back)
    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

The way down and the way back meet on the last rank, the loss is on rank 0, beside the embedding. Without a gap inside
any rank when tF = tI = tW; every rank holds p micro-batches of activations. It is a 1F1B of two chunks whose warm-up is
2(p-r)-1 first-chunk forwards on rank r, after which each forward of a chunk is paid back by a backward.
"""

from collections.abc import Callable, Iterator

from megalite.schedule.action import Action, backward, backward_input, backward_weight, forward
from megalite.schedule.definition import ScheduleShape, flush_schedule
from megalite.schedule.program import PeakActivations
from megalite.schedule.stage_placement import vee


class Chunks:
    """One rank's two chunks in a V: the next micro-batch of each and direction, and weight gradients that wait."""

    def __init__(self, rank: int, p: int) -> None:
        self.stages = rank, 2 * p - 1 - rank
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.put_off: list[Action] = []

    def f(self, chunk: int) -> Action:
        self.forwards[chunk] += 1
        return forward(self.stages[chunk], self.forwards[chunk] - 1)

    def b(self, chunk: int, build: Callable[..., Action] = backward) -> Action:
        self.backwards[chunk] += 1
        return build(self.stages[chunk], self.backwards[chunk] - 1)

    def i(self, chunk: int) -> Action:
        action = self.b(chunk, backward_input)
        self.put_off.append(backward_weight(action.stage, action.microbatch))
        return action

    def w(self, chunk: int | None = None) -> Action:
        """The oldest that waits; of a chunk."""
        own = (n for n, action in enumerate(self.put_off) if chunk is None or action.stage == self.stages[chunk])
        return self.put_off.pop(next(own))


def rank_order(rank: int, shape: ScheduleShape) -> Iterator[Action]:
    """One batch of `rank`. With m < 2p-1 it is the schedule of 2p-1 micro-batches with the missing ones left out."""
    whole = _order(rank, shape.p, max(2 * shape.p - 1, shape.m))
    return (action for action in whole if action.microbatch < shape.m)


def _order(rank: int, p: int, n: int) -> Iterator[Action]:
    do = Chunks(rank, p)
    # 1. Fill: forwards of the way down, then of both ways.
    for _ in range(2 * (p - rank) - 1):
        yield do.f(0)
    for _ in range(rank):
        yield do.f(1)
        yield do.f(0)
    # 2. The way back begins to return gradients.
    for _ in range(p - rank):
        yield do.f(1)
        yield do.i(1)
        yield do.w(1)
    # 3. Steady: one forward and one backward of each chunk.
    while do.forwards[1] < n or do.forwards[0] < n:
        if do.forwards[0] < n:
            yield do.f(0)
        yield do.i(0)
        yield do.w(0)
        yield do.f(1)
        yield do.i(1)
        yield do.w(1)
    # 4. Drain: input gradients first, weight gradients fill the gaps.
    for _ in range(rank):
        yield do.i(0)
        yield do.i(1)
    for _ in range(p - rank):
        yield do.i(0)
        yield do.w(0)
    for chunk in (1, 0):
        for _ in range(rank):
            yield do.w(chunk)


def warnings(shape: ScheduleShape) -> Iterator[str]:
    if shape.m < (least := 2 * shape.p - 1):
        yield (
            f"`pipeline_schedule`=zb-v: m = {shape.m} micro-batches per batch leave gaps; m >= 2p-1 = {least} has none "
            f"(p = {shape.p})"
        )


SCHEDULE = flush_schedule(
    "zb-v",
    "ZB-V: split backward on a V of two chunks, no gaps, memory of 1F1B",
    "Qi et al. 2024, arXiv:2405.15362",
    lambda shape: vee(shape.p),
    rank_order,
    lambda rank, shape: PeakActivations(min(2 * shape.m, 2 * shape.p)),
    warnings=warnings,
    aliases=("zbv",),
    num_chunks=2,
    splits_backward=True,
    idle=lambda f, i, w, v: f / 2,
)
