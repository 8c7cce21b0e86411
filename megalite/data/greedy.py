"""Whose sample comes next in a blend: the part that is furthest behind its share (Megatron-LM's greedy rule).

Step by step that takes parts x samples operations of Python. Here many stretches of the order are computed side by
side, one step of all of them at a time:

    steps      0 ......... 5000 ......... 10000 ......... 15000
    stretch 0  [=========>
    stretch 1        ~~~~~[=========>                             ~ begins earlier, from a guess: nobody is further
    stretch 2                      ~~~~~[=========>                 behind than any other by more than a sample

The rule forgets where it came from within a few samples of each part, so nearly every stretch begins in the state in
which the one before it ends. That is compared, and a stretch that does not is computed again from there: the result is
that of the single loop, bit for bit (`tests/unit/data/test_blend.py` compares the two).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ELEMENTS = 1 << 16
"""Stretches x parts that are worked on at a time: what a cache holds."""
SHORTEST = 2048
WARM = 512
AHEAD = 64
"""Steps for which the parts that can be chosen are picked out, where there are many of them."""
MANY_PARTS = 256
ROUNDS = 8

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Order = tuple[NDArray[np.int16], Numbers]


def greedy_order(shares: Sequence[float], size: int) -> Order:
    """Part, int16 `[size]`, and number of the sample in it, int64 `[size]`, of each step; shares sum to 1."""
    weights = np.array(shares, np.float64)
    count = max(1, min(ELEMENTS // len(weights), size // SHORTEST))
    length = -(-size // count)
    first = np.arange(count) * length
    begin = _guess(weights, np.maximum(first - WARM, 0))
    _advance(weights, np.maximum(first - WARM, 0), begin, min(WARM, length))
    begin[0] = 0.0
    parts, samples = np.empty((length, count), np.int16), np.empty((length, count), np.int64)
    ends = np.empty_like(begin)
    wrong = np.arange(count)
    for number in range(count + ROUNDS):
        taken = begin[wrong]
        parts[:, wrong], samples[:, wrong] = _advance(weights, first[wrong], taken, length)
        ends[wrong] = taken
        wrong = np.flatnonzero((ends[:-1] != begin[1:]).any(axis=1)) + 1
        if not len(wrong):
            break
        if number >= ROUNDS:  # a part of next to no weight remembers for long: one after the other
            wrong = wrong[:1]
        begin[wrong] = ends[wrong - 1]
    return parts.T.reshape(-1)[:size].copy(), samples.T.reshape(-1)[:size].copy()


def _guess(weights: Floats, steps: Numbers) -> Floats:
    """Samples taken of each part before these steps, `[steps, parts]`, if all parts are as close as they can be."""
    wanted = steps[:, None] * weights
    taken = np.floor(wanted)
    more = (steps - taken.sum(axis=1)).astype(np.int64)
    place = np.argsort(np.argsort(taken - wanted, axis=1, kind="stable"), axis=1, kind="stable")
    taken += place < more[:, None]
    return taken


def _advance(weights: Floats, first: Numbers, taken: Floats, length: int) -> Order:
    """Part and sample of `length` steps of every stretch, `[length, stretches]`; taken `[stretches, parts]` is changed.

    At step t of each stretch the first part with the largest `weight * max(t, 1) - taken` gives its next sample.
    """
    parts, samples = np.empty((length, len(taken)), np.int16), np.empty((length, len(taken)), np.int64)
    ahead = AHEAD if len(weights) > MANY_PARTS else length
    for begin in range(0, length, ahead):
        steps = range(begin, min(begin + ahead, length))
        columns = _candidates(weights, first + begin, taken, len(steps))
        some, some_weights = np.take_along_axis(taken, columns, axis=1), weights[columns]
        behind, rows = np.empty_like(some), np.arange(len(some)) * some.shape[1]
        flat, part_of = some.reshape(-1), columns.reshape(-1)
        for step in steps:
            np.multiply(np.maximum(first + step, 1).astype(np.float64)[:, None], some_weights, out=behind)
            behind -= some
            chosen = rows + behind.argmax(axis=1)
            parts[step], samples[step] = part_of[chosen], flat[chosen]
            flat[chosen] += 1.0
        np.put_along_axis(taken, columns, some, axis=1)
    return parts, samples


def _candidates(weights: Floats, first: Numbers, taken: Floats, steps: int) -> Numbers:
    """Parts of which one is chosen in each of the next steps, `[stretches, candidates]`, in ascending order.

    Of the `steps` parts that are furthest behind one is left until the last of these steps, and it is no less behind
    by then: whoever cannot get that far is not chosen.
    """
    behind = np.maximum(first, 1)[:, None] * weights - taken
    reach = behind + weights * steps
    reach += 1e-9 + 8 * np.finfo(np.float64).eps * float(first[-1] + steps)  # rounding
    place = max(0, len(weights) - steps)
    least = np.partition(behind, place, axis=1)[:, place]
    count = int((reach >= least[:, None]).sum(axis=1).max())
    columns = np.argpartition(reach, len(weights) - count, axis=1)[:, len(weights) - count :]
    columns.sort(axis=1)
    return columns
