"""`Checkpointer`: what the trainer sees. Collective over its axis; an axis of one rank needs no communication."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megalite.checkpoint.background import BackgroundSave, StagingMemory
from megalite.checkpoint.discovery import directory_name, remove_interrupted, resolve_checkpoint, retain
from megalite.checkpoint.format import BLOCK_BYTES, Manifest, checksum
from megalite.checkpoint.loading import RankLoad, unused_names
from megalite.checkpoint.run_dir import decide_start
from megalite.checkpoint.saving import SaveJob, SavePlan, bytes_text, check_space, describe, first_problem, make_plan
from megalite.checkpoint.storage import read_extra, read_manifest
from megalite.checkpoint.verify import STATE_PREFIXES, verify_checkpoint
from megalite.comm import Axis, GatheredJson, TensorShard, all_gather_json, patiently
from megalite.errors import CheckpointError
from megalite.faults import fault_point
from megalite.progress import LINES, ProgressBar

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads named rectangles under `directory`.

    Every method without "local" in its first line is collective over `world`: all ranks call it with the same step and
    path, and if one of them fails, all raise the same CheckpointError.

    Args:
        directory: the run directory (`--save`); made by the first save.
        world: the axis of all ranks; `Axis.single("world")` for one process.
        keep_last: how many checkpoints stay (`--keep-last`); None keeps all. The others are deleted after the next
            commit, never before.
        retain_interval: checkpoints at multiples of it stay forever (`--save-retain-interval`).
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        world: Axis,
        keep_last: int | None = None,
        retain_interval: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.directory = Path(directory)
        self._world = world
        self._keep_last, self._retain_interval = keep_last, retain_interval
        self._block_bytes = block_bytes
        self._swept = False
        self._plan: tuple[list[str], SavePlan] | None = None
        self._last: Path | None = None
        self._memory = StagingMemory()
        self._flight: BackgroundSave | None = None

    @property
    def world(self) -> Axis:
        """The axis of all ranks."""
        return self._world

    # ---- saving

    def save(
        self,
        step: int,
        shards: Sequence[TensorShard],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Writes a checkpoint and returns its directory once it is committed and durable.

        shards: all that this rank holds; together the ranks' shards with replica 0 must cover every logical tensor
            exactly once. Copies (replica 1, 2, ...) are not written twice, but share the work.
        meta: a JSON object, rank 0's is stored. files: name -> content, rank 0's are stored.
        A checkpoint of `step` that this object has just committed is returned as it is. Raises CheckpointError.
        """
        self.wait()
        if self._last is not None and self._last.name == directory_name(step):
            return self._last
        started = time.perf_counter()
        job = self._prepare(step, shards, meta, files or {})
        reports = all_gather_json(patiently(job.write_part, self._world), self._world)

        def commit() -> str | None:
            problem = job.commit(reports)
            if problem is None:
                self._after_commit(job, started)
            return problem

        self._together(patiently(commit if self._world.is_first else None, self._world))
        self._last = job.final
        return job.final

    def save_async(
        self,
        step: int,
        shards: Sequence[TensorShard],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """As `save`, but returns as soon as the values are copied; returns what the directory will be called.

        Waits for the save before it, if that is still in flight, and raises if it has failed. Call `wait` before exit.
        """
        self.wait()
        if self._last is not None and self._last.name == directory_name(step):
            return self._last
        started = time.perf_counter()
        job = self._prepare(step, shards, meta, files or {})
        problem = None
        try:
            job = job.with_parts(self._memory.copy(job.parts))
        except (MemoryError, RuntimeError) as error:
            problem = f"--async-save: no host memory for a copy of this rank's part ({str(error).splitlines()[0]})"
        self._together(problem)
        self._flight = BackgroundSave(job, self._world.size, lambda: self._after_commit(job, started))
        return job.final

    def check_room(self, shards: Sequence[TensorShard]) -> None:
        """Checks that what `save` would write now fits on the disk, before training finds out hours later.

        Leftovers of interrupted saves are removed first. Raises CheckpointError.
        """
        plan, problem = self._agree_on_plan(shards), None
        if self._world.is_first:
            try:
                self._sweep()
                check_space(self.directory, plan.nbytes)
            except (CheckpointError, OSError) as error:
                problem = str(error)
        self._together(problem)

    def _sweep(self) -> None:
        if not self._swept:
            remove_interrupted(self.directory)
            self._swept = True

    @property
    def failure(self) -> str | None:
        """Local: why the save in flight has failed, as far as this rank knows.

        For the trainer's once-a-step agreement; `wait` then raises it on all ranks.
        """
        return self._flight.problem if self._flight else None

    def wait(self) -> None:
        """Waits until no save is in flight. Raises CheckpointError, on all ranks, if it has failed."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        # Own part first, then a collective: if a peer has died, that fails here instead of waiting forever for its
        # report.
        reports = all_gather_json(flight.wait_written(), self._world)
        self._together(flight.finish(reports))
        self._last = flight.job.final

    def _prepare(
        self, step: int, shards: Sequence[TensorShard], meta: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> SaveJob:
        fault_point("save.begin", rank=self._world.rank, step=step)
        plan = self._agree_on_plan(shards)
        save_id, problem = uuid.uuid4().hex[:12], None
        if self._world.is_first:
            problem = self._stage(step, save_id, plan.nbytes)
        save_id, problem = all_gather_json([save_id, problem], self._world)[0]
        if problem:
            raise CheckpointError(problem)
        return SaveJob(
            directory=self.directory,
            staging=self.directory / f"{directory_name(step)}.tmp-{save_id}",
            step=step,
            save_id=save_id,
            rank=self._world.rank,
            plan=plan,
            parts=SaveJob.parts_of(shards, plan.duties[self._world.rank]),
            meta=meta,
            files=files,
            block_bytes=self._block_bytes,
        )

    def _stage(self, step: int, save_id: str, needed: int) -> str | None:
        """Rank 0: makes the staging directory. Returns what prevents it."""
        final = self.directory / directory_name(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if final.exists():
                name = final.name
                return f"--save={self.directory}: {name} exists and is never overwritten; choose another --save"
            self._sweep()
            check_space(self.directory, needed)
            (self.directory / f"{final.name}.tmp-{save_id}").mkdir()
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"--save={self.directory}: cannot write there ({error.strerror}); choose another --save"
        return None

    def _agree_on_plan(self, shards: Sequence[TensorShard]) -> SavePlan:
        """Who writes what. The descriptions travel only when some rank's have changed since the last save."""
        problem, rows = None, []
        try:
            rows = describe(shards)
        except CheckpointError as error:
            problem = str(error)
        told = all_gather_json([problem, checksum(json.dumps(rows).encode())], self._world)
        _raise_first([problem for problem, _ in told])
        hashes = [digest for _, digest in told]
        if self._plan is None or self._plan[0] != hashes:
            self._plan = (hashes, make_plan(all_gather_json(rows, self._world)))
        return self._plan[1]

    def _after_commit(self, job: SaveJob, started: float) -> None:
        seconds = time.perf_counter() - started
        logger.info("saved %s (%s in %.2f s)", job.final, bytes_text(job.plan.nbytes), seconds)
        retain(self.directory, keep_last=self._keep_last, retain_interval=self._retain_interval)

    # ---- loading

    def decide_start(
        self, *, save: str | None, load: str | None, auto_resume: bool = False, ckpt_step: int | None = None
    ) -> Path | None:
        """The checkpoint that a run begins with (see run_dir.py), None for a fresh start.

        With `auto_resume` damaged checkpoints are passed over, each with a warning; if none of them is whole that is an
        error, never a fresh start. Raises CheckpointError.
        """
        start, problem = None, None
        if self._world.is_first:
            try:
                start = decide_start(save=save, load=load, auto_resume=auto_resume, ckpt_step=ckpt_step)
                logger.info(start.reason)
                for path in start.passed_over:
                    logger.warning("passed over %s: newer, but it has no COMMITTED file", path)
            except CheckpointError as error:
                problem = str(error)
        self._together(problem)
        names = [str(path) for path in start.candidates] if start else []
        candidates = [Path(name) for name in all_gather_json(names, self._world)[0]]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        damaged = []
        for path in candidates:
            with ProgressBar("verifying", "B", lines=LINES if self._world.is_first else 0) as bar:
                look = partial(
                    verify_checkpoint, path, share=self._world.rank, shares=self._world.size, on_progress=bar
                )
                share = patiently(look, self._world)
            problems = [line for lines in all_gather_json(share, self._world) for line in lines]
            if not problems:
                return path
            damaged.append(problems[0])
            if self._world.is_first:
                logger.warning("--auto-resume: passed over: %s", problems[0])
        raise CheckpointError(f"--auto-resume: no checkpoint of {save} is whole: {damaged[0]}")

    def find(self, load: Path | str, ckpt_step: int | None = None) -> Path:
        """The checkpoint that `--load` and `--ckpt-step` mean, as rank 0 sees the directory. Raises CheckpointError."""
        found, problem = None, None
        if self._world.is_first:
            try:
                found = str(resolve_checkpoint(load, ckpt_step))
            except CheckpointError as error:
                problem = str(error)
        self._together(problem)
        return Path(all_gather_json(found, self._world)[0])

    def load(self, path: Path | str, shards: Sequence[TensorShard], *, cast: bool = False) -> dict[str, Any]:
        """Fills `shard.local` of all shards from a checkpoint of any layout and returns its meta.

        Every element is verified and set exactly once; a rank reads only the blocks that it needs, with one block of
        memory. dtypes must be equal unless `cast`. Stored weights that no rank asks for are an error; optimizer state
        is left out with a log line. Raises CheckpointError naming the tensor or the damaged file; the shards' values
        are then unspecified.
        """
        started = time.perf_counter()
        mine = RankLoad(Path(path), shards, cast=cast)
        told = GatheredJson([mine.problem, mine.save_id, mine.mask], self._world)
        # The message travels while the first rectangle is read; what it says is known before more is read.
        mine.read_first(rank=self._world.rank)
        manifest = self._agree_on_load(mine, told.wait())
        patiently(mine.read_rest, self._world)
        self._together(mine.problem)
        seconds = time.perf_counter() - started
        logger.info("loaded %s (%s on this rank in %.2f s)", mine.path, bytes_text(mine.nbytes), seconds)
        return dict(manifest.meta)

    def _agree_on_load(self, mine: RankLoad, told: Sequence[tuple[str | None, str, str]]) -> Manifest:
        """Raises CheckpointError, on all ranks alike, where the ranks' plans do not add up to one load."""
        _raise_first([problem for problem, _, _ in told])
        assert mine.manifest is not None
        if any(save_id != told[0][1] for _, save_id, _ in told):
            raise CheckpointError(
                f"{mine.path}: the ranks see different checkpoints; is the directory shared by all hosts?"
            )
        unused = unused_names(mine.manifest, [mask for _, _, mask in told])
        weights = [name for name in unused if not name.startswith(STATE_PREFIXES)]
        if weights:
            more = f" (and {len(weights) - 3} more)" if len(weights) > 3 else ""
            raise CheckpointError(f"{mine.path}: holds weights that this model lacks: {', '.join(weights[:3])}{more}")
        if unused and self._world.is_first:
            logger.info("%s: %d state tensors were not asked for and not loaded", mine.path, len(unused))
        return mine.manifest

    def names(self, path: Path | str) -> list[str]:
        """Local: the names of all stored tensors. Raises CheckpointError."""
        return list(read_manifest(Path(path)).tensors)

    def read_file(self, path: Path | str, name: str) -> bytes:
        """Local: a verified file that was saved with a checkpoint. Raises CheckpointError."""
        return read_extra(Path(path), read_manifest(Path(path)), name)

    # ---- agreement

    def _together(self, problem: str | None) -> None:
        """If any rank has a problem, all raise the first one."""
        _raise_first(all_gather_json(problem, self._world))


def _raise_first(problems: Sequence[str | None]) -> None:
    agreed = first_problem(problems)
    if agreed:
        raise CheckpointError(agreed)
