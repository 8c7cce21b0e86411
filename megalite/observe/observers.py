"""Observers every run can have: its pace, metrics.jsonl, samples, the profiler; and who watches what where.

`make_hooks` is the one place that decides which rank writes. Losses and norms are the same on all ranks, so rank 0
writes for everyone; the profiler writes a file for each rank that it was asked for.
"""

import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, TextIO

import torch

from megalite import __version__
from megalite.commands import typed
from megalite.config import Config
from megalite.errors import DataError, flag_of
from megalite.inventory import FLOPS_CONVENTION
from megalite.observe.alerts import EventHook, PrometheusHook
from megalite.observe.curves import loss_picture
from megalite.observe.hooks import Hook, Hooks, TrainerView, guarded
from megalite.observe.live_memory import MemoryCheckHook
from megalite.observe.loggers import ConsoleHook, TensorBoardHook, WandbHook
from megalite.observe.slow_ranks import SlowRankHook
from megalite.observe.stats import Record, StepStats
from megalite.parallel.pipeline import Executor
from megalite.planner import RankMemory
from megalite.progress import is_terminal

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
PICTURE_FILE = "loss.svg"
LOG_FILE = "train.log"
RUN_FILES = (METRICS_FILE, SAMPLES_FILE, PICTURE_FILE, LOG_FILE)
"""What observers write into `save`."""
RECENT = 20


def make_hooks(
    config: Config,
    rank: int,
    start_facts: Record | None = None,
    flops_per_sample: float | None = None,
    first: Sequence[Hook] = (),
    memory: Sequence[RankMemory] = (),
    executor: Executor | None = None,
) -> Hooks:
    """Make the hooks of world rank `rank` from the logging section. Every rank of the world calls this.

    start_facts: what the start line of metrics.jsonl says besides the usual. flops_per_sample: of a model not ours.
    first: hooks that add to records what the others write. memory: what ranks at each pipeline coordinate are predicted
    to need, on rank 0. executor: its actions are named in profiles.
    """
    hooks: list[Hook] = [*first, SlowRankHook(), MemoryCheckHook(memory)]
    logging, save = config.logging, config.checkpoint.run_folder
    if rank == 0:
        metrics = None if save is None else Path(save) / METRICS_FILE
        hooks += [PaceHook(metrics), ConsoleHook()]
        if metrics is not None:
            hooks.append(guarded(JsonlHook(metrics, start_facts), str(metrics)))
            if is_terminal(sys.stdout):
                path = metrics.with_name(LOG_FILE)
                hooks.append(guarded(ConsoleHook(path), str(path)))
        if save is not None and logging.samples.sample_interval is not None:
            path = Path(save) / SAMPLES_FILE
            hooks.append(guarded(SamplesHook(path), str(path)))
        if logging.tensorboard_dir is not None:
            hooks.append(guarded(TensorBoardHook(logging.tensorboard_dir), "TensorBoard"))
        if logging.wandb.wandb_project is not None:
            hooks.append(guarded(WandbHook(), "wandb"))
        if metrics is not None:  # the last line of the run
            hooks.append(guarded(PictureHook(metrics), PICTURE_FILE))
        file, port = logging.prometheus.prometheus_file, logging.prometheus.prometheus_port
        if (port or file) is not None:
            hooks.append(guarded(PrometheusHook(Path(save or "run").name, file, port), "Prometheus"))
        if logging.on_event is not None:
            hooks.append(EventHook())
    if logging.profiling.profile and rank in logging.profiling.profile_ranks:
        profiler = ProfileHook(Path(save or logging.tensorboard_dir or ".") / "profile", executor)
        hooks.append(guarded(profiler, "the profiler"))
    return Hooks(hooks, flops_per_sample=flops_per_sample)


class PaceHook(Hook):
    """Adds `eta_s` and `device_hours` to `"train"` records; comes before the hooks that write them.

    The time left is that of the samples that are left, at the rate of the latest `RECENT` log intervals by the clock on
    the wall, evaluations and checkpoints included. Device hours are devices times hours since the first start, of which
    metrics.jsonl tells a run that is resumed. metrics: None: there is none.
    """

    def __init__(self, metrics: Path | None) -> None:
        self._metrics = metrics
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)
        self._began = self._hours_before = 0.0

    def on_start(self, trainer: TrainerView) -> None:
        self._began = time.monotonic()
        self._marks.append((self._began, trainer.consumed_samples))
        if trainer.iteration > 0 and self._metrics is not None and self._metrics.is_file():
            told = re.findall(r'"device_hours": ([\d.]+(?:e[+-]?\d+)?)', self._metrics.read_text(errors="replace"))
            self._hours_before = float(told[-1]) if told else 0.0

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        now, samples, world = time.monotonic(), trainer.consumed_samples, trainer.mesh.size("world")
        self._marks.append((now, samples))
        before, first = self._marks[0]
        left = max(0, trainer.config.total_train_samples(world) - samples)
        if samples > first:
            record["eta_s"] = left * (now - before) / (samples - first)
        record["device_hours"] = self._hours_before + world * (now - self._began) / 3600


