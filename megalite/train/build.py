"""Builds what a rank trains: its pipeline program, its stages of the model, and the optimizer over them.

layer specs -> modules without memory -> flat buffers, which give them memory -> optimizer over the buffers
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megalite.comm import ExpertAxes, ParallelMesh, TensorSpec
from megalite.config import OPTIMIZER_SPECS, Config, rates_of
from megalite.engine import (
    BuiltStages,
    ExpertBias,
    QueryKeyClip,
    ScaleHistory,
    Ties,
    VersionedState,
    Weights,
    build_weights,
    norm_axis,
    sharded_maker,
)
from megalite.gradient import WeightGradQueue
from megalite.inventory import DEFAULT_PLAN, WORD_EMBEDDINGS, MemoryPlan, Recompute, boundary_shape, given_plan
from megalite.microbatch_notes import ExpertLoads, Magnitudes
from megalite.models import LayerSpec, build_stack, layer_specs
from megalite.nn import BlockGraphs, LayerStack, fill, on_grid
from megalite.optim import Delay
from megalite.parallel.expert import expert_axes
from megalite.parallel.pipeline import SharedRows, Stage, holders, replica_axes, stage_type
from megalite.parallel.rows import CachedRows
from megalite.parallel.tensor import LayerContext, gather_rounded
from megalite.parallel.tiers import ActivationOffload, Mover, SavedTensors
from megalite.parallel.zero import RankMemory, StageOptions, ZeroOptions
from megalite.schedule import Program, StageKey, StagePlacement
from megalite.train.foreign import ForeignModel
from megalite.train.host_embedding import RowsOptimizer, layer_of, make_rows
from megalite.train.partial_backprop import attach_depths
from megalite.train.planned import PlannedRun
from megalite.train.rollback import PassedOver

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MANY_LAYERS = 1000  # building more takes seconds, which are announced


def parameter_dtype(config: Config) -> torch.dtype:
    """--bf16, --fp16, --fp64, else fp32."""
    return DTYPES[config.training.precision.name]


def wide_dtype(config: Config) -> torch.dtype:
    """The wider of fp32 and the parameter dtype: masters, gradients, losses."""
    return torch.promote_types(torch.float32, parameter_dtype(config))


@dataclass(frozen=True)
class Model(Weights):
    """This rank's part of the model."""

    foreign: ForeignModel | None = None  # the module of `--model-module`, if it is one
    rows: CachedRows | None = None  # of the word embedding, where they are on the host and of this rank
    plan: MemoryPlan = DEFAULT_PLAN  # where its memory lies
    passed: PassedOver = field(default_factory=PassedOver)  # iterations whose samples are passed over


def build_model(
    config: Config, run: PlannedRun, mesh: ParallelMesh, device: torch.device, mover: Mover | None = None
) -> Model:
    """Builds, initialises and shards this rank's stages of a run. config: as checkpoints and flags have settled it.
    mover: of the device; None: one is made."""
    program, foreign, plan = run.program, run.foreign, run.plan
    more = {"expert": config.model.experts.num_experts is not None, "adapter": config.model.adapted_parts}
    families = ["dense", *(name for name, has in more.items() if has)]
    passed, rule = PassedOver(config.training.iterations_to_skip), config.optimizer.optimizer
    mover, rows = mover or (foreign.parts.mover if foreign else Mover(device)), None
    if config.optimizer.offload.embedding_offload is not None:
        axis = norm_axis(mesh, program, families, sharded=config.parallel.zero_stage > 0)
        rows = make_rows(config, mesh, program.placement, parameter_dtype(config), axis, mover)
    built = foreign.build(mesh) if foreign else _build_stages(config, run, mesh, mover, rows)
    options = zero_options(config, plan)
    alike = StageOptions(
        whole=OPTIMIZER_SPECS[rule].whole if foreign is None else foreign.parts.names.updated_whole(rule),
        rates=rates_of(config),
        fill=None if device.type == "meta" else partial(fill, seed=config.training.seed),
    )
    # Per stage; a schedule with stale gradients has one stage per rank, and the others have 0 everywhere.
    staleness = program.staleness[program.placement.stages_of(mesh.coordinate("pp"))[0][0]]
    delay = Delay(staleness, config.parallel.pipeline_flush_steps, passed)
    weights = build_weights(
        built,
        mesh,
        program,
        families=families,
        ties=_ties(config, mesh, program.placement) if foreign is None else foreign.parts.ties,
        options=options,
        alike=alike,
        memory=RankMemory(device, options, mover),
        make_optimizer=sharded_maker(
            config.optimizer,
            config.staleness,
            delay,
            fraction=plan.fraction,
            file_fraction=plan.file_fraction,
            kind=None if rows is None else partial(RowsOptimizer, rows=rows),
        ),
        delay=delay,
        states=_states(config, mesh, program, {key: stage for key, (stage, _) in built.items()}),
    )
    if config.training.partial_backprop_groups > 1:
        attach_depths(config, mesh, built, weights)
    if config.model.cpu_offloading_num_layers and foreign is None:
        saved = SavedTensors(mover)
        for module in (module for _, modules in built.values() for module in modules):
            blocks = [module.get_submodule(name) for name in module.names if name.startswith("layers.")]
            ActivationOffload(blocks[: config.model.cpu_offloading_num_layers], saved)
    return Model(**vars(weights), foreign=foreign, rows=rows, plan=plan, passed=passed)


