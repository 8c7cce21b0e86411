"""Gradients of a pipeline of your own: summed over the replicas, clipped, and turned into updates under ZeRO."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import Checkpointer, Meta, read_manifest, resolve_checkpoint
from megalite.comm import TensorShard, all_gather_json
from megalite.config import (
    OPTIMIZER_SPECS,
    Correction,
    HostOffload,
    OptimizerArgs,
    OptimizerConfig,
    StalenessCorrection,
    bounds_problem,
    completed,
    options_of,
    readers_of,
)
from megalite.engine import Hyperparameters, Updater, build_weights, sharded_maker
from megalite.errors import CheckpointError, ConfigError
from megalite.library.checkpoint import STATE, collected, lacking_states, still_shards, write_weights
from megalite.library.given import in_arguments
from megalite.library.names import stored_tensors
from megalite.library.pipeline import Pipeline
from megalite.library.tensor_cut import whole as whole_tensor
from megalite.optim import OPTIMIZERS, Delay, LossScaler
from megalite.parallel.zero import RankMemory, StageOptions, ZeroOptions
from megalite.schedule import NORM, SCHEDULES, STEP, Action
from megalite.stores import Place

ADAMW = "adamw"
PROGRESS = "megalite_progress"
"""Where a checkpoint's meta has the batches and micro-batches before it, and what its newest update was made with."""


