"""The weights of one rank: stages made of layers, flat buffers under them, the optimizer over the buffers.

    built stages (modules, one for each weight version)  ->  buffers, which give them memory  ->  optimizer

Who makes the stages does not matter here: `megalite.train` makes them of our layers or of a user's module,
`megalite.library` of a user's list of layers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.comm import Axis, Handle, ParallelMesh, TensorShard
from megalite.engine.versioned import VersionedState
from megalite.inventory import AXIS_FAMILIES
from megalite.optim import EMA, Delay, pieces
from megalite.parallel.pipeline import Stage, replica_axes, start_shared_sum
from megalite.parallel.tensor import hold_in_8_bits, place_of
from megalite.parallel.zero import (
    ParameterBuffers,
    RankMemory,
    ShardedOptimizer,
    StageOptions,
    ZeroOptions,
    release_frozen,
    stage_buffers,
)
from megalite.schedule import ChunkUse, Program, StageKey, StagePlacement

OLDER = "previous/"  # what names of older weight versions begin with in checkpoints


class StageLayers(Protocol):
    """The layers of a stage in one weight version."""

    names: tuple[str, ...]

    def ordered(self) -> list[nn.Module]:
        """Them, in order."""

    def logical_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """(Logical name, parameter), each parameter once; those that learn."""

    def get_submodule(self, target: str) -> nn.Module:
        """Torch's own."""


BuiltStages = dict[StageKey, tuple[Stage, Sequence[StageLayers]]]
SumCopies = Callable[[Sequence[Tensor]], Handle]


@dataclass(frozen=True)
class Ties:
    """Parameters that several stages hold."""

    names: frozenset[str] = frozenset()
    ranks: Sequence[int] = ()  # along the pipeline, that have a copy
    home: StageKey = (0, 0)  # the stage whose copies enter the norm and checkpoints
    unlike: Callable[[], SumCopies] | None = None  # makes what sums them, where stages are cut differently