def _states(
    config: Config, mesh: ParallelMesh, program: Program, stages: Mapping[StageKey, Stage]
) -> list[VersionedState]:
    """What an update changes beside the optimizer: nothing in a dense model without delayed scales of fp8."""
    axis, copies = mesh.over("tp", "cp", "dp"), replica_axes(mesh, program.placement)
    found: list[VersionedState] = []
    if config.model.experts.moe_router_enable_expert_bias:
        found.append(ExpertBias(stages, config.model.experts.moe_router_bias_update_rate, axis, copies))
    if config.training.float8.fp8_format and config.training.float8.fp8_recipe == "delayed":
        found.append(ScaleHistory(stages, axis, copies))
    if config.model.clip.qk_clip:
        found.append(QueryKeyClip(stages, config.model.clip, mesh.over("cp", "dp"), copies))
    return found


def _ties(config: Config, mesh: ParallelMesh, placement: StagePlacement) -> Ties:
    model = config.model
    apart = model.shares_embedding and not model.adapted_parts and placement.num_stages > 1
    if apart and mesh.takes_turns:
        shape = model.vocab_size, model.hidden_size
        unlike = partial(SharedRows, mesh, placement, shape, model.padded_vocab_size)
        return Ties(frozenset({WORD_EMBEDDINGS}), unlike=unlike)
    return Ties(frozenset({WORD_EMBEDDINGS}), holders(placement)) if apart else Ties()


def _build_stages(
    config: Config, run: PlannedRun, mesh: ParallelMesh, mover: Mover, rows: CachedRows | None
) -> BuiltStages:
    """This rank's stages and their modules, one for each weight version; what they note is the stage's."""
    program, specs, built = run.program, layer_specs(config.model), BuiltStages()
    if len(specs) > MANY_LAYERS and mesh.world.is_first:
        logger.info("building a model of %s layers, which takes a while", f"{len(specs):,}")
    # Where a layer's weights go when the next begins (ZeRO-3, --param-offload), turns of two layers cannot mix.
    halves = "layer" if config.parallel.zero_stage == 3 or run.plan.hosts_params else "stage"
    context = layer_context(
        config,
        mesh,
        mover.device,
        rows,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=config.training.seed,
        tapped=OPTIMIZER_SPECS[config.optimizer.optimizer].taps,
        float8=config.training.float8,
        keeps_float8=config.keeps_float8,
        halves=halves if config.parallel.tp_comm_overlap else "",
    )
    grid = config.parallel.grid
    context = context if grid is None else on_grid(context, mesh, grid)
    rank, last = mesh.coordinate("pp"), program.placement.num_stages - 1
    own, _ = config.of_stage(program.placement.stages_of(rank)[0][0], mesh.size("world"))
    spec = boundary_spec(own, mover.device)
    for key in program.placement.stages_of(rank):
        notes = replace(context, weight_grads=WeightGradQueue(), loads=ExpertLoads(), magnitudes=Magnitudes())
        items, again = [specs[i] for i in run.cuts[key[0]]], run.plan.recompute_of(key[0])
        modules = [build_module(config, items, notes, again) for _ in range(program.weight_versions[rank])]
        built[key] = (
            stage_type(program, key, [stage for stage, _ in built.values()], mover)(
                modules,
                notes.weight_grads,
                spec=spec,
                is_first=key[0] == 0,
                is_last=key[0] == last,
                loads=notes.loads if config.model.experts.num_experts is not None else None,
                magnitudes=notes.magnitudes if config.training.float8.fp8_format is not None else None,
            ),
            modules,
        )
    return built


def build_module(config: Config, specs: list[LayerSpec], context: LayerContext, recompute: Recompute) -> LayerStack:
    """The layers of a stage in one weight version."""
    stack = build_stack(config.model, specs, context, recompute=recompute)
    if config.gathers_float8:
        gather_rounded(stack)
    if config.training.compile:
        stack.compile_blocks(on_device=torch.device(context.device).type != "cpu")
    if config.parallel.hardware.cuda_graph_impl == "local":
        BlockGraphs(stack, context.weight_grads)
    return stack


def layer_context(
    config: Config, mesh: ParallelMesh, device: torch.device, rows: CachedRows | None, **more: Any
) -> LayerContext:
    """The axes over which layers of this run are cut, and the form of their parameters; and what else is given."""
    return LayerContext(
        tp=mesh["tp"],
        sharers=mesh.sharing_keys(config.model.query_groups),
        cp=mesh.context(gathers=config.parallel.context.cp_comm_type == "all_gather"),
        experts=expert_axes(mesh, config) if config.model.experts.num_experts is not None else ExpertAxes(),
        dtype=parameter_dtype(config),
        device=device,
        host_embedding=None if rows is None else layer_of(rows),
        deferred=True,
        **more,
    )


def zero_options(config: Config, plan: MemoryPlan | None = None) -> ZeroOptions:
    """plan: None: what flags say."""
    parallel = config.parallel
    return ZeroOptions(
        stage=parallel.zero_stage,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
        grad_reduce_in_bf16=parallel.grad_reduce_in_bf16,
        plus_plus=parallel.zero_plus_plus,
        offload_params=(given_plan(config) if plan is None else plan).hosts_params,
    )


def boundary_spec(config: Config, device: torch.device) -> TensorSpec:
    """The tensor that one stage sends to the next."""
    dtype = wide_dtype(config) if config.model.fp32_residual_connection else parameter_dtype(config)
    return TensorSpec(boundary_shape(config), dtype, device)
