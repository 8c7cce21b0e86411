"""The search for a rank that is slower than the others of its stage, and for stages that are uneven."""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import torch

from megalite.comm import all_gather, all_gather_json
from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record, StepStats

RATIO = 1.3
LEAST_S = 0.01


def slowest(work: Mapping[int, float]) -> tuple[int, float] | None:
    """The key whose seconds exceed the median of the others `RATIO` times, and by `LEAST_S`; and how many times."""
    if len(work) < 2:
        return None
    key = max(work, key=work.__getitem__)
    others = statistics.median(seconds for each, seconds in work.items() if each != key)
    if work[key] <= max(RATIO * others, others + LEAST_S):
        return None
    return key, work[key] / others if others > 0 else math.inf


def slowest_rank(work: Sequence[float], stages: Sequence[int]) -> tuple[int, float] | None:
    """The rank that works longest beside the ranks of its own stage, and how many times as long.

    work: seconds by rank. stages: pipeline rank by rank. A stage of one rank has nobody to be compared with.
    """
    found = [
        slowest({rank: work[rank] for rank, other in enumerate(stages) if other == stage}) for stage in set(stages)
    ]
    return max((each for each in found if each is not None), key=lambda each: each[1], default=None)


def slowest_stage(work: Sequence[float], stages: Sequence[int]) -> tuple[int, float] | None:
    """The pipeline rank that works longest beside the others, and how many times as long.

    One slow rank does not make a stage slow: a stage is as fast as the lower median of its ranks.
    """
    by_stage: dict[int, list[float]] = {}
    for seconds, stage in zip(work, stages, strict=True):
        by_stage.setdefault(stage, []).append(seconds)
    return slowest({stage: statistics.median_low(seconds) for stage, seconds in by_stage.items()})


class SlowRankHook(Hook):
    """Names the rank that works much longer than the others of its stage, and says once that stages are uneven.

    In a synchronous run all ranks take equally long, because they wait for the slowest; what differs is how much of
    it is work. Once a log interval the ranks gather the median of the seconds it worked in an iteration (of at least
    the last ten, so that a single hiccup is passed over). Only ranks of one stage have the same work, so a rank is
    compared with those: if it stands out at two log lines in a row, the record gets `slowest_rank`,
    `slowest_rank_ratio` and `slowest_rank_host`. A stage that stands out among the stages is a matter of the layout:
    `slowest_stage`, `slowest_stage_ratio` and `slowest_stage_hosts` are in one record, and in another when it has
    become `RATIO` times worse. The record's peak memory becomes the largest of all ranks.

    Ranks on more CPU cores than a host has take turns, and how long one works says nothing: none is named.
    cores: of this host, that a process may use.
    """

    def __init__(self, cores: int | None = None) -> None:
        mine = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._cores, self._crowded = cores or mine, False
        self._hosts: list[str] = []
        self._work: deque[float] = deque()
        self._suspect_rank: int | None = None
        self._suspect_stage: int | None = None
        self._said: dict[int, float] = {}

    def on_start(self, trainer: TrainerView) -> None:
        self._hosts = all_gather_json(platform.node(), trainer.mesh.world)
        most = max(Counter(self._hosts).values())
        self._crowded = trainer.device.type == "cpu" and most > self._cores
        self._work = deque(maxlen=max(10, trainer.config.logging.log_interval))

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        # A rank that reads its data slowly is as slow as one that computes slowly: that time is work here.
        self._work.append(stats.iteration_time_s - stats.wait_time_s)

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        world = trainer.mesh.world
        if world.size == 1:
            return
        mine = [statistics.median(self._work), float(record["peak_memory_bytes"]), trainer.mesh.coordinate("pp")]
        rows = all_gather(torch.tensor([mine], dtype=torch.float64, device=trainer.device), world).tolist()
        record["peak_memory_bytes"] = int(max(peak for _, peak, _ in rows))
        if len(self._work) >= 4 and not self._crowded:
            self._compare([seconds for seconds, _, _ in rows], [int(stage) for _, _, stage in rows], record)

    def _compare(self, work: list[float], stages: list[int], record: Record) -> None:
        rank, ratio = slowest_rank(work, stages) or (None, 0.0)
        if rank is not None and rank == self._suspect_rank:
            record["slowest_rank"] = rank
            record["slowest_rank_ratio"] = ratio
            record["slowest_rank_host"] = self._hosts[rank]
        self._suspect_rank = rank
        stage, ratio = slowest_stage(work, stages) or (None, 0.0)
        if stage is not None and stage == self._suspect_stage and ratio > RATIO * self._said.get(stage, 0.0):
            self._said[stage] = ratio
            hosts = {host: None for host, other in zip(self._hosts, stages, strict=True) if other == stage}
            record["slowest_stage"] = stage
            record["slowest_stage_ratio"] = ratio
            record["slowest_stage_hosts"] = ", ".join(hosts)
        self._suspect_stage = stage
