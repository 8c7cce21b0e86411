"""Builds what a rank trains: its pipeline program, its stages of the model, and the optimizer over them.

layer specs -> modules without memory -> flat buffers, which give them memory -> optimizer over the buffers
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megalite.comm import Axis, ExpertAxes, FamilyAxes, ParallelMesh, TensorSpec
from megalite.config import OPTIMIZER_SPECS, Config
from megalite.gradient import WeightGradQueue
from megalite.inventory import AXIS_FAMILIES, boundary_shape
from megalite.microbatch_notes import ExpertLoads, Magnitudes
from megalite.models import LayerSpec, build_stack, layer_specs
from megalite.nn import LayerStack, fill
from megalite.optim import CORRECTIONS, OPTIMIZERS, Delay, UpdateRule
from megalite.parallel.pipeline import SharedGradient, Stage, holders, replica_axes, stage_type
from megalite.parallel.rows import CachedRows
from megalite.parallel.tensor import WORD_EMBEDDINGS, LayerContext
from megalite.parallel.zero import (
    ActivationOffload,
    DelayedOptimizer,
    MakeOptimizer,
    ParameterBuffers,
    ParamGroup,
    ShardedOptimizer,
    ZeroOptions,
    stage_buffers,
)
from megalite.schedule import Program, StageKey, StagePlacement
from megalite.train.expert_bias import ExpertBias
from megalite.train.foreign import BuiltStages, ForeignModel, Ties
from megalite.train.host_embedding import layer_of, make_rows, optimizer_type
from megalite.train.scale_history import ScaleHistory

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MANY_LAYERS = 1000
"""Building more than this takes seconds, which are announced."""


def parameter_dtype(config: Config) -> torch.dtype:
    """--bf16, --fp16, --fp64, else fp32."""
    return DTYPES[config.training.precision.name]


def wide_dtype(config: Config) -> torch.dtype:
    """The wider of fp32 and the parameter dtype: masters, gradients, losses."""
    return torch.promote_types(torch.float32, parameter_dtype(config))


@dataclass(frozen=True)
class Model:
    """This rank's part of the model: its stages, their buffers and the optimizer over them.

    stages: by (stage, replica).
    buffers: of each stage, one `ParameterBuffers` for each family and dtype of its parameters.
    placement: which rank holds which stage.
    shared: sums the gradient of tied embeddings over the stages that hold a copy.
    num_versions: weight versions that each stage keeps (2BW: 2).
    update_per_microbatch: as in `Program`.
    delay: how many updates old this rank's gradients are.
    foreign: the module of `--model-module`, if it is one.
    rows: of the word embedding, where they are on the host and of this rank.
    """

    stages: dict[StageKey, Stage]
    buffers: dict[StageKey, list[ParameterBuffers]]
    optimizer: ShardedOptimizer
    placement: StagePlacement
    shared: SharedGradient
    num_versions: int
    update_per_microbatch: bool
    delay: Delay
    expert_bias: ExpertBias
    scales: ScaleHistory
    foreign: ForeignModel | None = None
    rows: CachedRows | None = None


def build_model(
    config: Config,
    mesh: ParallelMesh,
    program: Program,
    cuts: list[range],
    device: torch.device,
    foreign: ForeignModel | None = None,
) -> Model:
    """Builds, initialises and shards this rank's stages, of our layers or `foreign`. `cuts[s]`: indices of stage s."""
    placement, rank = program.placement, mesh.coordinate("pp")
    ties = _ties(config, placement, cuts) if foreign is None else foreign.ties
    copies = replica_axes(mesh, placement)
    families, norm_axis = _families(config, mesh), _norm_axis(config, mesh, program)
    context = LayerContext(tp=mesh["tp"], dtype=parameter_dtype(config), device=device)
    which = placement.stages_of(rank), families["dense"], norm_axis, copies
    rows = make_rows(config, context, optimizer_factory(config), *which)
    built = foreign.build(mesh, program) if foreign else _build_stages(config, mesh, program, cuts, device, rows)
    stages = {key: stage for key, (stage, _) in built.items()}
    buffers: dict[StageKey, list[ParameterBuffers]] = {}
    for key, (_, modules) in built.items():
        buffers[key] = stage_buffers(
            [module.logical_parameters() for module in modules],
            families,
            beside=[made for stage in buffers.values() for made in stage],  # share scratch memory
            options=zero_options(config),
            tied=ties.names,
            counts_tied=key == ties.home,
            replica=key[1],
            num_gradients=program.gradient_buffers,
            keep_gradients=program.keeps_gradients,
            whole=OPTIMIZER_SPECS[config.optimizer.optimizer].whole,  # which parameters no shard boundary may cut
            extra_reduce=[copies[key[0]]] if key[0] in copies else [],  # Chimera's replicas of the stage
            fill=partial(fill, seed=config.training.seed),
            device=device,
        )
        for module in modules if buffers[key] else ():
            buffers[key][0].weights.attach(module.ordered(), *(made.weights for made in buffers[key][1:]), stage=key)
            blocks = [module.get_submodule(name) for name in module.names if name.startswith("layers.")]
            ActivationOffload(blocks[: config.model.cpu_offloading_num_layers])
    # Per stage; a schedule with stale gradients has one stage per rank, and the others have 0 everywhere.
    delay = Delay(program.staleness[rank], config.parallel.pipeline_flush_steps, config.training.iterations_to_skip)
    optimizer = _optimizer(config, [made for stage in buffers.values() for made in stage], delay, norm_axis, rows)
    return Model(
        stages,
        buffers,
        optimizer,
        placement,
        SharedGradient(mesh.through(ties.ranks, apart="embedding")),
        program.weight_versions[rank],
        program.update_per_microbatch,
        delay,
        ExpertBias(stages, config.model.experts.moe_router_bias_update_rate, mesh.over("tp", "cp", "dp"), copies),
        ScaleHistory(stages, mesh.over("tp", "cp", "dp"), copies),
        foreign,
        rows,
    )


