"""The run directory while a run uses it: lock, where to start, starts in vain, config.yaml, COMPLETED."""

from __future__ import annotations

import dataclasses
import json
import logging
import uuid
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from megalite.checkpoint import (
    COMPLETED_FILE,
    Checkpointer,
    LocalSaves,
    LocalSettings,
    check_model,
    check_names,
    check_state,
    latest,
    lock_of,
    send_along,
    set_aside_newer,
    step_of,
    sweep_staging,
    take_up,
    write_small,
)
from megalite.comm import Axis
from megalite.config import Config, dump_yaml
from megalite.convert import BaseModel
from megalite.errors import CheckpointError, ConfigError
from megalite.observe import RUN_FILES, Hook, Record, TrainerView
from megalite.stores import Place, StoreUrl, place
from megalite.train.starting_point import StartingPoint, open_start, settle_base

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
ATTEMPTS_FILE = "attempts.json"
MOST_ATTEMPTS = 3
LOCAL_TOKEN = "local_saves.txt"  # names the run whose saves on the hosts are this one's


class RunDirectory:
    """Holds `--save` from start to end; without `--save` only looks for what to load. A context manager on all ranks:
    rank 0 holds the lock, a refusal is raised everywhere. launch: names the launch, if its ranks are restarted after a
    failure: a lock that seems held may be that of a host which is lost. host: the name of this rank's."""

    def __init__(self, config: Config, world: Axis, launch: str = "", host: str = "localhost") -> None:
        self.config = config
        self.base: BaseModel | None = None
        self._world = world
        self._host = host
        self._continues = False
        self._save = config.checkpoint.save
        writes = self._save is not None and not config.training.skip_train
        locks = writes and world.is_first
        self._lock = lock_of(str(self._save), waits=bool(launch)) if locks else None
        self._held = ExitStack()
        self._attempts = Attempts(config.checkpoint.run_folder if locks else None, launch)
        checkpoint = config.checkpoint
        self._folder = None if checkpoint.run_folder is None else Path(checkpoint.run_folder)
        self.checkpointer = Checkpointer(
            checkpoint.save or checkpoint.load or ".",
            world=world,
            staging=self._folder,
            lock=self._lock,
            keep_last=checkpoint.kept,
            retain_interval=checkpoint.save_retain_interval,
        )

    def __enter__(self) -> RunDirectory:
        with ExitStack() as undone:
            if self._lock is not None:
                undone.callback(self._lock.release)
            self.checkpointer.on_first(self._take)
            self.checkpointer.local = self._local_saves()
            self._held = undone.pop_all()
        return self

    def _take(self) -> None:
        if self._lock is not None:
            self._lock.acquire()
            check_names(str(self._save), (CONFIG_FILE, *RUN_FILES))

    def _local_saves(self) -> LocalSaves | None:
        """The saves on the hosts themselves, if they are asked for; beside a store, of what that does not take.
        Collective. Raises CheckpointError."""
        given, kept = self.config.checkpoint.local, self.checkpointer.in_store
        asked = given.non_persistent_save_interval is not None
        if not (asked or kept) or self._folder is None or self.config.training.skip_train:
            return None
        if kept:
            sweep_staging(self._folder)
        if asked:
            fewer = self.config.parallel.restarts.elastic is not None
            in_memory = given.non_persistent_ckpt_type == "in_memory"
            folder = Path(given.folder).absolute()
            settings = LocalSettings(folder, in_memory, given.copies, given.replication_jump, fewer)
        else:
            settings = LocalSettings(self._folder.absolute(), kept=True)
        local = LocalSaves(settings, self._world, self._host)
        local.token = self.checkpointer.on_first(self._read_token)
        return local

    def _read_token(self) -> str:
        try:
            return (place(str(self._save)) / LOCAL_TOKEN).read_bytes().decode().strip()
        except (OSError, CheckpointError):
            return ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._held:
            if kind is None:
                self.checkpointer.wait()
                self._attempts.end()

    def start(self) -> StartingPoint | None:
        """What the run begins with, None for a fresh start; `config` takes the checkpoint's seed, `base` is the model
        beside adapters. Raises CheckpointError; ConfigError for a Hugging Face model that we do not have, and for
        adapters beside none."""
        start = self._start()
        self.base = settle_base(self.config, start, self._world)
        return start

    def _start(self) -> StartingPoint | None:
        checkpoint = self.config.checkpoint
        path = self._newest_local() or self.checkpointer.decide_start(
            save=checkpoint.save if not self.config.training.skip_train else None,
            load=checkpoint.load,
            auto_resume=checkpoint.auto_resume,
            ckpt_step=checkpoint.ckpt_step,
            trust_pickle=checkpoint.trust_pickle,
        )
        if path is None:
            # Adapters in a run that was to begin with a checkpoint and finds none: the flags alone did not tell that.
            rank = self.config.model.lora.lora_rank
            where = checkpoint.load or (checkpoint.save if checkpoint.auto_resume else None)
            if rank is not None and where is not None and not self.config.data.mock_data:
                raise ConfigError(
                    f"`lora_rank`={rank}: {where} holds no checkpoint, and the model beside the adapters would be "
                    "random; add `load` MODEL"
                )
            return None
        local = self.checkpointer.local
        own = local is not None and local.is_of(path)
        of_save = checkpoint.save is not None and path.resolve().parent == place(checkpoint.save).resolve()
        self._continues = own or of_save
        # Taken up again from `--save`: what was said of `--load` does not concern the run's own checkpoints.
        if own or (of_save and checkpoint.auto_resume and checkpoint.load is not None and not self._loads_itself):
            checkpoint = dataclasses.replace(checkpoint, finetune=False, load_optim=True, load_rng=True)
            self.config = dataclasses.replace(self.config, checkpoint=checkpoint)
        start = open_start(path, self.config, self._world.size)
        check_model(start.model, self.config.model, f"`load`={path}")
        if start.saved is not None and not start.weights_only and self.config.checkpoint.load_optim:
            check_state(start.saved, self.config, f"`load`={path}")
        self.config = _with_seed_of(self.config, start)
        return start

    def _newest_local(self) -> Path | None:
        """The save on the hosts from which this run goes on: one as new as the newest in `save`, where no older one
        is asked for. Collective."""
        given, local = self.config.checkpoint, self.checkpointer.local
        asked = given.ckpt_step is None and (given.auto_resume or self._loads_itself)
        if local is None or not local.token or not asked:
            return None
        step = self.checkpointer.on_first(lambda: 0 if (newest := latest(str(self._save))) is None else step_of(newest))
        path = local.newest(step)
        if path is not None and self._world.is_first:
            logger.info("%s: newer than what `save`=%s holds (iteration %d)", path, self._save, step)
        return path

    @property
    def _loads_itself(self) -> bool:
        """Whether `--load` names the folder of `--save`."""
        save, load = self.config.checkpoint.save, self.config.checkpoint.load
        return save is not None and load is not None and place(load).resolve() == place(save).resolve()

    def begin(self, iteration: int) -> None:
        """Training starts after `iteration`: writes config.yaml, puts newer checkpoints and what has their names aside,
        takes COMPLETED away. Raises CheckpointError, on all ranks."""
        local, save = self.checkpointer.local, None if self._save is None else place(self._save)
        token = self.checkpointer.on_first(lambda: "" if save is None else self._begin(save, iteration))
        if local is not None:
            local.token = token
            local.drop_after(iteration)

    def _begin(self, save: Place, iteration: int) -> str:
        """Rank 0's part. Returns the token of the saves on hosts."""
        token = "" if self.checkpointer.local is None else self.checkpointer.local.token
        try:
            self._attempts.begin(iteration)
            for path in set_aside_newer(save, iteration):
                logger.warning("this run continues from iteration %d: what was newer is now %s", iteration, path.name)
            (save / COMPLETED_FILE).unlink(missing_ok=True)
            if self.checkpointer.local is not None and not (token and self._continues):
                token = uuid.uuid4().hex[:16]
                write_small(save / LOCAL_TOKEN, f"{token}\n".encode())
            write_small(save / CONFIG_FILE, dump_yaml(self.config).encode())
            if isinstance(save, StoreUrl) and self._folder is not None:
                take_up(save, self._folder, RUN_FILES)
                self.checkpointer.after_upload = partial(send_along, self._folder, save, RUN_FILES)
        except OSError as error:
            where = f"could not write {error.filename or self._save}: {error.strerror}"
            raise CheckpointError(f"`save`={self._save}: {where}; choose another `save`") from None
        return token

    def end(self, iteration: int, *, completed: bool) -> None:
        """Training has ended; the last checkpoint is durable before COMPLETED says so."""
        self.checkpointer.wait()
        if completed and self.checkpointer.local is not None:
            self.checkpointer.local.clear()
        if self.checkpointer.after_upload is not None:
            self.checkpointer.after_upload()
        if completed and self._save is not None and self._world.is_first:
            try:
                (place(self._save) / COMPLETED_FILE).write_bytes(f"{iteration}\n".encode())
            except (OSError, CheckpointError) as error:
                logger.warning("could not write COMPLETED of %s: %s", self._save, getattr(error, "strerror", error))


