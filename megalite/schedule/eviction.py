"""What leaves a room that is too full: whatever is used again last.

    room 2, uses a b c b a    a and b are there, c comes    a is used again at 4, b at 3: a leaves

What a program will use next is known before the run, so the choice is the best there is and not a guess from the past:
for things of one size none needs fewer loads (Belady, IBM Systems Journal 5(2), 1966; PatrickStar, arXiv 2108.05818,
moves its chunks so). Layers' weights (`chunks.py`), saved activations (`transfers.py`) and rows of an embedding
(`parallel/rows/slots.py`) are chosen here. Proof: tests/unit/schedule/test_eviction.py, against every other choice.
"""

from collections.abc import Sequence


def belady(next_uses: Sequence[float], sizes: Sequence[float], *, held: float, room: float) -> list[int]:
    """Positions of the things that leave, the farthest next use first, and of equal ones the first in the list; all of
    them where even that is not enough.

    next_uses, sizes: of the things that may leave. held: what everything takes together, with what is about to come.
    room: what there is room for.
    """
    leave: list[int] = []
    for position in sorted(range(len(next_uses)), key=next_uses.__getitem__, reverse=True):
        if held <= room:
            break
        leave.append(position)
        held -= sizes[position]
    return leave