@dataclass(frozen=True)
class Weights:
    """This rank's part of the weights, and the state that each update changes with them."""

    stages: dict[StageKey, Stage]  # by (stage, replica)
    buffers: dict[StageKey, list[ParameterBuffers]]  # of each stage, one for each family and dtype of its parameters
    optimizer: ShardedOptimizer
    placement: StagePlacement  # which rank holds which stage
    sum_copies: SumCopies  # sums the gradients of a parameter that several stages hold
    num_versions: int  # weight versions that each stage keeps (2BW: 2)
    together: int | None  # micro-batches of an update, where a batch has several (PipeDream); None: a batch is one
    delay: Delay  # how many updates old this rank's gradients are
    states: Sequence[VersionedState]  # what else an update changes, in the order in which all ranks step it

    @property
    def families(self) -> list[ParameterBuffers]:
        """The buffers of all stages. In Chimera, ranks hold the same stages in different orders; their reductions must
        be issued in one order."""
        return [made for _, stage in sorted(self.buffers.items()) for made in stage]

    def follow(self, plan: Sequence[ChunkUse] | None) -> None:
        """The order in which a batch uses weights that come and go; None: it has ended. One plan serves all buffers."""
        for family in self.families[:1]:
            family.weights.unsharder.follow(plan)

    def start_tied_sums(self) -> list[Handle]:
        """Starts the sums of tied gradients over the stages that hold a copy."""
        stages = [[t for made in stage for t in made.gradients.tied()] for _, stage in sorted(self.buffers.items())]
        return [self.sum_copies(copies) for copies in zip(*(tied for tied in stages if tied), strict=True)]

    def older_shards(self, version: int) -> list[TensorShard]:
        """The weight versions before `version` that this rank keeps (2BW, PipeDream), the newest first (views).
        `previous/<name>`: compute weights of one update ago; `previous/N/<name>`: of N updates ago."""
        return [shard for _, shards in self._older_versions(version) for shard in shards]

    def after_load(self, version: int, older: Collection[str]) -> bool:
        """Values of `version` were written through shards. Older versions of which nothing was loaded, as a layout that
        keeps fewer has saved fewer, become copies of the next newer one; where none was, of the masters. Collective.

        older: names of the shards of older versions that were loaded. Returns whether any of them was missing.
        """
        self.optimizer.after_load(version)
        for state in self.states:
            state.after_load(version)
        missing, newer = False, self._compute_weights(version)
        for old, shards in self._older_versions(version):
            missing = missing or any(shard.name not in older for shard in shards)
            if not older:
                self.optimizer.write_weights(old, as_masters=True)
                for state in self.states:
                    state.copy(version, old)
                continue
            for shard, next_newer in zip(shards, newer, strict=True):
                if shard.name not in older:
                    shard.local.copy_(next_newer.local)
            for family in (family for family in self.optimizer.buffers if not family.frozen):
                family.weights.gather(old)
            for state in self.states:
                state.after_load(old)
            newer = shards
        return missing

    def _older_versions(self, version: int) -> Iterator[tuple[int, list[TensorShard]]]:
        for ago in range(1, self.num_versions):
            prefix = OLDER if ago == 1 else f"{OLDER}{ago}/"
            yield version - ago, self._compute_weights(version - ago, prefix)

    def _compute_weights(self, version: int, prefix: str = "") -> list[TensorShard]:
        states = [shard for state in self.states for shard in state.shards(version, prefix)]
        return [*self.optimizer.version_shards(version, prefix), *states]

    @torch.no_grad()
    def begin_averages(self) -> None:
        """Makes the averages (`--ema-decay`) copies of the masters, which were loaded. `after_load` of the optimizer
        must follow."""
        for master, average in self._averaged():
            average.copy_(master)

    @contextmanager
    def averages_as_weights(self, version: int) -> Iterator[None]:
        """Within the context, the compute weights of `version` are made of the averages, which have changed places with
        the masters: nothing else is needed in memory. Collective."""
        self._swap(version)
        try:
            yield
        finally:
            self._swap(version)

    @torch.no_grad()
    def _swap(self, version: int) -> None:
        for master, average in self._averaged():
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)
        self.optimizer.write_weights(version)

    def _averaged(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(Masters, their averages), flat and in pieces, once nothing reads or writes them."""
        self.optimizer.finish_step()
        self.optimizer.wait_for_weights()
        for sub in self.optimizer.sub_optimizers:
            for master in sub.masters:
                master.join()
                average = sub.moments(master)[EMA]
                for piece in pieces(average):
                    yield master.tensor.view(-1)[piece], average.view(-1)[piece]


def norm_axis(mesh: ParallelMesh, program: Program, families: Iterable[str], *, sharded: bool) -> Axis:
    """The ranks that together hold one copy of the model and, where it is sharded, of the optimizer state: every axis
    along which owned gradients of some family differ.

    sharded: whether ZeRO shards the optimizer state.
    """
    differ = [axis for name in families for axis in AXIS_FAMILIES[name].differs(sharded=sharded)]
    # PipeDream steps stage by stage, micro-batch by micro-batch: no norm over the pipeline exists.
    pipeline = () if program.update_per_microbatch else ("pp",)
    return mesh.spanning(*differ, *pipeline)


def build_weights(
    built: BuiltStages,
    mesh: ParallelMesh,
    program: Program,
    *,
    families: Sequence[str],
    ties: Ties,
    options: ZeroOptions,
    alike: StageOptions,
    memory: RankMemory,
    make_optimizer: Callable[..., ShardedOptimizer],
    delay: Delay,
    states: Sequence[VersionedState],
) -> Weights:
    """Puts the parameters of stages into buffers, and an optimizer over these (`sharded_maker`). families: of
    parameters, that the model has. alike: what holds for every stage. states: of these stages."""
    copies = replica_axes(mesh, program.placement)
    axes = {name: options.axes(mesh, name) for name in families}
    axis = norm_axis(mesh, program, families, sharded=options.stage > 0)
    buffers: dict[StageKey, list[ParameterBuffers]] = {}
    for key, (_, modules) in built.items():
        buffers[key] = stage_buffers(
            [module.logical_parameters() for module in modules],
            axes,
            options=options,
            pipeline_stage=replace(
                alike,
                tied=ties.names,
                counts_tied=key == ties.home,
                extra_reduce=[copies[key[0]]] if key[0] in copies else [],  # Chimera's replicas of the stage
                replica=key[1],
                keep_gradients=program.keeps_gradients,
                num_gradients=program.gradient_buffers,
            ),
            memory=memory,
        )
        for module in modules if buffers[key] else ():
            buffers[key][0].weights.attach(module.ordered(), *(made.weights for made in buffers[key][1:]), stage=key)
    optimizer = make_optimizer([made for stage in buffers.values() for made in stage], norm_axis=axis)
    for state in states:
        state.optimizer = optimizer
    return Weights(
        stages={key: stage for key, (stage, _) in built.items()},
        buffers=buffers,
        optimizer=optimizer,
        placement=program.placement,
        sum_copies=ties.unlike() if ties.unlike else partial(start_shared_sum, mesh.through(ties.ranks, apart="tied")),
        num_versions=program.weight_versions[mesh.coordinate("pp")],
        together=program.placement.round if program.update_per_microbatch else None,
        delay=delay,
        states=states,
    )


def quantize_base(weights: Weights) -> None:
    """The base beside adapters in 8 bits: frozen matrices of blocks become codes and scales. What else is frozen
    (embeddings, norms, biases, the output layer) moves out of the flat buffers, whose memory is let go. Collective over
    the ranks of a stage; once, when the base is loaded: nothing is left to do after that."""
    if not any(family.frozen for family in weights.optimizer.buffers):
        return
    moved: dict[tuple[int, int], Tensor] = {}
    modules = [module for _, stage in sorted(weights.stages.items()) for module in stage.modules]
    hold_in_8_bits(modules)
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        if not parameter.requires_grad and parameter.is_floating_point():
            place = place_of(parameter)
            parameter.data = moved[place] if place in moved else moved.setdefault(place, parameter.data.clone())
    release_frozen(weights.optimizer.buffers)
