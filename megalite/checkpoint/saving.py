"""One save, seen from one rank: what it writes, and how the coordinator commits. No collective in here.

The two ways of saving share this file; they differ in where the values come from (the live tensors, or a copy of them)
and in how the ranks' reports reach the coordinator (a collective, or files in the staging directory).
"""

import gc
import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megalite.checkpoint.format import (
    BLOCK_BYTES,
    DTYPE_NAMES,
    ExtraFile,
    Manifest,
    StoredFile,
    StoredTensor,
    check_file_name,
    checksum,
    file_from_json,
    file_to_json,
    tiling_problem,
)
from megalite.checkpoint.lock import RunLock
from megalite.checkpoint.remote import HopelessSave, commit_in_store
from megalite.checkpoint.reshard import HeldRectangle, SavePlan, share_out
from megalite.checkpoint.run_dir import directory_name, write_tracker
from megalite.checkpoint.storage import publish, write_file, write_proof, write_shard_file
from megalite.comm import TensorShard
from megalite.errors import CheckpointError
from megalite.faults import fault_point
from megalite.inventory import Box
from megalite.progress import amount
from megalite.stores import Place, StoreUrl

logger = logging.getLogger(__name__)

SaveReport = dict[str, Any]


def space_line(needed: int, directory: Path) -> str:
    """`a checkpoint needs ~2.3 GB, 1.1 GB free on /mnt/x`."""
    free, place = free_space(directory)
    return f"a checkpoint needs ~{amount(needed, 'B')}, {amount(free, 'B')} free on {place}"


def new_id() -> str:
    """Tells a save from all others."""
    return uuid.uuid4().hex[:12]


def free_space(directory: Path) -> tuple[int, Path]:
    """Bytes that are free where a directory is or will be, and the nearest one up from it that exists."""
    place = directory.absolute()
    while not place.is_dir():
        place = place.parent
    return shutil.disk_usage(place).free, place


def check_space(directory: Path | str, needed: int) -> None:
    """Raises CheckpointError where `needed` bytes do not fit into what is free under `directory`."""
    if free_space(Path(directory))[0] < needed:
        advice = "free some space or choose another `save`"
        raise CheckpointError(f"`save`={directory}: {space_line(needed, Path(directory))}; {advice}")


def first_problem(problems: Sequence[str | None]) -> str | None:
    """One line out of the ranks' problems: the first, with its rank unless all ranks say the same."""
    said = [(rank, problem) for rank, problem in enumerate(problems) if problem]
    if not said:
        return None
    rank, problem = said[0]
    alike = len(problems) == 1 or (len(said) == len(problems) and len({text for _, text in said}) == 1)
    return problem if alike else f"{problem} [rank {rank}]"


def raise_first(problems: Sequence[str | None]) -> None:
    """Raises CheckpointError with the first problem, if there is one."""
    if agreed := first_problem(problems):
        raise CheckpointError(agreed)


class Description(NamedTuple):
    """Description of a rank's shards for the others. rows: name, dtype, whole shape, offset and shape of each, equal on
    ranks that hold copies; replicas: which copy it is, as [number, how many shards in a row]."""

    rows: list[list[Any]]
    replicas: list[list[int]]