def _optimizer(
    config: Config, buffers: list[ParameterBuffers], delay: Delay, norm_axis: Axis, rows: CachedRows | None
) -> ShardedOptimizer:
    offload = config.optimizer.offload
    return optimizer_type(rows, DelayedOptimizer if offload.delayed_parameter_update else ShardedOptimizer)(
        buffers,
        make_optimizer=optimizer_factory(config, delay),
        norm_axis=norm_axis,
        offload_fraction=offload.fraction,
        offload_path=offload.optimizer_offload_path,
        file_fraction=config.file_fraction,
        store_param_remainders=config.optimizer.store_param_remainders,
    )


def _ties(config: Config, placement: StagePlacement, cuts: list[range]) -> Ties:
    apart = config.model.trains_tied_embeddings and len(cuts) > 1
    return Ties(frozenset({WORD_EMBEDDINGS}), holders(placement)) if apart else Ties()


def _build_stages(
    config: Config,
    mesh: ParallelMesh,
    program: Program,
    cuts: list[range],
    device: torch.device,
    rows: CachedRows | None,
) -> BuiltStages:
    """This rank's stages and their modules, one for each weight version; what they note is the stage's."""
    specs, built = _announced(layer_specs(config.model), mesh), BuiltStages()
    rank, last, spec = mesh.coordinate("pp"), program.placement.num_stages - 1, boundary_spec(config, device)
    for key in program.placement.stages_of(rank):
        own, items = config.for_stage(key[0]), [specs[i] for i in cuts[key[0]]]
        notes = WeightGradQueue(), ExpertLoads(), Magnitudes()
        modules = [_build_module(own, mesh, items, notes, device, rows) for _ in range(program.weight_versions[rank])]
        ends, (queue, loads, sizes) = (key[0] == 0, key[0] == last), notes
        make = stage_type(program, key, [stage for stage, _ in built.values()], device)
        stage = make(modules, queue, spec=spec, is_first=ends[0], is_last=ends[1], loads=loads, magnitudes=sizes)
        built[key] = stage, modules
    return built


def _families(config: Config, mesh: ParallelMesh) -> dict[str, FamilyAxes]:
    """The axes of the families of parameters that the model has."""
    more = {"expert": config.model.experts.num_experts is not None, "adapter": config.model.adapted_parts}
    return {name: mesh.family(name) for name in ("dense", *(name for name, has in more.items() if has))}


def _announced(specs: list[LayerSpec], mesh: ParallelMesh) -> list[LayerSpec]:
    if len(specs) > MANY_LAYERS and mesh.world.is_first:
        logger.info("building a model of %s layers, which takes a while", f"{len(specs):,}")
    return specs


def _build_module(
    config: Config,
    mesh: ParallelMesh,
    specs: list[LayerSpec],
    notes: tuple[WeightGradQueue, ExpertLoads, Magnitudes],
    device: torch.device,
    rows: CachedRows | None,
) -> LayerStack:
    context = LayerContext(
        tp=mesh["tp"],
        cp=mesh.context(gathers=config.parallel.context.cp_comm_type == "all_gather"),
        experts=mesh.experts() if config.model.experts.num_experts is not None else ExpertAxes(),
        sequence_parallel=config.parallel.sequence_parallel,
        dtype=parameter_dtype(config),
        device=device,
        seed=config.training.seed,
        weight_grads=notes[0],
        float8=config.training.float8,
        loads=notes[1],
        magnitudes=notes[2],
        halves=config.halves,
        host_embedding=layer_of(rows),
        deferred=True,
    )
    stack = build_stack(config.model, specs, context)
    if config.training.compile:
        stack.compile_blocks(on_device=device.type != "cpu")
    return stack


def _norm_axis(config: Config, mesh: ParallelMesh, program: Program) -> Axis:
    """The ranks that together hold one copy of the model and, where it is sharded, of the optimizer state. Every axis
    along which owned gradients differ must be in it, or the global norm is wrong."""
    shards = AXIS_FAMILIES["dense"].shard if config.parallel.zero_stage else ()
    if config.model.experts.num_experts is not None:
        shards = ("cp", "dp")  # with tp: etp x ep x edp, along which experts differ; copies are counted once
    # PipeDream steps stage by stage, micro-batch by micro-batch: no norm over the pipeline exists.
    pipeline = () if program.update_per_microbatch else ("pp",)
    return mesh.over("tp", *shards, *pipeline)


def zero_options(config: Config) -> ZeroOptions:
    parallel = config.parallel
    return ZeroOptions(
        stage=parallel.zero_stage,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
        grad_reduce_in_bf16=parallel.grad_reduce_in_bf16,
        offload_params=config.optimizer.offload.hosts_params,
    )


def boundary_spec(config: Config, device: torch.device) -> TensorSpec:
    """The tensor that one stage sends to the next."""
    dtype = wide_dtype(config) if config.model.fp32_residual_connection else parameter_dtype(config)
    return TensorSpec(boundary_shape(config), dtype, device)


def optimizer_factory(config: Config, delay: Delay | None = None) -> MakeOptimizer:
    """Parameter groups -> the update rule of `--optimizer`, corrected for the delay of its gradients."""
    settings, correction = config.optimizer, config.staleness

    def make(groups: list[ParamGroup]) -> Any:
        rule = OPTIMIZERS[settings.optimizer](groups, settings)
        if delay is None or not isinstance(rule, UpdateRule):
            return rule
        return CORRECTIONS[correction.method](rule, delay, correction.lookahead)

    return make
