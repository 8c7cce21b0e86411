"""StagePlacement: which rank holds which stage.

    loop  p=2, 4 stages         V  p=2, 4 stages           bidirectional  p=2, 2 stages, 2 replicas
    rank 0: 0 2                 rank 0: 0 3                rank 0: stage 0 of replica 0, stage 1 of replica 1
    rank 1: 1 3                 rank 1: 1 2                rank 1: stage 1 of replica 0, stage 0 of replica 1

    round robin, stage 0 twice     rank 0: stage 0 of micro-batches 0, 2, ...    rank 1: stage 0 of 1, 3, ...
    and stage 1 once               rank 2: stage 1 of all

All code asks `rank_of` and `stages_of`; none computes `stage % p`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm


@dataclass(frozen=True)
class StagePlacement:
    """Which pipeline rank holds each stage."""

    num_ranks: int  # p
    ranks: tuple[tuple[int, ...], ...]  # ranks[replica][stage] is the rank that holds this replica of this stage
    workers: tuple[int, ...] = ()  # per stage, ranks from that one on that take micro-batches in turn; empty: one each

    @property
    def num_stages(self) -> int:
        return len(self.ranks[0])

    @property
    def num_replicas(self) -> int:
        """How many ranks hold each stage: 1, or 2f for Chimera with f pairs of pipelines."""
        return len(self.ranks)

    @property
    def chunks_per_rank(self) -> int:
        """v: number of stages over number of ranks (replicas not counted)."""
        return 1 if self.workers else self.num_stages // self.num_ranks

    @property
    def _counts(self) -> tuple[int, ...]:
        """Ranks of each stage that take turns."""
        return self.workers or (1,) * self.num_stages

    @property
    def round(self) -> int:
        """Micro-batches after which every worker has had as many turns as the others of its stage: batches are
        multiples of it."""
        return lcm(*self.workers)

    @property
    def neighbours(self) -> frozenset[tuple[int, int]]:
        """Pairs of ranks (lower, higher) that hold consecutive stages: no others ever send to each other."""
        found: set[tuple[int, int]] = set()
        for ranks in self.ranks:
            for (begin, count), (above, more) in itertools.pairwise(zip(ranks, self._counts, strict=True)):
                shared = gcd(count, more)  # those meet in some micro-batch that are as far from 0 modulo it
                found |= {(begin + a, above + b) for a in range(count) for b in range(a % shared, more, shared)}
        return frozenset((min(a, b), max(a, b)) for a, b in found if a != b)

    def repeated(self, rounds: int) -> StagePlacement:
        """The stages of one replica so many times, one after the other."""
        return StagePlacement(self.num_ranks, (self.ranks[0] * rounds,), self.workers * rounds)

    def rank_of(self, stage: int, replica: int = 0, microbatch: int = 0) -> int:
        """The rank that runs this micro-batch on this stage."""
        first = self.ranks[replica][stage]
        return first + microbatch % self.workers[stage] if self.workers else first

    def turn_of(self, rank: int) -> tuple[int, int]:
        """(Its turn among the ranks of its stage, how many they are)."""
        if not self.workers:
            return 0, 1
        (stage, _), *_ = self.stages_of(rank)
        return rank - self.ranks[0][stage], self.workers[stage]

    def stages_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(stage, replica) pairs held by `rank`, in ascending order of replica, then stage."""
        return tuple(
            (stage, replica)
            for replica, ranks in enumerate(self.ranks)
            for stage, (first, count) in enumerate(zip(ranks, self._counts, strict=True))
            if first <= rank < first + count
        )


def loop(num_ranks: int, num_chunks: int = 1) -> StagePlacement:
    """Stage s on rank s mod p: the plain pipeline (one chunk) and Megatron's interleaved one."""
    return StagePlacement(num_ranks, (tuple(stage % num_ranks for stage in range(num_ranks * num_chunks)),))


def vee(num_ranks: int) -> StagePlacement:
    """Two chunks per rank, down and up: the first and last stage share rank 0, so tied embeddings need no message."""
    return StagePlacement(num_ranks, (tuple([*range(num_ranks), *reversed(range(num_ranks))]),))


def bidirectional(num_ranks: int, num_pairs: int = 1) -> StagePlacement:
    """Chimera: f pairs of opposite pipelines, each holding every stage once.

    Replica 2i runs down, starting at rank i*p/f; replica 2i+1 is the same pipeline from end to start.
    """
    replicas = []
    for pair in range(num_pairs):
        offset = pair * num_ranks // num_pairs
        down = tuple((offset + stage) % num_ranks for stage in range(num_ranks))
        replicas += [down, tuple(reversed(down))]
    return StagePlacement(num_ranks, tuple(replicas))


def round_robin(workers: Sequence[int]) -> StagePlacement:
    """Stage s on `workers[s]` ranks, micro-batch k on number k mod workers[s] of them (PipeDream's replication)."""
    first = tuple(itertools.accumulate(workers[:-1], initial=0))
    return StagePlacement(sum(workers), (first,), tuple(workers))