def describe(shards: Sequence[TensorShard]) -> Description:
    """The description of its shards that a rank sends to the others (JSON). Raises CheckpointError for a dtype that the
    format does not support."""
    rows = []
    for shard in shards:
        dtype = DTYPE_NAMES.get(shard.local.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {shard.name}: {shard.local.dtype} cannot be stored")
        rows.append([shard.name, dtype, list(shard.global_shape), list(shard.offset), list(shard.local.shape)])
    runs = [[replica, len(list(alike))] for replica, alike in groupby(shard.replica for shard in shards)]
    return Description(rows, runs)


@contextmanager
def without_gc() -> Iterator[None]:
    """Suspends garbage collection, where many objects are made and none of them in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_gc()
def make_plan(descriptions: Sequence[Description]) -> SavePlan:
    """The plan from all ranks' `describe`; the same on every rank. Ranks whose `rows` are one object are looked at
    once. Raises CheckpointError where ranks disagree about a tensor or the shards do not cover it exactly once."""
    tensors: dict[str, StoredTensor] = {}
    places: dict[int, int] = {}
    kinds = [places.setdefault(id(description.rows), len(places)) for description in descriptions]
    members: list[list[int]] = [[] for _ in places]
    for rank, kind in enumerate(kinds):
        members[kind].append(rank)
    holdings = []
    for ranks in members:
        rows = descriptions[ranks[0]].rows
        copies = [[n for n, count in descriptions[rank].replicas for _ in range(count)] for rank in ranks]
        first = np.array(copies).min(0).tolist() if len(ranks) > 1 else copies[0]
        holdings.append(_rectangles(rows, first, ranks[0], tensors))
    plan = share_out(tensors, holdings, kinds)
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in plan.writers:
        boxes[name].append(box)
    problem_of = cache(tiling_problem)  # moments are cut as their weights, layers alike: looked at once
    for name, tensor in tensors.items():
        if problem := problem_of(tuple(boxes[name]), tensor.shape):
            raise CheckpointError(f"tensor {name}: {problem}: the shards given to save() are not the whole tensor")
    return plan


def write_whole(
    staging: Path,
    layers: Iterable[Mapping[str, Tensor]],
    files: Mapping[str, bytes],
    meta: Callable[[Mapping[str, StoredTensor]], Mapping[str, Any]],
    step: int = 0,
) -> None:
    """Writes a checkpoint of iteration `step` from one process into a staging directory; it is not published. layers:
    whole tensors by name, a file for each layer. files: name -> content. meta: from all tensors. Raises OSError."""
    save_id = new_id()
    tensors: dict[str, StoredTensor] = {}
    stored: dict[str, StoredFile] = {}
    for number, layer in enumerate(layers):
        parts = [TensorShard(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in layer.items()]
        tensors |= {name: StoredTensor(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in layer.items()}
        file_name = f"rank_{number:05d}.safetensors"
        stored[file_name] = write_shard_file(staging / file_name, parts, save_id=save_id, block_bytes=BLOCK_BYTES)
    extra = {name: ExtraFile(len(data), write_file(staging / name, data)) for name, data in files.items()}
    write_proof(staging, Manifest(step, save_id, 1, tensors, stored, extra, meta(tensors)))


def _rectangles(
    rows: Sequence[Sequence[Any]], replicas: Sequence[int], rank: int, tensors: dict[str, StoredTensor]
) -> list[HeldRectangle]:
    """The rectangles that a rank of this kind holds; its tensors are added to `tensors`."""
    mine = []
    for (name, dtype, global_shape, offset, shape), replica in zip(rows, replicas, strict=True):
        tensor, whole = tensors.get(name), tuple(global_shape)
        if tensor is None:
            tensor = tensors[name] = StoredTensor(dtype, whole)
        elif tensor.dtype != dtype or tensor.shape != whole:
            this = StoredTensor(dtype, whole)
            raise CheckpointError(f"tensor {name}: rank {rank} has {this}, another rank {tensor}")
        mine.append(HeldRectangle(name, Box(tuple(offset), tuple(shape)), replica))
    return mine


@dataclass(frozen=True)
class SaveJob:
    """Everything one rank needs to write its part and, on rank 0, to commit."""

    directory: Place
    staging: Path
    step: int
    save_id: str
    rank: int
    plan: SavePlan
    parts: Sequence[TensorShard]
    meta: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    lock: RunLock | None = None
    flag: str = "save"

    @staticmethod
    def parts_of(shards: Sequence[TensorShard], duties: Mapping[int, Box]) -> list[TensorShard]:
        """What a rank writes, as views of its shards. duties: from `SavePlan.of`."""
        parts = []
        for index, box in duties.items():
            shard = shards[index]
            values = shard.local.detach()[box.slices_in(shard.box)]
            parts.append(TensorShard(shard.name, shard.global_shape, box.offset, values))
        return parts

    @property
    def final(self) -> Place:
        return self.directory / directory_name(self.step)

    def write_part(self) -> SaveReport:
        """Writes this rank's file. Never raises: a failure is part of the report, so that all ranks learn of it."""
        try:
            if not self.parts:
                return {}

            def half() -> None:
                fault_point("save.half_shard", rank=self.rank, step=self.step)

            name = f"rank_{self.rank:05d}.safetensors"
            path, size = self.staging / name, self.block_bytes
            stored = write_shard_file(path, self.parts, save_id=self.save_id, block_bytes=size, on_half=half)
            fault_point("save.shard_written", rank=self.rank, step=self.step)
            return {"file": name, "entry": file_to_json(stored)}
        except Exception as error:  # whatever it is, the other ranks must not wait for a report that never comes
            return {"error": self.explain(error)}

    def commit(self, reports: Sequence[SaveReport]) -> None:
        """Rank 0: turns all ranks' reports into a committed checkpoint. Raises CheckpointError and OSError; in a store
        it can then be repeated."""
        if problem := first_problem([report.get("error") for report in reports]):
            raise HopelessSave(problem)
        final, tensors, staging = self.final, self.plan.tensors, self.staging
        entries = {report["file"]: report["entry"] for report in reports if report}
        manifest = Manifest(
            step=self.step,
            save_id=self.save_id,
            world_size=len(reports),
            tensors=tensors,
            files={n: file_from_json(e, n, tensors, self.block_bytes) for n, e in entries.items()},
            extra_files={
                check_file_name(name, "checkpoint"): ExtraFile(len(data), checksum(data))
                for name, data in self.files.items()
            },
            meta=self.meta,
            block_bytes=self.block_bytes,
        )
        fault_point("save.before_manifest", rank=self.rank, step=self.step)
        if isinstance(final, StoreUrl):
            commit_in_store(final, manifest, self.files, self.lock)
        else:
            for name, data in self.files.items():
                write_file(staging / name, data)
            write_proof(staging, manifest)
            fault_point("save.before_rename", rank=self.rank, step=self.step)
            publish(staging, final)
        fault_point("save.after_rename", rank=self.rank, step=self.step)
        write_tracker(self.directory, self.step)

    def try_commit(self, reports: Sequence[SaveReport], done: Callable[[], None] = lambda: None) -> str | None:
        """`commit` on a disk, then `done`. Returns what prevents it, if anything; nothing of the save stays then."""
        try:
            self.commit(reports)
        except Exception as error:
            shutil.rmtree(self.staging, ignore_errors=True)
            return self.explain(error)
        done()
        return None

    def explain(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"`{self.flag}`={self.directory}: {self.staging.name} is gone; do all hosts share this directory?"
        if isinstance(error, OSError):
            return (
                f"`{self.flag}`={self.directory}: could not write {error.filename or self.staging}: {error.strerror} "
                f"({space_line(self.plan.nbytes, self.staging.parent)}); older checkpoints are untouched"
            )
        if isinstance(error, CheckpointError):
            return error.text
        logger.exception("saving step %d failed", self.step)
        return f"`{self.flag}`={self.directory}: saving step {self.step} failed: {type(error).__name__}: {error}"
