"""What a run says and checks before anything of the model's size is allocated: the table, advice, memory.

A refusal must be sure: a run that would fit is never refused. So what is compared with what is free (and with swap) is
what the ranks that share a pool need at least: their predictions less the error of the estimate, with what comes and
goes inside a layer counted once, since no two ranks need be there at one time. The warning takes the prediction as it
is.
"""

import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.comm import Axis, ParallelMesh, World, all_gather_json
from megalite.config import Config, config_problems
from megalite.errors import ConfigError, MegaliteError, ScheduleError
from megalite.host_memory import Pool, host_pools, machine_id
from megalite.inventory import MemoryPlan, stage_layer_ranges
from megalite.nn import NARROWEST_HEAD, use_newer_kernel
from megalite.parallel.pipeline import Executor, PipelineTracer
from megalite.parallel.tensor import check_float8
from megalite.planner import RankMemory, float8_problems, foreign_rows, format_table, shared_memory_bytes, startup_rows
from megalite.progress import in_units
from megalite.schedule import Program, division_text
from megalite.train.build import parameter_dtype
from megalite.train.built_states import with_held
from megalite.train.foreign import ForeignModel
from megalite.train.kept_activations import UnseenGpu, with_kept
from megalite.train.planned import PlannedRun

logger = logging.getLogger(__name__)

ESTIMATE_ERROR = 0.05  # the estimate may be so much too high (`tools/check_plan.py`)
DOUBTFUL = 0.9
WORTH_A_LOOK = 1 << 24  # bytes of activations
LARGEST = 1 << 60  # bytes of a rank: tensors that are larger cannot even be without values
PRICED_MICROBATCHES = 1_000  # a remedy that needs another program is priced for batches up to this long

# Of a rank: (pool, whether its device's memory comes from it; else what the rank keeps on its host).
Pools = Sequence[tuple[Pool, bool]]


def open_module(config: Config, mesh: ParallelMesh, program: Program, world: World) -> ForeignModel:
    """The module of `--model-module`, traced and cut. Rank 0 asks whether it reads later tokens. Collective, all ranks.
    Raises ConfigError."""
    world.report_phase("start-up: the user's module")
    cp = mesh.context(gathers=config.parallel.context.cp_comm_type == "all_gather")
    dtype, first = parameter_dtype(config), world.is_first
    found = ForeignModel(config, mesh["tp"], program, world.device, dtype, cp, probe=first)
    leak = next(filter(None, all_gather_json(found.leak, mesh.world)), None)
    if leak is not None:
        raise ConfigError(
            f"`model_module`={found.name}: reads later tokens: another last token moves the logits before it ({leak}); "
            "each may depend on earlier tokens only (is_causal=True in attention)"
        )
    return found


def as_read(run: PlannedRun, gpu: UnseenGpu | None = None) -> PlannedRun:
    """The run with what its ranks hold and keep, as far as their stages, built without values, can say it."""
    if run.foreign is None and max(each.total for each in run.memory) >= LARGEST:
        return run
    try:
        large = any(each.activations >= WORTH_A_LOOK for each in run.memory)
        return with_kept(with_held(run), gpu) if large else with_held(run)
    except MegaliteError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is: a run does not depend on what is said of it
        why = str(error).partition("\n")[0][:120]
        logger.warning("memory is worked out: what was built without values fails (%s: %s)", type(error).__name__, why)
        return run


def announce(run: PlannedRun, world: World, axis: Axis, gpu: UnseenGpu | None = None) -> PlannedRun:
    """Prints the table and what is slow here; refuses what cannot fit. Returns the run, on rank 0 as read from its
    stages. gpu: one without values. Collective over `axis`, all ranks. Raises ConfigError."""
    if run.foreign is not None:
        _ = run.memory  # on all ranks: somebody's layers may fail in it
    if not run.on_cpu and (odd := list(float8_problems(run.config))):
        raise ConfigError(odd)
    check_float8(run.config, world.device)
    if world.is_first:
        run = as_read(run, gpu)
        table = format_table(rows_of(run, "CPU" if run.on_cpu else torch.cuda.get_device_name(world.device)))
        logger.info("%s", table.removeprefix(" "))  # each line that is logged begins with a space
        for line in device_advice(run.config, world.device):
            logger.warning(line)
    use_newer_kernel(world.device, parameter_dtype(run.config))
    check_memory(run, world, axis)
    return run


def make_tracer(config: Config, program: Program, executor: Executor, mesh: ParallelMesh) -> PipelineTracer | None:
    """What draws the timeline of the pipeline, if it is asked for."""
    if (path := config.logging.trace_pipeline) is None:
        return None
    known = not config.model.is_foreign and program.num_stages > 1
    division = division_text(stage_layer_ranges(config, program), program.placement) if known else ""
    return PipelineTracer(path, executor, mesh, config.train_iterations(mesh.size("world")), division)


