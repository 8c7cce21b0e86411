"""What a rank holds, read from its stages, buffers and optimizer: these are built on `meta`, over axes without groups.

    weights, gradients    memory of the flat buffers
    master, moments       memory of the optimizer
    host, file            of all these, what lies there

Nothing is allocated, and no rank is started: the stages of a rank take some tenths of a second, whatever their size.
What comes and goes in a step is no part of it: closed forms have that (`megalite.planner.model_states`), which the
search uses for all of it. Proof that they agree: tests/unit/train/test_built_states.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh
from megalite.config import Config
from megalite.engine import BuiltStages, quantize_base
from megalite.inventory import first_alike
from megalite.library import Parts
from megalite.parallel.tensor import Int8Products, Linear
from megalite.parallel.tiers import MetaMover
from megalite.parallel.zero import ParameterBuffers
from megalite.planner import StateBytes, fullest_owner
from megalite.schedule import StageKey
from megalite.train.build import Model, build_model
from megalite.train.foreign import ForeignModel
from megalite.train.make_mesh import mesh_on_meta
from megalite.train.planned import PlannedRun


def with_held(run: PlannedRun) -> PlannedRun:
    """The run with what the ranks at each pipeline coordinate hold."""
    known: dict[Any, StateBytes] = {}
    held = []
    for coordinate in range(run.program.num_ranks):
        stages = run.stages_of(coordinate)
        alike: Any = coordinate  # of our own layers those of one stage are often those of another
        if run.foreign is None and not run.config.parallel.meshes:
            alike = (
                run.program.weight_versions[coordinate],
                *(first_alike(run.config.model, run.cuts[s]) for s in stages),
            )
        if alike not in known:
            known[alike] = held_at(run, coordinate)
        held.append(known[alike])
    return replace(run, held=tuple(held))


def held_at(run: PlannedRun, coordinate: int) -> StateBytes:
    """Of the rank at this pipeline coordinate that holds most: owners of whole matrices have unequal shares."""
    rank = mesh_on_meta(run.config.parallel, run.world_size).ranks_of(coordinate)[0]
    first = build_on_meta(run, rank)
    families: dict[str, list[ParameterBuffers]] = {}
    for family in first.families:
        if family.options.stage and any(segment.whole for b in family.buckets for segment in b.plan.segments):
            families.setdefault(family.axes.name, []).append(family)
    found = [read(first)]
    for same in families.values():
        owner = fullest_owner(run.config, [bucket.plan for family in same for bucket in family.buckets])
        other = same[0].axes.shard.ranks[owner]
        found += [read(build_on_meta(run, other))] if other != rank else []
    return max(found, key=lambda states: states.held + states.host + states.file)


def build_on_meta(run: PlannedRun, rank: int) -> Model:
    """This world rank's part of the model, without values."""
    foreign: Any = None if run.foreign is None else _Looked(run.foreign, run)
    mover, mesh = MetaMover(on_cpu=run.on_cpu), mesh_on_meta(run.config.parallel, run.world_size, rank)
    model = build_model(plain(run.config), replace(run, foreign=foreign), mesh, mover.device, mover)
    if run.config.model.lora.frozen_weights_int8:
        quantize_base(model)
    return model


def plain(config: Config) -> Config:
    """Without what changes how blocks run, or how tokens travel, and not what they hold."""
    experts = replace(config.parallel.experts, moe_token_dispatcher_type="alltoall")
    hardware = replace(config.parallel.hardware, cuda_graph_impl="none")
    return replace(
        config,
        model=replace(config.model, cpu_offloading_num_layers=0),
        training=replace(config.training, compile=False, partial_backprop_groups=1),
        parallel=replace(config.parallel, hardware=hardware, experts=experts),
    )


