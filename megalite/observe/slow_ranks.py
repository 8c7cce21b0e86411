"""The search for a rank that is slower than the others of its stage, and for stages that are uneven."""

import math
import os
import platform
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import torch

from megalite.comm import all_gather, all_gather_json
from megalite.config import Config
from megalite.inventory import model_layers, stage_layer_ranges
from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record, StepStats
from megalite.planner import program_of
from megalite.schedule import compact_layout, faster_division

RATIO = 1.3
LEAST_S = 0.01
OWN_CORE = 0.8
"""Part of its working time for which a CPU rank has a core, unless other programs take it."""


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


def by_stage(work: Sequence[float], stages: Sequence[int]) -> dict[int, float]:
    """Pipeline rank -> the lower median of its ranks: one slow rank does not make a stage slow."""
    found: dict[int, list[float]] = {}
    for seconds, stage in zip(work, stages, strict=True):
        found.setdefault(stage, []).append(seconds)
    return {stage: statistics.median_low(found[stage]) for stage in sorted(found)}


def cuts_of(config: Config, world_size: int) -> list[range] | None:
    """What the stages hold, where layers can be moved between pipeline ranks: one stage on each, ranks all alike."""
    parallel = config.parallel
    if config.model.is_foreign or parallel.meshes or parallel.pipeline_model_parallel_size == 1:
        return None
    program = program_of(config, world_size)
    placement = program.placement
    movable = placement.num_stages == placement.num_ranks and placement.num_replicas == 1
    return stage_layer_ranges(config, program) if movable else None


def way_out(cuts: list[range] | None, seconds: list[float], weights: list[float], core: float) -> Record:
    """What to do about stages that work so long. weights: of their layers, where these can be moved. core: the share of
    one that the slowest stage had."""
    if core < OWN_CORE:
        return {"slowest_stage_core": core}
    if cuts is None:
        return {}
    found = faster_division(cuts, seconds, weights)
    return {"slowest_stage_layout": None if found is None else compact_layout(found)}


class SlowRankHook(Hook):
    """Names the rank that works much longer than the others of its stage, and says once that stages are uneven.

    In a synchronous run all ranks take equally long, because they wait for the slowest; what differs is how much of
    it is work. Once a log interval the ranks gather the median of the seconds it worked in an iteration (of at least
    the last ten, so that a single hiccup is passed over). Only ranks of one stage have the same work, so a rank is
    compared with those: if it stands out at two log lines in a row, the record gets `slowest_rank`,
    `slowest_rank_ratio` and `slowest_rank_host`. A stage that stands out among the stages is a matter of the layout:
    `slowest_stage`, `slowest_stage_ratio` and `slowest_stage_hosts` are in one record, and in another when it has
    become `RATIO` times worse. Beside them is `slowest_stage_layout`, the division that is faster by these times (None:
    none is; absent: not known), or `slowest_stage_core`, the share of a core that other programs left the stage. The
    record's peak memory becomes the largest of all ranks.

    Ranks on more CPU cores than a host has take turns, and how long one works says nothing: none is named.
    cores: of this host, that a process may use.
    """

    def __init__(self, cores: int | None = None) -> None:
        mine = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._cores, self._crowded = cores or mine, False
        self._hosts: list[str] = []
        self._work: deque[float] = deque()
        self._cores_used: deque[float] = deque()
        self._cpu_s = 0.0
        self._suspect_rank: int | None = None
        self._suspect_stage: int | None = None
        self._said: dict[int, float] = {}

    def on_start(self, trainer: TrainerView) -> None:
        self._hosts = all_gather_json(platform.node(), trainer.mesh.world)
        most = max(Counter(self._hosts).values())
        self._crowded = trainer.device.type == "cpu" and most > self._cores
        self._work = deque(maxlen=max(10, trainer.config.logging.log_interval))
        self._cores_used, self._cpu_s = deque(maxlen=self._work.maxlen), time.process_time()

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        # A rank that reads its data slowly is as slow as one that computes slowly: that time is work here.
        self._work.append(stats.iteration_time_s - stats.wait_time_s)
        before, self._cpu_s = self._cpu_s, time.process_time()
        self._cores_used.append((self._cpu_s - before) / max(self._work[-1], 1e-9))

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        world = trainer.mesh.world
        if world.size == 1:
            return
        core = statistics.median(self._cores_used) if trainer.device.type == "cpu" else 1.0
        mine = [statistics.median(self._work), core, float(record["peak_memory_bytes"]), trainer.mesh.coordinate("pp")]
        rows = all_gather(torch.tensor([mine], dtype=torch.float64, device=trainer.device), world).tolist()
        work, cores, peaks, stages = (list(column) for column in zip(*rows, strict=True))
        record["peak_memory_bytes"] = int(max(peaks))
        if len(self._work) >= 4 and not self._crowded:
            self._compare(trainer, work, [int(stage) for stage in stages], cores, record)

    def _compare(
        self, trainer: TrainerView, work: list[float], stages: list[int], cores: list[float], record: Record
    ) -> None:
        rank, ratio = slowest_rank(work, stages) or (None, 0.0)
        if rank is not None and rank == self._suspect_rank:
            record |= {"slowest_rank": rank, "slowest_rank_ratio": ratio, "slowest_rank_host": self._hosts[rank]}
        self._suspect_rank = rank
        seconds = by_stage(work, stages)
        stage, ratio = slowest(seconds) or (None, 0.0)
        if stage is not None and stage == self._suspect_stage and ratio > RATIO * self._said.get(stage, 0.0):
            self._said[stage] = ratio
            hosts = dict.fromkeys(host for host, other in zip(self._hosts, stages, strict=True) if other == stage)
            record |= {"slowest_stage": stage, "slowest_stage_ratio": ratio, "slowest_stage_hosts": ", ".join(hosts)}
            cuts = cuts_of(trainer.config, trainer.mesh.size("world"))
            layers = [] if cuts is None else model_layers(trainer.config.model)[1:-1]
            weights = [float(layer.flops()) for layer in layers]
            record |= way_out(cuts, [*seconds.values()], weights, by_stage(cores, stages)[stage])
        self._suspect_stage = stage