class Attempts:
    """`attempts.json`: how often the ranks were started in vain since the newest checkpoint. A launcher that restarts
    them does not know whether that helps. Rank 0 counts: the fourth start from one checkpoint ends the run, with a
    status that is not retried. A run that ends in good order takes the file away; one of another launch counts anew.

    launch: empty: nobody restarts these ranks, and nothing is counted."""

    def __init__(self, save: str | None, launch: str) -> None:
        self._path = Path(save) / ATTEMPTS_FILE if save is not None and launch else None
        self._launch = launch

    def begin(self, iteration: int) -> None:
        """The ranks start from `iteration`. Raises CheckpointError where that has failed too often."""
        if self._path is None:
            return
        this = [self._launch, iteration]
        same: list[object] = []
        with suppress(OSError, ValueError, TypeError):
            same = [attempt for attempt in json.loads(self._path.read_text()) if attempt == this]
        if len(same) >= MOST_ATTEMPTS:
            self.end()
            raise CheckpointError(
                f"`save`={self._path.parent}: {len(same)} attempts from iteration {iteration} have failed before a new "
                "checkpoint; the cause is told above, where they failed"
            )
        with suppress(OSError):  # who cannot write here will hear of it where it matters
            write_small(self._path, json.dumps([*same, this]).encode())

    def end(self) -> None:
        """The run ends in good order, or must not be tried again."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


class UploadsHook(Hook):
    """Adds `store_retries` (since the record before) and `uploads_waiting` (this save included), of rank 0, to the
    `save` records of a run that saves to a store; and to all records when the newest save there was committed, which
    is not yet the one that a record is about."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._seen = 0

    def on_save(self, trainer: TrainerView, record: Record) -> None:
        if isinstance(where := self._checkpointer.directory, StoreUrl):
            retries, waiting = where.store.retries, len(self._checkpointer.pending)
            record["store_retries"], record["uploads_waiting"] = retries - self._seen, waiting
            self._seen = retries
            self.on_log(trainer, record)

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        if self._checkpointer.in_store:
            record["save_timestamp_seconds"] = self._checkpointer.committed_at


def _with_seed_of(config: Config, start: StartingPoint) -> Config:
    """A resumed run continues with the data order and dropout that it began with, unless `--no-load-rng` is given."""
    if start.saved is None or start.weights_only or not config.checkpoint.load_rng:
        return config
    seed, given = start.saved.training.seed, config.training.seed
    if seed == given:
        return config
    logger.warning(
        "`seed`=%d: the checkpoint's run has seed %d and continues with it; `no_load_rng` changes it", given, seed
    )
    return dataclasses.replace(config, training=dataclasses.replace(config.training, seed=seed))