@dataclass(frozen=True)
class _Looked:
    """A module of the user's own in the place of itself: what learns in its stages, and no layers."""

    module: ForeignModel
    run: PlannedRun

    @property
    def parts(self) -> Parts:
        return self.module.parts

    def build(self, mesh: ParallelMesh) -> BuiltStages:
        keys = self.run.program.placement.stages_of(mesh.coordinate("pp"))
        versions = self.run.program.weight_versions[mesh.coordinate("pp")]
        stage: Any = nn.Module()  # in the place of one, which nobody runs
        return {key: (stage, [_HeldParameters(self.module, key) for _ in range(versions)]) for key in keys}


class _HeldParameters(nn.Module):
    """What learns in a stage of somebody's module, as the layers of a stage give it."""

    names: tuple[str, ...] = ()

    def __init__(self, module: ForeignModel, key: StageKey) -> None:
        super().__init__()
        self._held: list[tuple[str, nn.Parameter]] = []
        for name, shape, placement in module.held[key[0]]:
            parameter: Any = nn.Parameter(torch.empty(shape, dtype=module.dtype, device="meta"))
            parameter.placement = placement
            self._held.append((name, parameter))

    def ordered(self) -> list[nn.Module]:
        return []

    def logical_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return self._held


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(model: Model) -> StateBytes:
    """What the buffers and the optimizer of a rank on `meta` hold. Every piece of memory counts once, where it was
    first made: of masters that are the weights nothing more."""
    mover = model.optimizer.buffers[0].rank_memory.mover if model.optimizer.buffers else None
    assert mover is None or isinstance(mover, MetaMover)
    seen: set[int] = set()

    def fresh(tensors: Iterable[Tensor], *, away: bool) -> int:
        """Bytes on the host (`away`) or on the device that were not counted before."""
        storages = {
            x.untyped_storage()._cdata: x.untyped_storage().nbytes()
            for x in tensors
            if mover is not None and mover.on_host(x) == away
        }
        new = storages.keys() - seen
        seen.update(new)
        return sum(storages[key] for key in new)

    weights, gradients = list(_weights(model)), list(_gradients(model))
    host = fresh([*weights, *gradients], away=True)
    on_device = {"weights": fresh(weights, away=False), "gradients": fresh(gradients, away=False)}
    held, masters = model.optimizer.memory(), model.optimizer.masters
    filed = [shard.tensor for shard in masters if shard.file is not None]
    away = [shard.tensor for shard in masters if shard.offloaded and shard.file is None]
    here = [shard.tensor for shard in masters if not shard.offloaded]
    here += [shard.remainders.remainder for shard in masters if shard.remainders is not None]
    # `memory` adds up shards, beside which there are gaps.
    moments = held["offloaded"] - held["file"] - sum(tensor.nbytes for tensor in away)
    file = held["file"] - sum(tensor.nbytes for tensor in filed) + fresh(filed, away=False)
    host += fresh(away, away=True) + moments
    return StateBytes(**on_device, master=fresh(here, away=False), moments=held["state"], host=host, file=file)


def _weights(model: Model) -> Iterator[Tensor]:
    for family in model.families:
        held = [*family.weights.coming, *(w for b in (*family.buckets, *family.frozen) for w in b.weights)]
        yield from _tensors(held)
    if model.rows is not None:
        yield model.rows.weight
    modules = [module for stage in model.stages.values() for module in stage.modules] if model.foreign is None else []
    layers = [layer for module in modules for layer in module.modules()]
    products = (layer.products for layer in layers if isinstance(layer, Linear))
    if scales := [each.scale for each in products if isinstance(each, Int8Products)]:
        yield from (*scales, *(p for layer in layers for p in layer.parameters(recurse=False) if not p.requires_grad))


def _gradients(model: Model) -> Iterator[Tensor]:
    """With the slices that are there only while a step reads them (stages 2 and 3)."""
    if model.rows is not None:
        yield model.rows.gradient
    held = [gradient for family in model.families for bucket in family.buckets for gradient in bucket.gradients]
    yield from (gradient.reduced for gradient in held)
    yield from _tensors(held)


def _tensors(objects: Iterable[object]) -> Iterator[Tensor]:
    return (value for each in objects for value in vars(each).values() if isinstance(value, Tensor))