def rows_of(run: PlannedRun, device: str) -> list[tuple[str, str]]:
    """The rows of the table. device: what the ranks run on, as text."""
    if run.foreign is None:
        return startup_rows(run, device)
    every = range(len(run.cuts))
    return foreign_rows(
        run,
        run.memory,
        device,
        parameters=run.foreign.count(every),
        by_stage=[run.foreign.count([stage]) for stage in every],
        flops_per_sample=run.foreign.flops_per_sample,
    )


def device_advice(config: Config, device: torch.device) -> list[str]:
    """What is legal but slow on this device, or does nothing there."""
    model, advice = config.model, []
    if device.type == "cpu" and model.cpu_offloading_num_layers:
        advice += ["`offload` activations: no effect on a CPU, whose memory is the host's"]
    if device.type == "cuda" and model.hidden_dropout > 0 and not config.training.compile:
        advice += [f"`hidden_dropout`={model.hidden_dropout}: some 80 kernels a place without `compile`, one with it"]
    if device.type == "cuda" and model.attention_dropout > 0:
        given = f"`attention_dropout`={model.attention_dropout}: "
        if config.training.precision.fp64 or model.kernel_dim < NARROWEST_HEAD:
            number = -(-model.seq_length // 64)
            given += f"attention of a layer is up to {number:,} tiles, dozens of launches each, for one kernel"
        else:
            given += "attention is computed twice, with and without the weights that are dropped"
        advice.append(given)
    return advice


def check_memory(run: PlannedRun, world: World, axis: Axis) -> None:
    """Raises ConfigError, on all ranks, where a run cannot fit; warns where it hardly does. Collective over `axis`, all
    ranks."""
    world.report_phase("start-up: memory")
    mine = [[vars(pool), on_device] for pool, on_device in pools_of(world.device, world.rank)]
    rows = all_gather_json(mine, axis)
    problem = None
    if axis.is_first:
        pools = [[(Pool(**values), bool(on_device)) for values, on_device in row] for row in rows]
        problem = judge(run, pools)
    problem = all_gather_json(problem, axis)[0]
    if problem:
        raise ConfigError(problem)


def pools_of(device: torch.device, rank: int) -> Pools:
    """What a rank on that device draws from."""
    on_cpu = device.type == "cpu"
    pools = [(pool, on_cpu) for pool in host_pools(rank if on_cpu else None)]
    if not on_cpu:  # asking makes a context on it
        free, total = torch.cuda.mem_get_info(device)
        name = f"{torch.cuda.get_device_name(device)} {device.index} of host {socket.gethostname()}"
        uuid = torch.cuda.get_device_properties(device).uuid
        pools.append((Pool(f"{machine_id()} GPU {uuid}", name, free, total), True))
    return pools


@dataclass(frozen=True)
class Demand:
    """Bytes that the ranks of one pool need together: as predicted, and surely."""

    predicted: float
    least: float


def judge(run: PlannedRun, ranks: Sequence[Pools]) -> str | None:
    """The refusal of a run whose rank r draws from `ranks[r]`, None where it may fit; logs the warning. Of a model that
    is not ours, what surely lasts are its states."""
    pools: dict[str, Pool] = {}
    for row in ranks:
        for pool, _ in row:
            known = pools.get(pool.key)
            pools[pool.key] = pool if known is None or pool.free > known.free else known
    demands = demands_of(run, ranks)
    ratio = {key: demand.least / max(1.0, pools[key].free + pools[key].swap) for key, demand in demands.items()}
    doubt = {key: demand.predicted / max(1.0, pools[key].free) for key, demand in demands.items()}
    tightest = max(demands, key=lambda key: (ratio[key], doubt[key]), default=None)
    if tightest is None or run.config.parallel.hardware.ignore_memory_estimate:
        return None
    if ratio[tightest] <= 1:
        tightest = max(doubt, key=lambda key: doubt[key])
        if doubt[tightest] > DOUBTFUL:
            logger.warning("%s; it may not fit", _need(demands[tightest], pools[tightest], ranks))
        return None
    remedies = [
        (flag, demand)
        for flag, demand in (_remedies(run, ranks, tightest) if run.foreign is None else ())
        if demand < 0.95 * demands[tightest].predicted
    ]
    enough = any(demand <= pools[tightest].free for _, demand in remedies)
    said = ", ".join(f"{flag} ({in_units(demand, 'B')})" for flag, demand in remedies)
    helps = (
        f"what helps{'' if enough else ', though none alone'}: {said}; or"
        if said
        else "use a smaller model, more hosts, or"
    )
    if run.config.training.skip_train:
        helps = "use more ranks of `tensor_model_parallel_size` or `pipeline_model_parallel_size` on more hosts, or"
    return f"{_need(demands[tightest], pools[tightest], ranks)}; {helps} continue by `ignore_memory_estimate`"


def demands_of(run: PlannedRun, ranks: Sequence[Pools]) -> dict[str, Demand]:
    """Pool -> what its ranks need."""
    config, world, on_cpu = run.config, run.world_size, run.on_cpu
    # What ranks of a host exchange messages through is one for all, and counted in each.
    again = shared_memory_bytes(config, on_cpu, of_others=True)
    drawn: dict[str, list[tuple[float, float, float]]] = {}
    for rank, row in enumerate(ranks):
        mine = run.memory[rank * run.program.num_ranks // world]
        for pool, on_device in row:
            amounts = _amounts(config, mine, again, on_cpu=on_cpu) if on_device else (mine.host, mine.host, 0.0)
            if on_device and on_cpu:
                amounts = amounts[0] + mine.host, amounts[1] + mine.host, amounts[2]
            drawn.setdefault(pool.key, []).append(amounts)
    return {
        key: Demand(
            sum(predicted for predicted, _, _ in rows),
            (1 - ESTIMATE_ERROR) * (sum(lasting for _, lasting, _ in rows) + max(passing for _, _, passing in rows)),
        )
        for key, rows in drawn.items()
    }


def _amounts(config: Config, memory: RankMemory, again: float, *, on_cpu: bool) -> tuple[float, float, float]:
    """(Predicted, what surely lasts while others compute, what comes and goes) of a rank, in bytes on its device."""
    if config.training.skip_train:
        return memory.weights, memory.weights, 0.0
    model = config.model  # these keep less than the estimate says, or by how much it errs is not known
    if model.is_foreign or model.cpu_offloading_num_layers:
        return memory.total - again, memory.model_states, 0.0
    # a processor with 16-bit products keeps half of what is assumed, and compiled blocks three quarters
    if config.training.compile or (on_cpu and config.training.precision.half):
        kept = memory.activations + memory.boundary + memory.logits
        return memory.total - again, memory.model_states + kept / (3 if config.training.compile else 2), 0.0
    passing = memory.workspace + memory.logits
    return memory.total - again, memory.total - again - passing, passing


def _need(demand: Demand, pool: Pool, ranks: Sequence[Pools]) -> str:
    """`memory: 2 ranks need 12 GB (predicted), 8 GB of ... are free`."""
    count = sum(any(pool.key == other.key for other, _ in row) for row in ranks)
    who = f"{count} ranks need" if count > 1 else "1 rank needs"
    swap = f" and {in_units(pool.swap, 'B')} of swap" if pool.swap else ""
    return (
        f"predicted memory: {who} {in_units(demand.predicted, 'B')}, "
        f"{pool.name} has {in_units(pool.free, 'B')}{swap} free of {in_units(pool.total, 'B')}"
    )


def _remedies(run: PlannedRun, ranks: Sequence[Pools], key: str) -> Iterator[tuple[str, float]]:
    """Legal changes of one flag, and what the ranks of that pool would need with it."""
    world = run.world_size
    for flag, changed in _changes(run.config, run.plan, world):
        long = changed.num_microbatches(world) > PRICED_MICROBATCHES and changed.parallel != run.config.parallel
        if long or config_problems(changed, world):
            continue
        try:
            tried = PlannedRun.of(changed, world, on_cpu=run.on_cpu)
        except ScheduleError:
            continue
        yield flag, demands_of(tried, ranks)[key].predicted


def _changes(config: Config, plan: MemoryPlan, world: int) -> Iterator[tuple[str, Config]]:
    """What one would try, the least intrusive first."""
    parallel, training, model = config.parallel, config.training, config.model

    def with_parallel(**changes: Any) -> Config:
        return replace(config, parallel=replace(parallel, **changes))

    if training.micro_batch_size > 1:
        smaller = replace(
            training, micro_batch_size=1, global_batch_size=training.batch_size(config.data_parallel_size(world))
        )
        yield "`micro_batch_size`=1", replace(config, training=smaller)
    if not plan.recompute[0].method:
        again = replace(model, recompute_granularity="full", recompute_method=None, recompute_num_layers=None)
        yield "`recompute_granularity`=full", replace(config, model=again)
    if config.data_parallel_size(world) > 1:
        stages = ((stage, with_parallel(zero_stage=stage)) for stage in range(3, parallel.zero_stage, -1))
        yield from [(f"`zero_stage`={stage}", made) for stage, made in stages if not config_problems(made, world)][:1]
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            size = 2 * getattr(parallel, name)
            yield f"`{name}`={size}", with_parallel(**{name: size})
    offload = config.optimizer.offload
    for is_there, flag, offloads in (
        (bool(plan.fraction), "`optimizer_cpu_offload`", replace(offload, optimizer_cpu_offload=True)),
        (plan.hosts_params, "`param_offload`=cpu", replace(offload, param_offload="cpu")),
        (offload.embedding_offload is not None, "`embedding_offload`=cpu", replace(offload, embedding_offload="cpu")),
    ):
        if not is_there:
            yield flag, replace(config, optimizer=replace(config.optimizer, offload=offloads))
    if training.precision.name in ("fp32", "fp64"):
        half = replace(training.precision, bf16=True, fp64=False)
        yield "`bf16`", replace(config, training=replace(training, precision=half))
