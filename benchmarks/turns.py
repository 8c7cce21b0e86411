"""Variants by turns: ranks are started, each builds every variant, and every round calls each of them once.

A noisy neighbour therefore disturbs all alike. A variant that fails is left out with its error; one that hangs or
ends its process is found by the process that started the ranks, which starts them again without it.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.launch import die_with_parent

if TYPE_CHECKING:
    import torch

MIB = 2**20


@dataclass(frozen=True)
class Place:
    """Where a variant runs: this rank of so many, and a folder that all of them share for this launch."""

    rank: int = 0
    ranks: int = 1
    folder: str = ""

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def synchronize(self) -> None:
        """Waits for this rank's device, then for the other ranks."""
        self._wait_for_device()
        if self.ranks > 1:
            import torch.distributed as dist

            dist.barrier()

    def seconds_since(self, began: float) -> float:
        """Until now, on the rank that took longest."""
        self._wait_for_device()
        return self.largest(time.perf_counter() - began)

    def largest(self, value: float) -> float:
        """Of the ranks' values."""
        if self.ranks == 1:
            return value
        import torch
        import torch.distributed as dist

        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return float(box)

    def _wait_for_device(self) -> None:
        torch = sys.modules.get("torch")  # not every benchmark needs it
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Variant:
    """What is timed. before: not timed, ahead of each call. divide_by: what one call is worth (batches)."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    divide_by: float = 1.0


@dataclass(frozen=True)
class Case:
    """Variants that are compared in one launch.

    pairs: (ours, peer), each a ratio. work, unit: what one call does, for a rate ("tokens"). base: the variant with
    which a table compares all others. inner: calls of one sample, where one is too short to time. flops: of a call, on
    all ranks. memory: peak memory is measured instead of time, one launch a variant.
    """

    name: str
    variants: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    work: float = 0.0
    unit: str = ""
    base: str = ""
    ranks: int = 1
    inner: int = 1
    memory: bool = False
    flops: float = 0.0


@dataclass
class Samples:
    """Of each variant: seconds of every repetition, or bytes of every launch; or why there are none. device_bytes: the
    peak on a GPU while seconds were measured. launches: of kernels there in one call, where a case has them counted."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    process_bytes: dict[str, list[int]] = field(default_factory=dict)
    live_bytes: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)

    def add(self, other: Samples) -> None:
        """Takes in what another launch measured."""
        for mine, its in ((self.process_bytes, other.process_bytes), (self.live_bytes, other.live_bytes)):
            for name, values in its.items():
                mine.setdefault(name, []).extend(values)
        self.seconds.update(other.seconds)
        self.device_bytes.update(other.device_bytes)
        self.launches.update(other.launches)
        self.errors.update(other.errors)


Build = Callable[[str, Case, Place], Variant]
"""Name of a variant -> the variant on this rank; torch.distributed is initialised where there are several ranks."""

Tell = Callable[[str], None]
Keep = Callable[[Samples], object]


def measure(case: Case, build: Build, *, rounds: int, timeout: float, tell: Tell, keep: Keep) -> Samples:
    """Starts the ranks of a case, and again without the variant that brought them down, as long as one does. keep: is
    given what there is so far, on a GPU after each variant: a machine that is lent may end at any time."""
    found = Samples()
    if case.memory:
        for name in case.variants:
            for number in range(rounds):
                tell(f"{case.name}: {name}, launch {number + 1} of {rounds}")
                samples, _, problem = _launch(replace(case, variants=(name,)), build, 1, timeout, keep)
                found.add(Samples(errors={name: problem}) if problem else samples)
        return found
    names = case.variants
    while names:
        samples, begun, problem = _launch(replace(case, variants=names), build, rounds, timeout, keep)
        found.add(samples)
        if not problem:
            break
        found.errors |= {begun: problem} if begun else dict.fromkeys(names, problem)
        done = {begun, *samples.seconds, *samples.errors}
        names = tuple(name for name in names if begun and name not in done)
    return found