class JsonlHook(Hook):
    """Appends every record to `metrics.jsonl`, one JSON object a line, flushed at once.

    A resumed run appends to the file of the run it continues, after a new `"start"` line; where an iteration then
    appears twice, the later line holds (`read_metrics` applies that rule). Values that are not finite become null,
    because JSON has no word for them.
    """

    def __init__(self, path: Path, start_facts: Record | None = None) -> None:
        self._path = path
        self._start_facts = start_facts or {}
        self._file: TextIO | None = None

    def on_start(self, trainer: TrainerView) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._write(
            {
                "kind": "start",
                "iteration": trainer.iteration,
                "consumed_samples": trainer.consumed_samples,
                "consumed_tokens": trainer.consumed_tokens,
                "train_iters": trainer.train_iters,
                "layout": str(trainer.mesh),
                "world_size": trainer.mesh.size("world"),
                "device": trainer.device.type,
                "flops_convention": FLOPS_CONVENTION,
                "megalite_version": __version__,
                "torch_version": torch.__version__,
                **self._start_facts,
            }
        )

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        self._write(record)

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self._write(summary)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        time = datetime.now().astimezone().isoformat(timespec="milliseconds")
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps({**finite, "time": time}, allow_nan=False) + "\n")
        self._file.flush()


class SamplesHook(Hook):
    """Appends a line for each sample to `samples.jsonl`. Where an iteration is there twice, after a resume, the later
    lines hold. They are written before the checkpoint of their iteration."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_samples(self, trainer: TrainerView, records: list[Record]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(self._path)
        # A lone surrogate becomes `\ud800`, which is how JSON spells it.
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


class PictureHook(Hook):
    """At the end: a picture of the loss beside metrics.jsonl, and the last line, which names it and the report."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        if not self._metrics.is_file():  # a device has no end
            return
        picture = loss_picture(self._metrics.parent.name, read_metrics(self._metrics))
        if picture is not None:
            path = self._metrics.with_name(PICTURE_FILE)
            path.write_text(picture, encoding="utf-8")
            sys.stdout.write(f" loss: {path}; all curves: {typed('report')} {flag_of('load')} {path.parent}\n")
            sys.stdout.flush()


def read_metrics(path: Path, *, every: bool = False) -> list[Record]:
    """Read a `metrics.jsonl`: its records in order, of those with the same kind and iteration only the last, or `every`
    one.

    A line that a killed process left unfinished is passed over. Raises DataError naming the first that is whole and
    wrong.
    """
    if every:
        return [*_records(path)]
    latest: dict[tuple[Any, ...], Record] = {}
    for number, record in enumerate(_records(path)):
        kind = record.get("kind")
        named = record.get("set") or record.get("task")
        of = (number,) if kind in ("start", "summary") else (record.get("iteration"), named)
        latest.pop(key := (kind, *of), None)
        latest[key] = record
    return list(latest.values())


def _records(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line.decode())
            except json.JSONDecodeError:
                continue
            except ValueError:
                record = None
            if (wrong := _wrong(record)) and line.endswith(b"\n"):
                raise DataError(f"{path}: line {number} {wrong}; the file is damaged: mend or remove that line")
            if not wrong:
                yield record


def _wrong(record: Any) -> str | None:
    """Says why a line is not a record that a run has written; None: it is one."""
    if not isinstance(record, dict) or type(record.get("kind")) is not str:
        return "is no record"
    if type(record.get("iteration")) is not int:
        return "has no iteration"
    for name in ("lm_loss", "grad_norm") if record["kind"] == "train" else ():
        if name not in record:
            return f"has no {name}"
        if type(record[name]) not in (int, float, NoneType):
            return f"has {record[name]!r:.40} for {name}, which is no number"
    return None


def _end_torn_line(path: Path) -> None:
    """Finish the line that a killed process may have left without its end, so that the next stands by itself."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


class ProfileHook(Hook):
    """Traces iterations `--profile-step-start` to `--profile-step-end` (exclusive) with torch's profiler.

    Writes a Chrome trace, `trace_rank0_iterations_10-11.json`, for a browser's tracing page or ui.perfetto.dev. Each
    action of `executor` is a span of the trace by its `words`, e.g. `forward s1 mb3`.
    """

    def __init__(self, directory: Path, executor: Executor | None = None) -> None:
        self._directory, self._executor = directory, executor
        self._profiler: torch.profiler.profile | None = None

    def on_start(self, trainer: TrainerView) -> None:
        self._start_before(trainer, trainer.iteration + 1)

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        if self._profiler is not None and stats.iteration + 1 >= trainer.config.logging.profiling.profile_step_end:
            self._stop(trainer.mesh.rank, stats.iteration)
        self._start_before(trainer, stats.iteration + 1)

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        if self._profiler is not None:
            self._stop(trainer.mesh.rank, trainer.iteration)

    def _start_before(self, trainer: TrainerView, iteration: int) -> None:
        window = trainer.config.logging.profiling
        if self._profiler is None and window.profile_step_start <= iteration < window.profile_step_end:
            self._first = iteration
            activities = [torch.profiler.ProfilerActivity.CPU]
            if trainer.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()
            if self._executor is not None:
                self._executor.mark = torch.profiler.record_function

    def _stop(self, rank: int, last: int) -> None:
        assert self._profiler is not None
        if self._executor is not None:
            self._executor.mark = None
        self._profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"trace_rank{rank}_iterations_{self._first}-{last}.json"
        self._profiler.export_chrome_trace(str(self._directory / name))
        self._profiler = None
