"""What a checkpoint of a run holds, and how a run takes it up again.

    tensors   masters `<name>`, moments `optimizer/<moment>/<name>`, the older weights of 2BW `previous/<name>`
              what the last step added `optimizer/last_step/<name>`, where a correction for delay needs it
    meta      format, configuration, progress, loss scaler, schedules of learning rate and weight decay, training
              samples asked for, surveys of the data, how fp32 products are computed
    files     the tokenizer, config.yaml

Everything is logical: no rank, stage or slot is written down, so any layout can take it up.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint import Checkpointer, Meta
from megalite.comm import TensorShard
from megalite.config import Config, dump_yaml, to_dict
from megalite.data import Datasets, Tokenizer, surveys_to_meta, tokenizer_files
from megalite.optim import LAST_STEP, LossScaler
from megalite.train import matmul_precision, param_schedules
from megalite.train.build import Model
from megalite.train.matmul_precision import MatmulChoice
from megalite.train.param_schedules import ParamSchedules
from megalite.train.starting_point import StartingPoint, load_weights
from megalite.train.trainer import TrainingProgress, progress_from_meta, progress_to_meta

logger = logging.getLogger(__name__)

STEPS = f"optimizer/{LAST_STEP}/"
NEWEST = "newest_update"
"""Where a checkpoint keeps the learning rate and weight decay of its newest update."""


@dataclass(frozen=True)
class RunState:
    """Saves and restores one run."""

    config: Config
    model: Model
    scaler: LossScaler
    tokenizer: Tokenizer
    datasets: Datasets
    checkpointer: Checkpointer
    schedules: ParamSchedules
    products: MatmulChoice

    def save(self, progress: TrainingProgress) -> str:
        """Writes a checkpoint of the state after `progress.iteration`; the pipeline must be empty. Collective."""
        meta = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "progress": progress_to_meta(progress),
            "loss_scaler": self.scaler.state_dict(),
            NEWEST: {"learning_rate": self.model.delay.learning_rate, "weight_decay": self.model.delay.weight_decay},
            "train_requests": list(self.datasets.train_requests),
            "data": surveys_to_meta(self.datasets.surveys),
            param_schedules.META: self.schedules.to_meta(),
            matmul_precision.META: self.products.to_meta(),
            "config": to_dict(self.config),
        }
        files = {**tokenizer_files(self.tokenizer), "config.yaml": dump_yaml(self.config).encode()}
        write = self.checkpointer.save_async if self.config.checkpoint.async_save else self.checkpointer.save
        return str(write(progress.iteration, self._shards(self._version(progress)), meta, files))

    def check_room(self, progress: TrainingProgress) -> None:
        """Whether a checkpoint has room where it will be written. Collective. Raises CheckpointError."""
        if self.config.checkpoint.save is not None:
            self.checkpointer.check_room(self._shards(self._version(progress)))

    def save_has_failed(self) -> bool:
        """Local: whether a save in the background came to nothing, as far as this rank knows."""
        return self.checkpointer.failure is not None

    def load(self, start: StartingPoint) -> tuple[TrainingProgress, list[str]]:
        """Takes up a checkpoint of any layout, or a Hugging Face model's weights. Collective.

        Returns where the run stands, and what was taken, as text.
        """
        model, meta = self.model, Meta(start.meta, str(start.path))
        progress = TrainingProgress() if start.weights_only else progress_from_meta(meta.section("progress"))
        with_state = self.config.checkpoint.load_optim and not start.weights_only
        version = self._version(progress)
        shards = model.optimizer.shards()
        if not with_state:
            shards = [shard for shard in shards if not shard.name.startswith("optimizer/")]
        elif not self._holds(start.path, STEPS):  # of a run that did not need them: as before its first step
            shards = [shard for shard in shards if not shard.name.startswith(STEPS)]
        self._take_up_delay(progress, meta if with_state else None)
        older = with_state and model.num_slots > 1 and self._holds(start.path, "previous/")
        if older:
            shards += self._older_shards(version)
        if start.source is not None:
            load_weights(start.source, shards, self.checkpointer.world)
        else:
            self.checkpointer.load(start.path, shards, cast=not with_state)
        model.optimizer.after_load(version % model.num_slots)
        if model.num_slots > 1:
            self._fill_older_slots(version, loaded=older)
        if with_state:
            self.scaler.load_state_dict(_scaler_state(meta.section("loss_scaler")))
        return progress, self._taken(progress, start, with_state=with_state, older=older)

    def _taken(self, progress: TrainingProgress, start: StartingPoint, *, with_state: bool, older: bool) -> list[str]:
        """What came from a checkpoint, as text."""
        if start.weights_only:
            return ["weights"]
        taken = [f"iteration {progress.iteration:,}", f"{progress.consumed_samples:,} samples consumed", "weights"]
        taken += ["optimizer state"] if with_state else []
        taken += ["the older weight version"] if older else []
        taken += [f"loss scale {self.scaler.scale:g}"] if with_state and self.config.training.precision.fp16 else []
        return taken + ([f"seed {self.config.training.seed}"] if self.config.checkpoint.load_rng else [])

    def _version(self, progress: TrainingProgress) -> int:
        return progress.microbatches if self.model.update_per_microbatch else progress.updates

    def _shards(self, version: int) -> list[TensorShard]:
        older = self._older_shards(version) if self.model.num_slots > 1 else []
        return [*self.model.optimizer.shards(), *older]

    def _older_shards(self, version: int) -> list[TensorShard]:
        return self.model.optimizer.version_shards((version - 1) % self.model.num_slots)

    def _holds(self, path: Path, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.checkpointer.names(path))

    def _take_up_delay(self, progress: TrainingProgress, meta: Meta | None) -> None:
        """What the compute weights of the newest version are made with. Without it they are the masters."""
        delay = self.model.delay
        delay.begin(progress.iteration)
        if meta is not None and NEWEST in meta.raw:
            newest = meta.section(NEWEST)
            delay.learning_rate, delay.weight_decay = newest.number("learning_rate"), newest.number("weight_decay")

    def _fill_older_slots(self, version: int, *, loaded: bool) -> None:
        """The slot of version - 1: gathered where it was loaded, else a copy of the newest weights."""
        slot = (version - 1) % self.model.num_slots
        if loaded:
            for buffers in self.model.optimizer.buffers:
                buffers.weights.gather(slot)
            return
        self.model.optimizer.write_weights(slot, as_masters=True)
        if version > 0:
            logger.warning(
                "the checkpoint holds one weight version: the first batch of %s runs on the newest weights, once",
                self.config.parallel.schedule,
            )


def _scaler_state(meta: Meta) -> dict[str, float | int]:
    """What a loss scaler has put there; empty of a constant one. Raises CheckpointError."""
    if not meta.raw:
        return {}
    scale = meta.number("scale")
    counts = {name: meta.integer(name, low=-(2**62)) for name in ("good_steps", "tolerance")}
    if not scale > 0:
        raise meta.wrong("scale", "above 0")
    return {"scale": scale, "previous": meta.number("previous", scale), **counts}