def _launch(case: Case, build: Build, rounds: int, timeout: float, keep: Keep) -> tuple[Samples, str, str]:
    """What rank 0 has sent by then, the variant that was under way last, and what went wrong, if anything."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="megalite-benchmark-") as folder:
        receiver, sender = context.Pipe(duplex=False)
        ranks: list[BaseProcess] = [
            context.Process(
                target=_rank,
                args=(os.getpid(), sender, Place(rank, case.ranks, folder), case, build, rounds, timeout),
            )
            for rank in range(case.ranks)
        ]
        try:
            for rank in ranks:
                rank.start()
            sender.close()
            return _follow(ranks, receiver, timeout, keep)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _follow(ranks: list[BaseProcess], receiver: Connection, timeout: float, keep: Keep) -> tuple[Samples, str, str]:
    """Reads what the ranks say until all have ended, one has failed, or time is up."""
    deadline, begun, samples = time.monotonic() + timeout, "", None
    alive = ranks
    while alive:
        alive = [rank for rank in ranks if rank.exitcode is None]
        ready = wait([receiver, *(rank.sentinel for rank in alive)], 1.0)
        while receiver in ready and receiver.poll():
            try:
                kind, what = receiver.recv()
            except EOFError:
                break
            begun = what if kind == "begun" else begun
            if kind == "samples":
                samples = what
                keep(what)
            if kind == "error":
                return samples or Samples(), begun, what
        failed = [number for number, rank in enumerate(ranks) if rank.exitcode]
        if failed:
            return samples or Samples(), begun, f"rank {failed[0]} ended with status {ranks[failed[0]].exitcode}"
        if time.monotonic() > deadline:
            return samples or Samples(), begun, f"no end after {timeout:.0f} s (--timeout)"
    return (samples, "", "") if samples is not None else (Samples(), begun, "ended without a result")


def _rank(parent: int, pipe: Connection, place: Place, case: Case, build: Build, rounds: int, timeout: float) -> None:
    """The process of one rank; never returns, and ends with the one that started it."""
    die_with_parent(parent)
    try:
        if case.settings.get("torch", True):
            _set_up_torch(place, case, timeout)
        tell = progress if place.rank == 0 else _silent

        def begin(name: str) -> None:
            if place.rank == 0:
                pipe.send(("begun", name))

        def keep(samples: Samples) -> None:
            if place.rank == 0:
                pipe.send(("samples", samples))

        if case.memory:
            keep(measure_memory(place, case, build))
        else:
            take_turns(place, case, build, rounds, begin, tell, keep)
        place.synchronize()
    except Exception as error:
        pipe.send(("error", _one_line(error)))
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind that would abort the interpreter's own way out


def _set_up_torch(place: Place, case: Case, timeout: float) -> None:
    import torch

    torch.set_num_threads(case.settings.get("threads", 1))
    torch.set_float32_matmul_precision(case.settings.get("matmul", "highest"))
    if torch.cuda.is_available():
        torch.cuda.set_device(place.rank % torch.cuda.device_count())
    if place.ranks > 1:
        import torch.distributed as dist

        dist.init_process_group(
            "nccl" if torch.cuda.device_count() >= place.ranks else "gloo",
            init_method=f"file://{place.folder}/rendezvous",
            rank=place.rank,
            world_size=place.ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )


def take_turns(place: Place, case: Case, build: Build, rounds: int, begin: Tell, tell: Tell, keep: Keep) -> None:
    """On each rank: builds the variants that run, and times them round by round after one round of warm-up.
    keep: given the samples at the end, and on a GPU after each variant."""
    variants: dict[str, Variant] = {}
    found = Samples()
    for name in case.variants:
        begin(name)
        _begin(name, variants, place, case, build, found, tell)
        if place.device.type == "cuda":  # nobody disturbs a GPU, and two variants together would not fit on it
            _rounds(variants, found, place, case, rounds, begin, tell)
            if name in variants and case.settings.get("launches"):
                found.launches[name] = _launches(variants[name])
            _free(name, variants, place, found)
            keep(found)
    _rounds(variants, found, place, case, rounds, begin, tell)
    keep(found)


def _begin(
    name: str, variants: dict[str, Variant], place: Place, case: Case, build: Build, found: Samples, tell: Tell
) -> None:
    """Builds a variant and calls it once."""
    tell(f"{case.name}: {name}, first call")
    error = ""
    try:
        variants[name] = build(name, case, place)
        variants[name].before()
        variants[name].run()
    except Exception as problem:  # the ranks agree below; one that waits for the others is ended from outside
        error = _one_line(problem)
    if place.largest(float(bool(error))):
        variants.pop(name, None)
        found.errors[name] = error or "failed on another rank"


def _rounds(
    variants: dict[str, Variant], found: Samples, place: Place, case: Case, rounds: int, begin: Tell, tell: Tell
) -> None:
    for number in range(rounds + 1):
        for name, variant in variants.items():
            begin(name)
            tell(f"{case.name}: round {number} of {rounds}, {name}")
            seconds = _timed(variant, place, case.inner)
            if number:
                found.seconds.setdefault(name, []).append(seconds)


def _launches(variant: Variant) -> int:
    """Kernels, copies and fills that one call gives to the device."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        variant.run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events() or [])


def _free(name: str, variants: dict[str, Variant], place: Place, found: Samples) -> None:
    """Forgets the variant and its memory, whose peak on the fullest rank is kept."""
    import gc

    import torch

    variants.pop(name, None)
    peak = place.largest(torch.cuda.max_memory_allocated())
    if name in found.seconds:
        found.device_bytes[name] = int(peak)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _timed(variant: Variant, place: Place, inner: int) -> float:
    """Seconds of one call on the slowest rank."""
    variant.before()
    place.synchronize()
    began = time.perf_counter()
    for _ in range(inner):
        variant.run()
    return place.seconds_since(began) / variant.divide_by / inner


def measure_memory(place: Place, case: Case, build: Build) -> Samples:
    """Peak of the one variant, on the fullest rank: what the process takes above its imports, and live tensors."""
    from megalite.observe import LiveBytes

    [name] = case.variants
    build(name, replace(case, settings={**case.settings, "model": case.settings["small_model"]}), place).run()
    before = _resident(place)
    variant = build(name, case, place)
    for _ in range(4):
        variant.run()
    taken = _resident(place) - before
    found = Samples(process_bytes={name: [int(place.largest(taken))]})
    if place.device.type == "cpu":
        counter = LiveBytes()
        counter.add_everything()
        with counter:
            variant.run()
            variant.run()
        found.live_bytes[name] = [int(place.largest(counter.peak))]
    return found


def _resident(place: Place) -> int:
    """Bytes: the device's peak on a GPU, the resident peak of the process elsewhere."""
    if place.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def progress(text: str) -> None:
    """What is under way: one line that is written over on a terminal; a line for each first call in a log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
    elif ": round " not in text:
        print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    """The other ranks say nothing."""


def folder_of(place: Place, name: str, root: str = "") -> Path:
    """A folder of a variant, in `root` where one is given."""
    path = Path(root or place.folder) / name
    path.mkdir(parents=True, exist_ok=True)
    return path