class ShardedOptimizer:
    """The weights of a `Pipeline`, their gradients and the optimizer's state, shared by the replicas.

    pipeline: its parameters become views of flat memory, with the values they have.
    name: 'adamw', 'sgd', 'lion', 'adafactor', 'muon', 'soap' or 'shampoo'.
    lr, weight_decay: of the next step; change the attributes for a schedule. Tensors of two or more dimensions decay,
        vectors (biases, norms) do not.
    clip_grad: largest global norm of the gradient; 0: not clipped.
    zero_stage: 0 to 3, what data-parallel ranks share: state, gradients, weights.
    staleness_correction: what a schedule that never drains does about the delay of its gradients: 'none', 'predict',
        'error-feedback' or 'nesterov'; None: the best for the optimizer. staleness_lookahead: of 'predict', in steps.
    offload_fraction: part of the masters and moments that lives in host memory and is updated there; with
        `offload_path`, a folder on a fast local disk, in files.
    settings: of the optimizer by the names of `pretrain_gpt.py`'s flags (`adam_beta1=0.9`); docs/library.md lists them.

    Raises ConfigError.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        name: str = ADAMW,
        *,
        lr: float,
        weight_decay: float = 0.01,
        clip_grad: float = 1.0,
        zero_stage: int = 1,
        staleness_correction: str | None = None,
        staleness_lookahead: tuple[float, ...] | None = None,
        offload_fraction: float = 0.0,
        offload_path: Path | str | None = None,
        **settings: float | str,
    ) -> None:
        rule = OptimizerConfig(lr=lr).optimizer if name == ADAMW else name
        known = [ADAMW, *sorted(n for n in OPTIMIZERS if not OPTIMIZER_SPECS[n].taps)]
        if rule not in known:
            raise ConfigError(f"optimizer={name!r}: not one of {', '.join(known)}")
        if zero_stage not in range(4):
            raise ConfigError(f"zero_stage={zero_stage}: 0, 1, 2 or 3")
        if not 0 <= offload_fraction <= 1 or offload_path is not None and not offload_fraction:
            raise ConfigError(f"offload_fraction={offload_fraction}: from 0 to 1, and above 0 with offload_path")
        if pipeline.optimizer is not None:
            raise ConfigError("the pipeline has an optimizer already: make one for each")
        _check_settings(rule, name, settings)
        config = OptimizerConfig(
            optimizer=rule,
            lr=lr,
            offload=HostOffload(optimizer_offload_path=None if offload_path is None else str(offload_path)),
            args=OptimizerArgs(**settings),  # type: ignore[arg-type]  # checked above
            staleness=_staleness(pipeline, staleness_correction, staleness_lookahead),
        )
        self.lr, self.weight_decay, self.clip_grad = lr, weight_decay, clip_grad
        self._pipeline, self._stepped = pipeline, True
        self._check_numbers()
        _check_schedule(pipeline, zero_stage)
        _check_replicas(pipeline)
        program, zero = pipeline.base_program, ZeroOptions(stage=zero_stage)
        delay = Delay(program.staleness[pipeline.mesh.coordinate("pp")])
        late = any(program.staleness)
        correction = completed(config, each_microbatch=program.update_per_microbatch) if late else Correction()
        in_files = offload_fraction if offload_path is not None else 0.0
        self._weights = build_weights(
            pipeline.built,
            pipeline.mesh,
            program,
            families=["dense"],
            ties=pipeline.parts.ties,
            options=zero,
            alike=StageOptions(whole=pipeline.names.updated_whole(rule)),
            memory=RankMemory(pipeline.device, zero, pipeline.parts.mover),
            make_optimizer=sharded_maker(config, correction, delay, fraction=offload_fraction, file_fraction=in_files),
            delay=delay,
            states=[],
        )
        self._state, self._waiting = self._weights.optimizer, list[Action]()
        self.events = self._updater()
        pipeline.own_weights(self)

    def _updater(self) -> Updater:
        """An update whose gradient is not finite is passed over."""
        return Updater(
            self._weights,
            policy=lambda update: Hyperparameters(
                self.lr, self.weight_decay, self.clip_grad, loss_scale=1.0, iteration=update + 1, samples=0
            ),
            count_iteration=lambda samples, skipped: None,
            scaler=LossScaler(),
            nonfinite="skip",
            max_skipped=sys.maxsize,
            version=0,
            update_of=self._pipeline.update_of,
            late=self._pipeline.device.type != "cpu",
        )

    def _check_numbers(self) -> None:
        for name in ("lr", "weight_decay", "clip_grad"):
            value = getattr(self, name)
            if isinstance(value, str) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: a number from 0 on is wanted")
        shape = self._pipeline.base_program
        if self.clip_grad and shape.update_per_microbatch:
            raise ConfigError(f"clip_grad={self.clip_grad}: {shape.name} has no norm over its stages; clip_grad=0")

    # what the pipeline calls

    def begin_batch(self) -> None:
        """Raises ConfigError if the batch before has not been followed by a `step`."""
        if not self._stepped:
            norm = self._pipeline.base_program.asynchronous  # the update is made, the norm not yet taken
            why = ", which here returns the norm of the update that is made already" * norm
            raise ConfigError(f"Pipeline.step was called twice: call ShardedOptimizer.step in between{why}")
        self._check_numbers()
        self._stepped = False

    def execute(self, action: Action) -> None:
        """Carries out what concerns weights. Where the batch drains, norm and update wait for `step`."""
        if action.kind in (NORM, STEP) and not self._pipeline.base_program.asynchronous:
            self._waiting.append(action)
        else:
            self.events.execute(action)

    # what the user calls

    @torch.no_grad()
    def step(self) -> Tensor:
        """Updates the weights. Returns the global norm of the gradient before clipping, 0-dim, the same on every rank.
        If it is not finite, nothing is updated. Raises ConfigError where no `Pipeline.step` came before.

        A schedule that never drains makes its updates inside `Pipeline.step`, with the attributes as they are then;
        this returns their norm (PipeDream has none: nan).
        """
        if self._stepped:
            raise ConfigError("ShardedOptimizer.step without a gradient: call Pipeline.step first")
        self._check_numbers()
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self.events.execute(action)
        self._stepped = True
        latest = self.events.take_results()[-1].norm
        return torch.full_like(latest, math.nan) if self._pipeline.base_program.update_per_microbatch else latest

    def save(self, directory: Path | str, iteration: int, meta: Mapping[str, Any] | None = None) -> Place:
        """Writes weights and optimizer state to `directory/iter_0000100` and returns that. Collective. Staged, checked
        and renamed: what is there is whole, and any layout loads it. A directory may be a URL (`s3://bucket/run`).

        meta: JSON of yours, rank 0's is stored. Raises CheckpointError.
        """
        self._between_steps("save")
        pipe = self._pipeline
        shards = [*self._state.shards(), *self._still(), *self._weights.older_shards(self.events.newest_version())]
        progress = {
            "batches": pipe.batches,
            "microbatches": pipe.microbatches,
            "learning_rate": self._weights.delay.learning_rate,
            "weight_decay": self._weights.delay.weight_decay,
        }
        stored = dict(meta or {}) | {PROGRESS: progress}
        try:
            checkpointer = Checkpointer(directory, world=pipe.mesh.world)
            saved = checkpointer.save(iteration, shards, stored)
            checkpointer.wait()
            return saved
        except CheckpointError as error:
            raise CheckpointError(in_arguments(error.text)) from None

    def load(self, path: Path | str, *, state: bool = True) -> dict[str, Any]:
        """Takes up what `save` of the same layers has written, at any layout. Collective.

        path: a directory that `save` has returned, or one of several of them: the newest is taken.
        state: the optimizer's, too; False for the weights alone, converted to the dtype that is asked for.
        Returns `meta`. Raises CheckpointError.
        """
        self._between_steps("load")
        pipe, delay = self._pipeline, self._weights.delay
        checkpointer = Checkpointer(path, world=pipe.mesh.world)
        found = resolve_checkpoint(str(path), flag="load: ", advice="give what ShardedOptimizer.save wrote to")
        shards = [shard for shard in self._state.shards() if state or not shard.name.startswith(STATE)]
        manifest = read_manifest(found)
        progress = Meta(manifest.meta, str(found)).section(PROGRESS, {})
        version = self.events.newest_version()
        if state:
            batches, microbatches = progress.integer("batches", 0), progress.integer("microbatches", 0)
            version = microbatches if pipe.base_program.update_per_microbatch else batches
        older = [shard for shard in self._weights.older_shards(version) if state and shard.name in manifest.tensors]
        shards += [*self._still(), *older]
        try:
            meta = checkpointer.load(found, shards, cast=not state)
        except CheckpointError as error:  # on all ranks alike
            lacks = lacking_states(found, shards, pipe.mesh.world) if state else ""
            raise CheckpointError(lacks or f"load: {in_arguments(error.text)}") from None
        if state:  # counts on where the checkpoint ends
            pipe.batches, pipe.microbatches = batches, microbatches
            delay.begin(batches)
            delay.learning_rate = progress.number("learning_rate", 0.0)
            delay.weight_decay = progress.number("weight_decay", 0.0)
            self.events.restart(version)
        self._weights.after_load(version, {shard.name for shard in older})
        meta.pop(PROGRESS, None)
        return meta

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights by the names of `weights()`: whole tensors, on every rank; what is not of this rank's stages is
        passed over. Raises ConfigError for one that is missing or has another shape."""
        self._between_steps("load_weights")
        shards = [shard for shard in self._state.shards() if not shard.name.startswith(STATE)]
        write_weights([*shards, *self._still()], weights, self._pipeline.names.aliases)
        self._weights.after_load(self.events.newest_version(), set())

    def _still(self) -> list[TensorShard]:
        return list(still_shards(self._pipeline.parts, self._pipeline.mesh))

    def _between_steps(self, what: str) -> None:
        if not self._stepped:
            raise ConfigError(f"ShardedOptimizer.{what} inside a step: call ShardedOptimizer.step first")
        self._pipeline.check_drained(f"ShardedOptimizer.{what}")
        self.events.resolve_pending()
        for family in self._weights.families:
            family.weights.wait()

    @contextmanager
    def masters(self) -> Iterator[int]:
        """Within the context, the newest weights are as checkpoints have them, without corrections for delay; yields
        their version."""
        version = self.events.newest_version()
        with self._state.masters_as_weights(version):
            yield version

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters and buffers of this rank's layers, with the newest weights: `3.weight` is that of
        layers[3]; layers from one module give its state dict. Collective in ZeRO stage 3: all ranks must ask."""
        self._pipeline.check_drained("ShardedOptimizer.weights")
        found: dict[str, Tensor] = {}
        with self.masters() as version:
            for key, families in self._weights.buffers.items():
                for family in families:
                    family.weights.unshard()
                for index, layer in self._pipeline.layers(key, version):
                    for _, tensor, keys in stored_tensors(layer, index):
                        value = whole_tensor(tensor, self._pipeline.mesh["tp"])
                        found |= {name: value.detach().clone() for name in keys}
                for family in families:
                    family.weights.reshard()
        return found

    def memory(self) -> dict[str, int]:
        """Bytes of this rank: 'master' and 'state' (moments) on the device, 'offloaded' what is elsewhere of both."""
        return self._state.memory()

    def close(self) -> None:
        """Ends its use: removes the files of `offload_path`. Local."""
        self._state.close()

    def all_weights(self) -> dict[str, Tensor]:
        """`weights()` of all ranks together, on the CPU of each: for layers from one module its whole state dict.
        Collective."""
        return collected(self.weights(), self._pipeline.mesh.world, self._pipeline.device)


def _check_settings(rule: str, name: str, settings: Mapping[str, float | str]) -> None:
    """Raises ConfigError for a setting that the optimizer does not have, which the user calls `name`."""
    own = {o.name: o for o in options_of("optimizer", OptimizerArgs) if rule in (readers_of(o) or ())}
    for setting, value in settings.items():
        if setting not in own:
            raise ConfigError(f"{setting}: {name} has no such setting; it has {', '.join(own)}")
        if not isinstance(value, type(own[setting].default)) and not isinstance(value, int):
            raise ConfigError(f"{setting}={value!r}: one like {own[setting].default!r} is wanted")
        if problem := bounds_problem(own[setting], value):
            raise ConfigError(f"{setting}={value}: {problem}")


def _staleness(pipeline: Pipeline, method: str | None, ahead: tuple[float, ...] | None) -> StalenessCorrection:
    """Raises ConfigError for what does not exist, or changes nothing."""
    choices = {o.name: o for o in options_of("optimizer", StalenessCorrection)}["staleness_correction"].choices or ()
    if method is not None and method not in choices:
        raise ConfigError(f"staleness_correction={method!r}: one of {', '.join(choices)}")
    if (method not in (None, "none") or ahead) and not any(pipeline.base_program.staleness):
        raise ConfigError(f"staleness_correction: schedule={pipeline.base_program.name!r} has no delay; leave it out")
    if ahead is not None and (method not in (None, "predict") or not 1 <= len(ahead) <= 2 or min(ahead) <= 0):
        raise ConfigError(f"staleness_lookahead={ahead}: one or two numbers above 0, for 'predict'")
    return StalenessCorrection(staleness_correction=method, staleness_lookahead=ahead)


def _check_schedule(pipeline: Pipeline, zero_stage: int) -> None:
    """Raises ConfigError for what the schedule excludes."""
    name, shape = pipeline.base_program.name, pipeline.base_program
    known = SCHEDULES.get(name)
    if known is not None and (why := known.zero_excluded.get(zero_stage)):
        legal = ", ".join(str(stage) for stage in range(4) if stage not in known.zero_excluded)
        raise ConfigError(f"zero_stage={zero_stage}: not with schedule={name!r}: {why}; legal: {legal}")
    if shape.update_per_microbatch and pipeline.tied:
        raise ConfigError(
            f"schedule={name!r}: {', '.join(sorted(pipeline.tied))} would drift apart: several stages hold it; use 2bw"
        )


def _check_replicas(pipeline: Pipeline) -> None:
    """Raises ConfigError where replicas, or the stages of a tied weight, begin with other values. Collective."""
    sums = {
        name: float(parameter.detach().double().sum())
        for key in sorted(pipeline.stages)
        for name, parameter in pipeline.parameters(key)
    }
    tied = {name: value for name, value in sums.items() if name in pipeline.tied}
    for own, axis, where in ((sums, "dp", "replicas"), (tied, "pp", "stages that share it")):
        theirs = all_gather_json(own, pipeline.mesh[axis])
        found: dict[str, set[str]] = {}
        for name, value in (pair for one in theirs for pair in one.items()):
            found.setdefault(name, set()).add(repr(value))
        other = next((name for name, values in found.items() if len(values) > 1), None)
        if other is not None:
            raise ConfigError(f"layers: {other} begins with other values on other {where}; seed alike before you build")
