"""What a checkpoint of a run holds, and how a run resumes from it.

    tensors   masters `<name>` (with --lora-rank of adapters alone), moments `optimizer/<moment>/<name>`; biases of
              experts `<name>`
              compute weights of one update ago `previous/<name>` (2BW, PipeDream), of N `previous/N/<name>` (PipeDream)
              averages of the masters `optimizer/ema/<name>` (`--ema-decay`)
              what the last step added `optimizer/last_step/<name>`, where a correction for delay needs it
              largest magnitudes of updates before `optimizer/fp8/<layer>`, where scales are made of them
    meta      format, configuration, progress, loss scaler, latest gradient norms (`--spikes`), samples passed over,
              schedules of learning rate and weight decay, training samples asked for, surveys of the data, the
              precision of fp32 matmuls; the model beside adapters; the Hugging Face model that the run began with;
              where memory lay (for readers: a run that resumes decides anew)
    files     the tokenizer, config.yaml

A run of another framework's becomes one of ours by writing the same (`convert/megatron_state.py`).

Everything is logical: no rank, stage or place in memory is written down, so any layout can resume from it.
"""

import logging
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megalite.checkpoint import AVERAGES, Checkpointer, Meta
from megalite.comm import TensorShard
from megalite.config import Config, dump_yaml, to_dict
from megalite.convert import BASE_META, ORIGIN_META, BaseModel, Origin
from megalite.data import Datasets, Tokenizer, surveys_to_meta, tokenizer_files
from megalite.engine import SpikeGuard, quantize_base
from megalite.library import STATE_KEYS
from megalite.optim import LAST_STEP, LossScaler
from megalite.parallel.zero import frozen_shards
from megalite.train import matmul_precision, param_schedules
from megalite.train.build import Model
from megalite.train.matmul_precision import MatmulChoice
from megalite.train.param_schedules import ParamSchedules
from megalite.train.starting_point import StartingPoint, load_base, load_weights
from megalite.train.trainer import TrainingProgress

logger = logging.getLogger(__name__)

