"""Who sees whom in attention, said once and read by every way of computing it.

A query sees the keys of its own sample from one position up to its own. That position is 0 for plain causal attention,
its own less `window - 1` for a sliding window (Mistral, arXiv 2310.06825), where its document begins for packed
documents, and the later of the two for both. Queries and keys are given with their positions, so that a part of a
sequence (context parallelism, a cache) needs no rule of its own::

    position 0 1 2 3 4 5      two documents, window 3: first = 0 0 0 1 4 4
    query 3    . x x x        (document 1 begins at 4)
    query 5            x x

Nothing of size s x s is needed to say it, and which blocks nobody sees can be told from the ends of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Shared:
    """What the first who asks makes, for all who ask later: of a micro-batch its layers, which see the same."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes, made once. what: by which everything that makes it another differs."""
        if what not in self._made:
            self._made[what] = make()
        found: T = self._made[what]
        return found


@dataclass(frozen=True)
class Documents:
    """How a kernel that takes documents one after the other is told of them; known to the host, which made them.

    bounds: int32 `[n + 1]`, where each document of all samples begins, and the end. counts: documents of each sample.
    longest: tokens of the longest one.
    """

    bounds: Tensor
    counts: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, starts: Tensor, device: torch.device | str) -> Documents:
        """starts: int64 `[b, s]` in host memory, where each token's document begins in its sample. Nobody waits."""
        begins = starts == torch.arange(starts.shape[1])
        bounds = torch.cat((begins.flatten().nonzero()[:, 0], torch.tensor([starts.numel()])))
        on_device = torch.device(device).type != "cpu" and torch.cuda.is_available()
        narrow = bounds.to(torch.int32)
        narrow = narrow.pin_memory() if on_device else narrow
        counts = tuple(begins.sum(1).tolist())
        return cls(narrow.to(device, non_blocking=True), counts, int(bounds.diff().max()))

    def part(self, samples: slice, length: int) -> Documents:
        """Those of some samples of `length` tokens."""
        first, last, _ = samples.indices(len(self.counts))
        before, own = sum(self.counts[:first]), self.counts[first:last]
        bounds = self.bounds[before : before + sum(own) + 1]
        return Documents(bounds - first * length if first else bounds, own, self.longest)


@dataclass(frozen=True)
class Visibility:
    """queries, keys: positions in the sample, int64 `[s]` and `[k]`. first: the first position that each query sees,
    int64 `[b, s]` (`[1, s]` where all samples are alike), None: from 0 on; it follows from `starts`, where the queries'
    documents begin, and `window`. documents: the same as `starts`, where the host knows it. at: position of the first
    query, where the host knows that both follow one another without a gap, the keys from 0 on. shared: what kernels
    make of it.
    """

    queries: Tensor
    keys: Tensor
    first: Tensor | None = None
    starts: Tensor | None = None
    window: int | None = None
    documents: Documents | None = None
    at: int | None = None
    shared: Shared = field(init=False, default_factory=Shared, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        queries: Tensor,
        keys: Tensor,
        *,
        window: int | None,
        document_starts: Tensor | None,
        documents: Documents | None = None,
        at: int | None = None,
    ) -> Visibility:
        """Of one layer. document_starts: int64 `[b, s]`, where each query's document begins, None: one document."""
        first = document_starts
        if window is not None:
            earliest = (queries - (window - 1)).clamp(min=0)[None]
            first = earliest if first is None else torch.maximum(first, earliest)
        return cls(queries, keys, first, document_starts, window, documents, at)

    def of_queries(self, part: slice) -> Visibility:
        """Of a part of the queries."""
        begin, end, _ = part.indices(len(self.queries))
        if (begin, end) == (0, len(self.queries)):
            return self

        def narrowed() -> Visibility:
            first, starts = (None if x is None else x[:, part] for x in (self.first, self.starts))
            at = None if self.at is None else self.at + begin
            return Visibility(self.queries[part], self.keys, first, starts, self.window, at=at)

        return self.shared.once(("queries", begin, end), narrowed)

    def dense(self) -> Tensor:
        """True where a query may look: `[s, k]`, or `[b, s, k]` where samples differ. For plain products."""
        allowed = self.keys[None, :] <= self.queries[:, None]
        if self.first is None:
            return allowed
        allowed = allowed & (self.keys[None, None, :] >= self.first[:, :, None])
        return allowed[0] if len(self.first) == 1 else allowed
