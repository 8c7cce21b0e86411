"""Gradients of a pipeline of your own: summed over the replicas, clipped, and turned into updates under ZeRO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import Checkpointer, resolve_checkpoint
from megalite.comm import TensorShard, all_gather_json
from megalite.config import OPTIMIZER_SPECS, OptimizerArgs, OptimizerConfig, bounds_problem, options_of
from megalite.errors import CheckpointError, ConfigError
from megalite.inventory import AXIS_FAMILIES
from megalite.library.checkpoint import STATE, collected, lacking_states, still_shards, write_weights
from megalite.library.names import stored_tensors
from megalite.library.pipeline import Pipeline
from megalite.library.tensor_cut import whole as whole_tensor
from megalite.library.words import in_words
from megalite.optim import OPTIMIZERS
from megalite.parallel.pipeline import replica_axes
from megalite.parallel.zero import ParameterBuffers, ZeroOptions, stage_buffers
from megalite.parallel.zero import ShardedOptimizer as StateShards
from megalite.schedule import REDUCE, RESHARD, UNSHARD, Action, StageKey

ADAMW = "adamw"


class ShardedOptimizer:
    """The weights of a `Pipeline`, their gradients and the optimizer's state, shared by the replicas.

    pipeline: its parameters become views of flat memory, with the values they have.
    name: 'adamw', 'sgd', 'lion', 'adafactor', 'muon' or 'soap'.
    lr, weight_decay: of the next step; change the attributes for a schedule. Tensors of two or more dimensions decay,
        vectors (biases, norms) do not.
    clip_grad: largest global norm of the gradient; 0: not clipped.
    zero_stage: 0 to 3, what data-parallel ranks share: state, gradients, weights.
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
        **settings: float | str,
    ) -> None:
        rule = OptimizerConfig(lr=lr).optimizer if name == ADAMW else name
        if rule not in OPTIMIZERS:
            raise ConfigError(f"optimizer={name!r}: not one of {', '.join([ADAMW, *sorted(OPTIMIZERS)])}")
        if zero_stage not in range(4):
            raise ConfigError(f"zero_stage={zero_stage}: 0, 1, 2 or 3")
        if pipeline.optimizer is not None:
            raise ConfigError("the pipeline has an optimizer already: make one for each")
        own = {o.name: o for o in options_of("optimizer", OptimizerArgs) if rule in o.facts["only_for"]}
        for setting, value in settings.items():
            if setting not in own:
                raise ConfigError(f"{setting}: {name} has no such setting; it has {', '.join(own)}")
            if not isinstance(value, type(own[setting].default)) and not isinstance(value, int):
                raise ConfigError(f"{setting}={value!r}: one like {own[setting].default!r} is wanted")
            if problem := bounds_problem(own[setting], value):
                raise ConfigError(f"{setting}={value}: {problem}")
        config = OptimizerConfig(optimizer=rule, lr=lr, args=OptimizerArgs(**settings))  # type: ignore[arg-type]  # checked above
        self.lr, self.weight_decay, self.clip_grad = lr, weight_decay, clip_grad
        self._check_numbers()
        self._pipeline, self._stepped = pipeline, True
        _check_replicas(pipeline)
        self._buffers = self._make_buffers(pipeline, ZeroOptions(stage=zero_stage), OPTIMIZER_SPECS[rule].whole)
        shards = AXIS_FAMILIES["dense"].shard if zero_stage else ()
        self._state = StateShards(
            [made for stage in self._buffers.values() for made in stage],
            make_optimizer=lambda groups: OPTIMIZERS[rule](groups, config),
            norm_axis=pipeline.mesh.over("tp", *shards, "pp"),
        )
        pipeline.optimizer = self

    def _check_numbers(self) -> None:
        for name in ("lr", "weight_decay", "clip_grad"):
            value = getattr(self, name)
            if isinstance(value, str) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: a number from 0 on is wanted")

    @staticmethod
    def _make_buffers(pipeline: Pipeline, options: ZeroOptions, whole: Any) -> dict[StageKey, list[ParameterBuffers]]:
        mesh, replicas = pipeline.mesh, replica_axes(pipeline.mesh, pipeline.placement)
        buffers: dict[StageKey, list[ParameterBuffers]] = {}
        for key in pipeline.stages:
            made = stage_buffers(
                [pipeline.parameters(key)],
                {"dense": mesh.family("dense")},
                beside=[made for stage_ in buffers.values() for made in stage_],
                options=options,
                tied=pipeline.tied,
                counts_tied=key == (min(pipeline.parts.tied_stages, default=0), 0),
                replica=key[1],
                whole=whole,
                extra_reduce=[replicas[key[0]]] if key[0] in replicas else [],
                device=pipeline.device,
            )
            if made:
                layers = [layer for _, layer in pipeline.layers(key)]
                made[0].weights.attach(layers, *(family.weights for family in made[1:]))
            buffers[key] = made
        return dict(sorted(buffers.items()))

    # what the pipeline calls

    def begin_batch(self) -> None:
        """Raises ConfigError if the batch before has not been followed by a `step`."""
        if not self._stepped:
            raise ConfigError("Pipeline.step was called twice: call ShardedOptimizer.step in between")
        self._stepped = False

    def before_backward(self, stage: StageKey, *, last: bool) -> None:
        if last:
            for family in self._buffers[stage]:
                family.gradients.arm()

    def execute(self, action: Action) -> None:
        """Starts a stage's reduction, gathers or frees its weights; norm and update wait for `step`."""
        for family in self._buffers[action.stage_key]:
            if action.kind == REDUCE:
                family.gradients.start_reduce()
            elif action.kind == UNSHARD:
                family.weights.unshard()
            elif action.kind == RESHARD:
                family.weights.reshard()

    # what the user calls

    @torch.no_grad()
    def step(self) -> Tensor:
        """Updates the weights. Returns the global norm of the gradient before clipping, 0-dim, the same on every rank.
        If it is not finite, nothing is updated. Raises ConfigError where no `Pipeline.step` came before."""
        if self._stepped:
            raise ConfigError("ShardedOptimizer.step without a gradient: call Pipeline.step first")
        self._check_numbers()
        families = [family for stage in self._buffers.values() for family in stage]
        tied = [[t for family in stage for t in family.gradients.tied()] for stage in self._buffers.values()]
        for copies in zip(*(buckets for buckets in tied if buckets), strict=True):
            self._pipeline.shared.start_sum(copies).wait()
        for family in families:
            family.gradients.start_tied_reduce()
        for family in families:
            family.gradients.finish_reduce()
        norm = self._state.grad_norm()
        finite = bool(norm.isfinite())
        if finite:
            clip = min(1.0, self.clip_grad / (float(norm) + 1e-6)) if self.clip_grad > 0 else 1.0
            self._state.step(lr=self.lr, weight_decay=self.weight_decay, grad_scale=clip)
        for family in families:
            family.gradients.begin_batch()
        self._stepped = True
        return norm

    def save(self, directory: Path | str, iteration: int, meta: Mapping[str, Any] | None = None) -> Path:
        """Writes weights and optimizer state to `directory/iter_0000100` and returns that. Collective. Staged, checked
        and renamed: what is there is whole, and any layout loads it.

        meta: JSON of yours, rank 0's is stored. Raises CheckpointError.
        """
        self._between_steps("save")
        shards = [*self._state.shards(), *self._still()]
        try:
            return Checkpointer(directory, world=self._pipeline.mesh.world).save(iteration, shards, dict(meta or {}))
        except CheckpointError as error:
            raise CheckpointError(in_words(str(error))) from None

    def load(self, path: Path | str, *, state: bool = True) -> dict[str, Any]:
        """Takes up what `save` of the same layers has written, at any layout. Collective.

        path: a directory that `save` has returned, or one of several of them: the newest is taken.
        state: the optimizer's, too; False for the weights alone, converted to the dtype that is asked for.
        Returns `meta`. Raises CheckpointError.
        """
        self._between_steps("load")
        checkpointer = Checkpointer(path, world=self._pipeline.mesh.world)
        found = resolve_checkpoint(str(path), flag="load: ", advice="give what ShardedOptimizer.save wrote to")
        shards = [shard for shard in self._state.shards() if state or not shard.name.startswith(STATE)]
        shards += self._still()
        try:
            meta = checkpointer.load(found, shards, cast=not state)
        except CheckpointError as error:  # on all ranks alike
            lacks = lacking_states(found, shards, self._pipeline.mesh.world) if state else ""
            raise CheckpointError(lacks or f"load: {in_words(str(error))}") from None
        self._state.after_load()
        return meta

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights by the names of `weights()`: whole tensors, on every rank; what is not of this rank's stages is
        passed over. Raises ConfigError for one that is missing or has another shape."""
        self._between_steps("load_weights")
        shards = [shard for shard in self._state.shards() if not shard.name.startswith(STATE)]
        write_weights([*shards, *self._still()], weights, self._pipeline.names.aliases)
        self._state.after_load()

    def _still(self) -> list[TensorShard]:
        return list(still_shards(self._pipeline.parts, self._pipeline.mesh))

    def _between_steps(self, what: str) -> None:
        if not self._stepped:
            raise ConfigError(f"ShardedOptimizer.{what} inside a step: call ShardedOptimizer.step first")
        for stage in self._buffers.values():
            for family in stage:
                family.weights.wait()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters and buffers of this rank's layers, with the newest weights: `3.weight` is that of
        layers[3]; layers from one module give its state dict. Collective in ZeRO stage 3: all ranks must ask."""
        found: dict[str, Tensor] = {}
        for key, families in self._buffers.items():
            for family in families:
                family.weights.unshard()
            for index, layer in self._pipeline.layers(key):
                for _, tensor, keys in stored_tensors(layer, index):
                    value = whole_tensor(tensor, self._pipeline.mesh["tp"])
                    found |= {name: value.detach().clone() for name in keys}
            for family in families:
                family.weights.reshard()
        return found

    def all_weights(self) -> dict[str, Tensor]:
        """`weights()` of all ranks together, on the CPU of each: for layers from one module its whole state dict.
        Collective."""
        return collected(self.weights(), self._pipeline.mesh.world, self._pipeline.device)


def _check_replicas(pipeline: Pipeline) -> None:
    """Raises ConfigError where replicas begin with other values. Collective."""
    sums = {
        name: float(parameter.detach().double().sum())
        for key in sorted(pipeline.stages)
        for name, parameter in pipeline.parameters(key)
    }
    theirs = all_gather_json(sums, pipeline.mesh["dp"])
    other = next((name for name in sums if any(repr(one[name]) != repr(sums[name]) for one in theirs)), None)
    if other is not None:
        raise ConfigError(f"layers: {other} begins with other values on other replicas; seed alike before you build")