STEPS = f"optimizer/{LAST_STEP}/"
# Where a checkpoint keeps the gradient norms that the next one is compared with, the ranges of samples that the run
# passes over, and the learning rates and weight decay of its newest update.
SPIKES, PASSED_OVER, NEWEST = "spikes", "passed_over", "newest_update"
NEWEST_NUMBERS = ("learning_rate", "weight_decay", "decoupled_lr")


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
    base: BaseModel | None = None
    origin: Origin = field(default_factory=Origin)
    spikes: SpikeGuard | None = None

    def __post_init__(self) -> None:
        if self.base is not None and self.base.path is None:
            self._base_is_there()

    def _base_is_there(self) -> None:
        """What is made of the frozen weights once they have their values."""
        if self.config.model.lora.frozen_weights_int8:
            quantize_base(self.model)

    def save(self, progress: TrainingProgress) -> str:
        """Writes a checkpoint of the state after `progress.iteration`; the pipeline must be empty. Collective."""
        background = self.config.checkpoint.async_save
        return str(self.checkpointer.save(progress.iteration, *self._contents(progress), background=background))

    def save_locally(self, progress: TrainingProgress) -> dict[str, Any] | None:
        """The same on the hosts themselves; a record of it, None where there is none."""
        began = time.perf_counter()
        if not self.checkpointer.save_locally(progress.iteration, *self._contents(progress)):
            return None
        milliseconds = 1e3 * (time.perf_counter() - began)
        return {"kind": "local_save", "iteration": progress.iteration, "save_time_ms": milliseconds}

    def _contents(self, progress: TrainingProgress) -> tuple[list[TensorShard], dict[str, Any], dict[str, bytes]]:
        """Shards, meta and files."""
        spikes, passed = self.spikes, self.model.passed.ranges
        turns = progress.microbatches // self.model.placement.round  # a checkpoint knows no layout
        meta = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "progress": dict(vars(replace(progress, microbatches=turns))),
            "loss_scaler": self.scaler.state_dict(),
            NEWEST: {name: getattr(self.model.delay, name) for name in NEWEST_NUMBERS},
            "train_requests": list(self.datasets.train_requests),
            "data": surveys_to_meta(self.datasets.surveys),
            **({"data_phases": [asdict(phase) for phase in self.datasets.phases]} if self.datasets.phases else {}),
            param_schedules.META: self.schedules.to_meta(),
            matmul_precision.META: {"mode": self.products.mode, "device": self.products.device},
            "config": to_dict(self.config),
            "memory_plan": self.model.plan.to_meta(),
            **({} if self.origin == Origin() else {ORIGIN_META: self.origin.to_meta()}),
            **({} if spikes is None else {SPIKES: {"norms": spikes.window(), "in_a_row": spikes.in_a_row}}),
            **({PASSED_OVER: [asdict(each) for each in passed]} if passed else {}),
            **({} if self.base is None else {BASE_META: self.base.to_meta()}),
            **({} if self.model.foreign is None else {STATE_KEYS: self.model.foreign.parts.names.aliases}),
        }
        files = {**tokenizer_files(self.tokenizer), "config.yaml": dump_yaml(self.config).encode()}
        return self._shards(self.version(progress)), meta, files

    def check_room(self, progress: TrainingProgress) -> None:
        """Checks that there is space for a checkpoint. Collective. Raises CheckpointError if there is not."""
        if self.config.checkpoint.save is not None:
            self.checkpointer.check_room(self._shards(self.version(progress)))

    def load(self, start: StartingPoint, *, own: bool = False) -> tuple[TrainingProgress, list[str]]:
        """Loads a checkpoint of any layout, or a Hugging Face model's weights. Collective.

        own: one that this run has saved; flags about `--load` do not concern it. Returns the progress of the run, and
        what was loaded, as text.
        """
        model, meta = self.model, Meta(start.meta, str(start.path))
        progress = TrainingProgress() if start.weights_only else progress_from_meta(meta.section("progress"))
        progress.microbatches *= model.placement.round
        with_state = (own or self.config.checkpoint.load_optim) and not start.weights_only
        version = self.version(progress)
        shards = [*model.optimizer.shards(), *self._states(version), *self._still]
        if not with_state:
            shards = [shard for shard in shards if not shard.name.startswith("optimizer/")]
        else:  # what a run did not need is as before its first step
            lacked = [STEPS, AVERAGES, *(state.absent for state in model.states if state.absent)]
            absent = tuple(prefix for prefix in lacked if not any(name.startswith(prefix) for name in start.tensors))
            shards = [shard for shard in shards if not shard.name.startswith(absent)]
        anew = self.config.optimizer.ema_decay is not None and all(not s.name.startswith(AVERAGES) for s in shards)
        if not start.weights_only:
            self.model.passed.take_up(meta, PASSED_OVER)
        self._take_up_delay(progress, meta if with_state else None)
        # A layout with fewer stages has saved fewer older versions.
        older = model.older_shards(version) if with_state and model.num_versions > 1 else []
        stored = [shard for shard in older if shard.name in start.tensors]
        shards += stored
        if self.base is not None and self.base.path is not None:
            load_base(self.base, [*frozen_shards(model.optimizer.buffers)], self.checkpointer.world)
            self._base_is_there()
        if self.base is not None and self.base.path == start.path.resolve():
            pass  # the model alone: its adapters begin as they are
        elif start.run is not None:  # masters and the optimizer's state
            load_weights(start.run.stored, start.path, shards, self.checkpointer.world)
        elif start.source is not None:
            load_weights(start.source.read, start.source.directory, shards, self.checkpointer.world)
        else:
            self.checkpointer.load(start.path, shards, cast=not with_state)
        if anew:
            logger.info("`ema_decay`: the average of the weights begins with those that were loaded")
            model.begin_averages()
        if model.after_load(version, {shard.name for shard in stored}) and version > 0:
            schedule = self.config.parallel.schedule
            logger.warning(
                "the checkpoint lacks older weights: the first batch of %s runs on newer ones, once", schedule
            )
        if with_state:
            self.scaler.load_state_dict(_scaler_state(meta.section("loss_scaler")))
            if self.spikes is not None and SPIKES in meta.raw:
                window = meta.section(SPIKES)
                self.spikes.restore(window.numbers("norms"), window.integer("in_a_row"))
        return progress, self._taken(progress, start, with_state=with_state, older=bool(stored))

    def _taken(self, progress: TrainingProgress, start: StartingPoint, *, with_state: bool, older: bool) -> list[str]:
        """What was loaded from a checkpoint, as text."""
        if start.weights_only:
            return ["weights"]
        taken = [f"iteration {progress.iteration:,}", f"{progress.consumed_samples:,} samples consumed", "weights"]
        taken += ["optimizer state"] if with_state else []
        taken += ["older weight versions"] if older else []
        taken += [f"loss scale {self.scaler.scale:g}"] if with_state and self.config.training.precision.fp16 else []
        return taken + ([f"seed {self.config.training.seed}"] if self.config.checkpoint.load_rng else [])

    def version(self, progress: TrainingProgress) -> int:
        """Number of the newest weight version after `progress`."""
        together = self.model.together
        return progress.updates if together is None else progress.microbatches // together

    @property
    def _still(self) -> list[TensorShard]:
        return self.model.foreign.still if self.model.foreign is not None else []

    def _shards(self, version: int) -> list[TensorShard]:
        optimizer, older = self.model.optimizer.shards(), self.model.older_shards(version)
        return [*optimizer, *self._states(version), *self._still, *older]

    def _states(self, version: int) -> list[TensorShard]:
        return [shard for state in self.model.states for shard in state.shards(version)]

    def _take_up_delay(self, progress: TrainingProgress, meta: Meta | None) -> None:
        """What the compute weights of the newest version are made with. Without it they are the masters."""
        delay = self.model.delay
        delay.begin(progress.iteration)
        if meta is not None and NEWEST in meta.raw:
            newest = meta.section(NEWEST)
            for name in NEWEST_NUMBERS:
                if newest.raw.get(name) is not None:
                    setattr(delay, name, newest.number(name))


def _scaler_state(meta: Meta) -> dict[str, float | int]:
    """The state that a loss scaler has saved; empty for a constant one. Raises CheckpointError."""
    if not meta.raw:
        return {}
    scale = meta.number("scale")
    counts = {name: meta.integer(name, low=-(2**62)) for name in ("good_steps", "tolerance")}
    if not scale > 0:
        raise meta.wrong("scale", "above 0")
    return {"scale": scale, "previous": meta.number("previous", scale), **counts}


def progress_from_meta(meta: Meta) -> TrainingProgress:
    """What a checkpoint holds of it. Raises CheckpointError."""
    return TrainingProgress(**{name: meta.integer(name) for name in vars(TrainingProgress())})
