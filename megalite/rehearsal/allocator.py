"""torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), in numbers: what is allocated, what is reserved.

sizes     multiples of 512 bytes
segments  for up to 1 MiB: 2 MiB; for less than 10 MiB: 20 MiB; beyond: the size in steps of 2 MiB
blocks    the smallest free one of the stream's pool that is large enough, split where the rest is worth it (512
          bytes of a small segment, more than 1 MiB of a large one); freed neighbours are joined
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import count

UNIT, SMALL, SMALL_SEGMENT, LARGE, LARGE_SEGMENT, STEP = 512, 1 << 20, 2 << 20, 10 << 20, 20 << 20, 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment. before, behind: its neighbours there."""

    number: int
    size: int
    pool: tuple[int, bool]
    before: Block | None = None
    behind: Block | None = None
    free: bool = False


class Allocator:
    """allocated, reserved: bytes now; peak_allocated, peak_reserved: at most."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = defaultdict(list)
        self._used: dict[object, Block] = {}
        self._numbers = count()
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def alloc(self, key: object, nbytes: int, stream: int) -> bool:
        """Whether this is the most that was ever allocated."""
        size = max(UNIT, -(-nbytes // UNIT) * UNIT)
        pool = (stream, size <= SMALL)
        at = bisect_left(self._free[pool], (size, -1))
        if at == len(self._free[pool]):
            segment = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE else -(-size // STEP) * STEP
            self.reserved += segment
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            block = Block(next(self._numbers), segment, pool)
        else:
            block = self._free[pool].pop(at)[2]
        block.free, rest = False, block.size - size
        if rest >= UNIT if pool[1] else rest > SMALL:
            self._split(block, size)
        self._used[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return self.allocated == self.peak_allocated

    def free(self, key: object) -> None:
        """Nothing where it is not there."""
        if (block := self._used.pop(key, None)) is None:
            return
        self.allocated -= block.size
        pool = self._free[block.pool]
        for other in (block.before, block.behind):
            if other is not None and other.free:
                del pool[bisect_left(pool, (other.size, other.number))]
                first, second = (other, block) if block.before is other else (block, other)
                first.size += second.size
                first.behind = second.behind
                if second.behind is not None:
                    second.behind.before = first
                block = first
        block.free = True
        insort(pool, (block.size, block.number, block))

    def _split(self, block: Block, size: int) -> None:
        rest = Block(next(self._numbers), block.size - size, block.pool, block, block.behind, free=True)
        if block.behind is not None:
            block.behind.before = rest
        block.size, block.behind = size, rest
        insort(self._free[block.pool], (rest.size, rest.number, rest))
