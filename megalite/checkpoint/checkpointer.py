"""`Checkpointer`: what the trainer sees. Collective over its axis; an axis of one rank needs no communication."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megalite.checkpoint.background import PendingSaves, StagingMemory, settle, staging_problem
from megalite.checkpoint.format import BLOCK_BYTES, checksum
from megalite.checkpoint.loading import RankLoad, verify_checkpoint
from megalite.checkpoint.local import LocalSaves
from megalite.checkpoint.lock import RunLock
from megalite.checkpoint.reshard import SavePlan
from megalite.checkpoint.run_dir import committed, directory_name, remove_interrupted, retain, set_aside_newer, step_of
from megalite.checkpoint.saving import Description, SaveJob, check_space, describe, make_plan, new_id, raise_first
from megalite.checkpoint.start_decision import decide_start
from megalite.comm import Axis, GatheredJson, TensorShard, all_gather_json, patiently
from megalite.errors import CheckpointError
from megalite.faults import fault_point
from megalite.files import staging_folder
from megalite.progress import LINES, ProgressBar, amount
from megalite.stores import Place, StoreUrl, place, run_place

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads named rectangles under `directory`.

    Every method without "local" in its first line is collective over `world`: all ranks call it with the same step and
    path, and if one of them fails, all raise the same CheckpointError.

    directory: the run directory (`--save`), made by the first save, or a URL of a store.
    staging: of a URL: the folder of this host in which saves wait for their upload. lock: which rank 0 holds.
    world: the axis of all ranks; `Axis.single("world")` for one process.
    keep_last: how many checkpoints stay (`--keep-last`); None keeps all. Others are deleted after the next commit.
    retain_interval: checkpoints at multiples of it stay forever (`--save-retain-interval`). local: saves on hosts.
    """

    def __init__(
        self,
        directory: Place | str,
        *,
        world: Axis,
        staging: Path | None = None,
        lock: RunLock | None = None,
        keep_last: int | None = None,
        retain_interval: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        local: LocalSaves | None = None,
    ) -> None:
        self.directory = run_place(directory)
        on_disk = self.directory if isinstance(self.directory, Path) else None
        self._staging = on_disk or staging or Path(staging_folder(str(self.directory)))
        self.world = world
        self._keep_last, self._retain_interval, self._block_bytes = keep_last, retain_interval, block_bytes
        self._swept = False
        self._plan: tuple[list[tuple[str, Any]], SavePlan] | None = None
        self._last: Place | None = None
        self._lock, self.local = lock, local
        self.in_store = isinstance(self.directory, StoreUrl)
        self.pending = PendingSaves(world.rank, world.size)
        self._in_flight = False
        self.committed_at = time.time()  # of the start, until something is
        self._memory = StagingMemory()
        self.after_upload: Callable[[], None] | None = None

    # ---- saving

    def save(
        self,
        step: int,
        shards: Sequence[TensorShard],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        background: bool = False,
    ) -> Place:
        """Writes a checkpoint and returns its directory once it is committed and durable; one that goes to a store once
        this host's disk has it (`wait` waits for the rest).

        shards: all that this rank holds; together the ranks' shards with replica 0 must cover every logical tensor
            exactly once. Copies (replica 1, 2, ...) are not written twice, but share the work.
        meta: a JSON object, rank 0's is stored. files: name -> content, rank 0's are stored.
        background: return as soon as the values are copied, with what the directory will be called. The next save
            waits for this one and raises if it has failed; call `wait` before exit.
        A checkpoint of `step` that this object has just committed is returned as it is. Raises CheckpointError.
        """
        if self.in_store:
            patiently(self.pending.wait_for_room, self.world)
            settle(self.pending, self.pending.failure, self.local, self.world)
        else:
            self.wait()
        if self._last is not None and self._last.name == directory_name(step):
            return self._last
        started = time.perf_counter()
        job = self._prepare(step, shards, meta, files or {})
        done = partial(self._after_commit, job, started)
        self._in_flight = self._in_flight or background or self.in_store
        if background:
            if self.in_store:
                patiently(self.pending.wait_written, self.world)  # the copy's memory is free again
            problem = None
            try:
                job = replace(job, parts=self._memory.copy(job.parts))
            except (MemoryError, RuntimeError) as error:
                first = str(error).splitlines()[0]
                problem = f"`async_save`: no host memory for a copy of this rank's part ({first})"
            self._together(problem)
            self.pending.add(job, done, background=True)
        elif self.in_store:
            staged = patiently(partial(self.pending.add, job, done, background=False), self.world)
            assert staged is not None
            settle(self.pending, staged.problem if staged.final else None, self.local, self.world)
        else:
            reports = all_gather_json(patiently(job.write_part, self.world), self.world)
            commit = partial(job.try_commit, reports, done) if self.world.is_first else None
            self._together(patiently(commit, self.world))
        self._last = job.final
        return job.final

    def save_locally(
        self, step: int, shards: Sequence[TensorShard], meta: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> bool:
        """`save` on the hosts themselves; whether that has succeeded."""
        return self.local is not None and self.local.save(self._prepare(step, shards, meta, files, local=True))

    def check_room(self, shards: Sequence[TensorShard]) -> None:
        """Checks that what `save` would write now fits on the disk, before training finds out hours later. Leftovers of
        interrupted saves are removed first. Raises CheckpointError."""
        plan = self._agree_on_plan(shards)

        def look() -> None:
            self._sweep()
            if isinstance(self.directory, Path):
                check_space(self.directory, plan.nbytes)

        self.on_first(look)
        if self.local is not None:
            self.local.check_room(plan.nbytes)
        if self.in_store:
            here = len(self.local.mine) if self.local is not None else 1
            self._together(staging_problem(self._staging, plan.nbytes * here // self.world.size))

    def _sweep(self) -> None:
        if not self._swept:
            remove_interrupted(self.directory)
            self._swept = True

    @property
    def failure(self) -> str | None:
        """Local: why the save in flight has failed, as far as this rank knows; `wait` raises it on all ranks."""
        return self.pending.failure

    def wait(self) -> None:
        """Waits until no save is in flight. Raises CheckpointError, on all ranks, if it has failed."""
        if not self._in_flight:
            return
        last, self._last = self._last, None
        # Own part first, then a collective: where a peer has died that fails, instead of waiting for its report.
        sent, committed = (partial(self.pending.wait, committed=what) for what in (False, True))
        settle(self.pending, patiently(sent, self.world), self.local, self.world)
        self.pending.hand_over(all_gather_json(self.pending.reports, self.world))
        settle(self.pending, patiently(committed if self.world.is_first else None, self.world), self.local, self.world)
        self._last, self._in_flight = last, False

    def hasten(self) -> None:
        """Local: the run is to end, so a store that does not answer is not waited for. Safe in a signal's handler."""
        if isinstance(self.directory, StoreUrl):
            self.directory.store.hasten()

    def _prepare(
        self,
        step: int,
        shards: Sequence[TensorShard],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes],
        *,
        local: bool = False,
    ) -> SaveJob:
        """What `save` has to do, or `save_locally` with `local`."""
        rank = self.world.rank
        fault_point("save.begin", rank=rank, step=step)
        plan = self._agree_on_plan(shards)
        parts = SaveJob.parts_of(shards, plan.of(rank))
        save_id = self.on_first(new_id if local else partial(self._stage, step, plan.nbytes))
        staging = self._staging / f"{directory_name(step)}.tmp-{save_id}"
        if self.in_store and not local:  # each rank's own: the ranks of a host are done with it at different times
            staging = staging.with_name(f"{staging.name}-{rank}")
            staging.mkdir(parents=True, exist_ok=True)
        size, lock = self._block_bytes, self._lock
        return SaveJob(self.directory, staging, step, save_id, rank, plan, parts, meta, files, size, lock)

    def _stage(self, step: int, needed: int) -> str:
        """Rank 0: makes the staging directory and returns the save's id."""
        save_id = new_id()
        if isinstance(self.directory, StoreUrl):
            return save_id  # the store is not asked: it may be gone, and the commit creates or fails
        final, advice = self.directory / directory_name(step), "choose another `save`"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if final.exists():
                exists = f"`save`={self.directory}: {final.name} exists and is never overwritten; {advice}"
                raise CheckpointError(exists)
            self._sweep()
            check_space(self.directory, needed)
            final.with_name(f"{final.name}.tmp-{save_id}").mkdir()
        except OSError as error:
            raise CheckpointError(f"`save`={self.directory}: cannot write there ({error.strerror}); {advice}") from None
        return save_id

    def _agree_on_plan(self, shards: Sequence[TensorShard]) -> SavePlan:
        """Plans who writes what. The descriptions travel only when some rank's have changed since the last save."""
        problem = None
        own = Description([], [])
        try:
            own = describe(shards)
        except CheckpointError as error:
            problem = error.text
        gathered = all_gather_json([problem, checksum(json.dumps(own.rows).encode()), own.replicas], self.world)
        raise_first([problem for problem, *_ in gathered])
        heads = [(digest, replicas) for _, digest, replicas in gathered]
        if self._plan is None or self._plan[0] != heads:
            digests = [digest for digest, _ in heads]  # of ranks with equal shards only the first describes them
            speaks = digests.index(digests[self.world.rank]) == self.world.rank
            rows = all_gather_json(own.rows if speaks else None, self.world)
            kinds = {digest: rows[rank] for rank, digest in reversed(list(enumerate(digests)))}
            whole = [Description(kinds[digest], replicas) for digest, replicas in heads]
            self._plan = (heads, make_plan(whole))
        return self._plan[1]

    def _after_commit(self, job: SaveJob, started: float) -> None:
        self.committed_at, seconds = time.time(), time.perf_counter() - started
        logger.info("saved %s (%s in %.2f s)", job.final, amount(job.plan.nbytes, "B"), seconds)
        retain(self.directory, keep_last=self._keep_last, retain_interval=self._retain_interval)
        if self.after_upload is not None:
            self.after_upload()

    # ---- loading

    def decide_start(self, *, save: str | None, **how: Any) -> Place | None:
        """The checkpoint that a run begins with (see start_decision.py), None for a fresh start. With `auto_resume`
        damaged checkpoints are passed over, each with a warning; if none of them is whole that is an error, never a
        fresh start. Raises CheckpointError."""
        names = self.on_first(lambda: [str(path) for path in decide_start(save=save, **how)])
        candidates = [place(name) for name in names]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        damaged = []
        for path in candidates:
            with ProgressBar("verifying", "B", lines=LINES if self.world.is_first else 0) as bar:
                share, shares = self.world.rank, self.world.size
                look = partial(verify_checkpoint, path, share=share, shares=shares, on_progress=bar)
                found = patiently(look, self.world)
            problems = [line for lines in all_gather_json(found, self.world) for line in lines]
            if not problems:
                return path
            damaged.append(problems[0])
            if self.world.is_first:
                logger.warning("`auto_resume`: passed over: %s", problems[0])
        raise CheckpointError(f"`auto_resume`: no checkpoint of {save} is whole: {damaged[0]}")

    def go_back(self, step: int) -> Place | None:
        """The newest committed checkpoint up to `step`; those that are newer are put aside (renamed). None: there is
        none, and nothing is renamed."""
        self.wait()

        def look() -> str | None:
            old = [path for path in committed(self.directory) if step_of(path) <= step]
            for path in set_aside_newer(self.directory, step_of(old[-1])) if old else ():
                logger.warning("put aside: %s", path.name)
                fault_point("rollback.put_aside", rank=self.world.rank)
            return str(old[-1]) if old else None

        found = self.on_first(look)
        back = None if found is None else place(found)
        self._last = back or self._last
        if back is not None and self.local is not None:
            self.local.drop_after(step_of(back))
        return back

    def load(self, path: Place | str, shards: Sequence[TensorShard], *, cast: bool = False) -> dict[str, Any]:
        """Fills `shard.local` of all shards from a checkpoint of any layout and returns its meta.

        Every element is verified and set exactly once; a rank reads only the blocks that it needs, with one block of
        memory. dtypes must be equal unless `cast`. Stored weights that no rank asks for are an error; optimizer state
        is left out with a log line. Raises CheckpointError naming the tensor or the damaged file; the shards' values
        are then unspecified.
        """
        started = time.perf_counter()
        mine = RankLoad(place(path), shards, cast=cast)
        scattered = self.local is not None and self.local.fetch(mine.path, mine.files)
        gathering = GatheredJson([mine.problem, mine.save_id, mine.mask], self.world)
        # The message travels while the first block is read; what it says is known before more is read.
        mine.read_first(rank=self.world.rank, all_here=not scattered)
        manifest = mine.agree(gathering.wait(), speaks=self.world.is_first)
        patiently(mine.read_rest, self.world)
        self._together(mine.problem)
        seconds = time.perf_counter() - started
        logger.info("loaded %s (%s on this rank in %.2f s)", mine.path, amount(mine.nbytes, "B"), seconds)
        return dict(manifest.meta)

    # ---- agreement

    def on_first(self, call: Callable[[], Any]) -> Any:
        """Calls on rank 0 and returns its result (JSON) on all ranks; all raise its CheckpointError."""
        answer = problem = None
        if self.world.is_first:
            try:
                answer = call()
            except (CheckpointError, OSError) as error:
                problem = error.text if isinstance(error, CheckpointError) else str(error)
        answer, problem = all_gather_json([answer, problem], self.world)[0]
        if problem:
            raise CheckpointError(problem)
        return answer

    def _together(self, problem: str | None) -> None:
        raise_first(all_gather_json(problem, self.world))
