"""Several jobs on the same devices (`tools/plan.py --jobs`): Jigsaw's packing of iterations beside gang scheduling.

A job whose micro-batches are back-propagated in part (`--partial-backprop-groups k`; SPB and Jigsaw, arXiv 2111.10672)
has workers of different lengths: worker w takes F + B d/k in iteration t, d = ((w + t) mod k) + 1.

    gang     a job holds its devices until its longest worker ends          a a a a . .      a: 4 workers of 1.5 to 3
    packed   every worker is a task of its own; the longest is placed       a a b b          . idle
             first, on the device that is free first (LPT)                  b a b b

A round is one iteration of every job that is not done. Seconds come from the file; that the models of a device fit
beside each other, and what moving them costs, is not counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml

from megalite.errors import ConfigError
from megalite.files import input_problem

Task = tuple[float, str, int]
"""Seconds, job, worker."""
MOST_BYTES, MOST_WORKERS, MOST_ROUNDS = 1 << 20, 100_000, 2_000


@dataclass(frozen=True)
class Job:
    """workers: as many as devices at the same time. groups: k, 1 for whole backwards. forward, backward: seconds of an
    iteration of one worker, the latter of all groups."""

    name: str
    workers: int
    forward: float
    backward: float
    groups: int = 1
    iterations: int = 1

    def tasks(self, step: int) -> list[Task]:
        """The workers of an iteration."""
        depths = ((worker + step) % self.groups + 1 for worker in range(self.workers))
        return [(self.forward + self.backward * d / self.groups, self.name, w) for w, d in enumerate(depths)]


def packed(tasks: Sequence[Task], devices: int) -> list[list[Task]]:
    """The tasks of each device (LPT; Graham 1969: at most 4/3 - 1/(3 N) of the best)."""
    placed: list[list[Task]] = [[] for _ in range(devices)]
    loads = [(0.0, device) for device in range(devices)]
    for task in sorted(tasks, key=lambda task: (-task[0], *task[1:])):
        load, device = heapq.heappop(loads)
        placed[device].append(task)
        heapq.heappush(loads, (load + task[0], device))
    return placed


def gang_seconds(jobs: Sequence[Job], devices: int, step: int) -> float:
    """Of a round: the longest job first, on the devices that are free first, all of which it holds to its end."""
    free = [0.0] * devices
    for seconds, workers in sorted(((max(job.tasks(step))[0], job.workers) for job in jobs), reverse=True):
        end = free[workers - 1] + seconds
        free = sorted([end] * workers + free[workers:])
    return free[-1]


def rounds(jobs: Sequence[Job]) -> Iterator[tuple[list[Job], int, float]]:
    """(Jobs that are not done, step of the depths, how many such rounds)."""
    begin = 0
    for end in sorted({job.iterations for job in jobs}):
        active = [job for job in jobs if job.iterations >= end]
        period = math.lcm(*(job.groups for job in active))
        shown = min(period, end - begin, MOST_ROUNDS)
        for step in range(begin, begin + shown):
            yield active, step, (end - begin) / shown
        begin = end


def job_lines(path: str, devices: int, rest: Sequence[str] = ()) -> Iterator[str]:
    """What packing the jobs of a file is worth. rest: other words of the command. Raises ConfigError."""
    if rest:
        raise ConfigError(f"--jobs={path}: the file says all of its jobs; drop {rest[0]}")
    jobs = read_jobs(path, devices)
    gang = best = together = work = 0.0
    for active, step, count in rounds(jobs):
        tasks = [task for job in active for task in job.tasks(step)]
        own, longest = math.fsum(task[0] for task in tasks), max(tasks)[0]
        gang += count * gang_seconds(active, devices, step)
        together += count * max(map(_load, packed(tasks, devices)))
        best, work = best + count * max(longest, own / devices), work + count * own / devices
    workers = sum(job.workers for job in jobs)
    yield f"{len(jobs)} jobs of {workers} workers on {devices} devices, {max(job.iterations for job in jobs):,} rounds"
    yield f"  gang scheduling  {gang:10.4g} s, devices busy {work / gang:.0%}"
    yield f"  packed           {together:10.4g} s, devices busy {work / together:.0%}, {gang / together:.3f} x as fast"
    yield f"  no packing takes less than {best:.4g} s"
    yield "the first round, longest first:"
    for device, tasks in enumerate(packed([task for job in jobs for task in job.tasks(0)], devices)[:8]):
        yield f"  device {device}  {_load(tasks):.4g} s  {' '.join(f'{name}/{worker}' for _, name, worker in tasks)}"


def _load(tasks: Sequence[Task]) -> float:
    return math.fsum(task[0] for task in tasks)


def read_jobs(path: str, devices: int) -> list[Job]:
    """`NAME: {workers: 4, forward: 0.1, backward: 0.2, groups: 4, iterations: 1000}`, a line a job. Raises
    ConfigError."""
    flag = f"--jobs={path}"
    if problem := input_problem(path):
        raise ConfigError(f"{flag}: {problem}")
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read(MOST_BYTES)
            data = yaml.safe_load(text) if "*" not in text else None  # no aliases
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
            data = None
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{flag}: no jobs; a line of it is NAME: {{workers: 4, forward: 0.1, backward: 0.2}}")
    jobs = [_job(f"{flag}: {name}", str(name), values) for name, values in data.items()]
    if wide := next((job for job in jobs if job.workers > devices), None):
        raise ConfigError(f"{flag}: {wide.name} has {wide.workers} workers, --num-devices={devices}; give as many")
    if (workers := sum(job.workers for job in jobs)) > MOST_WORKERS:
        raise ConfigError(f"{flag}: {workers:,} workers, at most {MOST_WORKERS:,}; plan for fewer jobs")
    return jobs


def _job(where: str, name: str, values: Any) -> Job:
    known = {field.name: field.type for field in fields(Job) if field.name != "name"}
    if not isinstance(values, Mapping) or (strange := sorted(map(str, values.keys() - known.keys()))):
        what = "no settings" if not isinstance(values, Mapping) else f"{strange[0]} is none of {', '.join(known)}"
        raise ConfigError(f"{where}: {what}")
    for key, kind in known.items():
        value, least = values.get(key, 1 if key in ("groups", "iterations") else None), 1 if kind == "int" else 0
        whole = isinstance(value, int) or (kind == "float" and isinstance(value, float))
        if not whole or isinstance(value, bool) or not least <= value < 1e9 or (key == "forward" and value == 0):
            raise ConfigError(f"{where}: {key} is {value!r}; give {'a whole number from 1' if least else 'seconds'}")
    return Job(name, **values)
