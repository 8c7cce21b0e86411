"""Rules of the layout: world, tensor and pipeline parallelism, schedule, global batch."""

from collections.abc import Iterator, Sequence

from megalite import schedule as schedules
from megalite.config.batch_size import BatchSizeSchedule
from megalite.config.parallel import ParallelConfig
from megalite.config.root import Config
from megalite.config.rules.context import context_warnings
from megalite.config.rules.idle import idle_settings
from megalite.config.rules.lora import lora_warnings
from megalite.config.rules.text import CP, PP, TP, VPP, divisors, listed, multiples_around
from megalite.config.stage_meshes import StageMesh, nearest_meshes
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.config.values import show
from megalite.errors import ScheduleError

#: Micro-batches of one replica in one iteration: each is an entry of the rank's list.
MOST_MICROBATCHES = 2**16


def world(config: Config, world_size: int) -> Iterator[str]:
    """Does the layout fit the number of ranks?"""
    parallel = config.parallel
    needed = parallel.model_parallel_size
    product = f"{TP} x {CP} x {PP}" if parallel.context.context_parallel_size > 1 else f"{TP} x {PP}"
    if parallel.meshes:
        pass  # `rules.stage_meshes` compares them
    elif world_size < needed:
        yield f"world size {world_size}: {product} = {needed}: use `nprocs` {needed}, or torchrun with as many"
    elif world_size % needed:
        yield (
            f"world size {world_size}: not divisible by {product} = {needed}; "
            f"use {multiples_around(world_size, needed)}"
        )
    if parallel.nprocs is not None and parallel.nprocs != world_size:
        yield f"`nprocs`={parallel.nprocs}: the launcher already started {world_size} processes; drop it"
    instances = parallel.num_distributed_optimizer_instances
    replicas = max(1, world_size // needed)
    if replicas % instances:
        yield (
            f"`num_distributed_optimizer_instances`={instances}: must divide the data-parallel size {replicas}; "
            f"legal: {listed(divisors(replicas))}"
        )
    if instances > 1 and parallel.zero_stage == 0:
        yield f"`num_distributed_optimizer_instances`={instances}: needs `zero_stage`=1 or more"
    if parallel.hardware.device == "cpu" and parallel.hardware.distributed_backend == "nccl":
        yield "`distributed_backend`=nccl: needs CUDA; use gloo"
    for rank in config.logging.profiling.profile_ranks:
        if config.logging.profiling.profile and rank >= world_size:
            yield f"`profile_ranks`={rank}: there are {world_size} ranks (0 to {world_size - 1})"


def tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Can so many ranks share each layer? Of stages that differ, each."""
    first = {mesh.tp: stage for stage, mesh in reversed([*enumerate(config.parallel.meshes)])}
    for tp, stage in first.items():
        for line in tensor_parallel(*config.of_stage(stage, world_size)):
            of_stage = line.replace(f"`tensor_model_parallel_size`={tp}", f"tp {tp} of stage {stage}")
            yield f"`stage_meshes`={config.parallel.stage_meshes}: {of_stage}"
    model, size = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.query_groups
    if config.parallel.tensor_grid.tensor_parallel_mode != "1d":
        return  # `rules.tensor_grid`
    if heads % size:
        yield f"{TP}={size}: does not divide `num_attention_heads`={heads}; legal: {listed(divisors(heads))}"
    elif heads % groups == 0 and not model.legal_tensor_size(size):
        legal = listed(d for d in divisors(heads) if model.legal_tensor_size(d))
        yield f"{TP}={size}: cannot share `num_query_groups`={groups} evenly; legal: {legal}"
    elif heads % groups == 0 and groups < size:
        apart = sorted({"q", "k", "v"} & set(model.adapted_parts if model.lora.lora_rank is not None else ()))
        excluded = ["`qk_layernorm_across_heads`"] * model.qk_layernorm_across_heads
        for each in [*excluded, *([f"adapters of {', '.join(apart)} alone"] if apart else [])]:
            keys = f"`num_query_groups`={groups}, so ranks share keys"
            yield f"{TP}={size}: {keys}: not with {each}; use {TP} {groups} at most"
    if model.ffn_size % size:
        yield (
            f"{TP}={size}: does not divide the MLP width {model.ffn_size} (`ffn_hidden_size`); "
            f"try {multiples_around(model.ffn_size, size)}"
        )
    if config.parallel.sequence_parallel and model.seq_length % size:
        yield (
            f"`sequence_parallel`: {TP}={size} does not divide `seq_length`={model.seq_length}; "
            f"try {multiples_around(model.seq_length, size)}"
        )


def overlap(config: Config, world_size: int) -> Iterator[str]:
    """Can two halves of a micro-batch take turns?"""
    size, flag = config.training.micro_batch_size, "`tp_comm_overlap`"
    if config.parallel.tensor_model_parallel_size == config.parallel.experts.expert_model_parallel_size == 1:
        yield f"{flag}: {TP}=1 sends no messages; drop it, or use {TP}=2 or more"
    if size % 2:
        yield f"{flag}: `micro_batch_size`={size} has no two halves of whole samples; use {size + 1}, or drop it"
    if config.training.float8.fp8_recipe == "delayed" and config.training.float8.fp8_format is not None:
        yield f"{flag}: not with `fp8_recipe`=delayed, whose scales follow whole micro-batches; use tensorwise"


def pipeline_stages(config: Config, world_size: int) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_layers
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_chunks
    layout = parallel.stage_layout.pipeline_model_parallel_layout
    if size > layers and layout is None:
        yield f"{PP}={size}: more stages than `num_layers`={layers}"
    elif size * chunks > layers and layout is None:
        yield (
            f"{VPP}={chunks}: {size} ranks x {chunks} chunks = {size * chunks} stages, more than `num_layers`={layers}"
        )
    given = parallel.virtual_pipeline_model_parallel_size
    if given is not None and given > 1 and size == 1:
        yield f"{VPP}={given}: needs {PP} >= 2"
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if size == 1 and (count := getattr(parallel.stage_layout, name)) is not None:
            yield f"`{name}`={count}: needs {PP} >= 2"


def stage_layers(config: Config, world_size: int) -> Iterator[str]:
    """Do the layers fit the stages that the user laid out? The partitioner itself says."""
    parallel = config.parallel
    first = parallel.stage_layout.decoder_first_pipeline_num_layers
    last = parallel.stage_layout.decoder_last_pipeline_num_layers
    layout = parallel.stage_layout.pipeline_model_parallel_layout
    given = (first is not None or last is not None, layout is not None)
    size, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    batches = batches_in_micro_batches(config, world_size)
    if sum(given) != 1 or size == 1 or parallel.pipeline_schedule_file is not None or not batches:
        return
    micro_batches = batches[-1][0]
    if parallel.schedule_problems(micro_batches):
        return
    program = schedules.build_program(parallel.schedule, size, micro_batches, chunks, **parallel.pipeline_shape)
    try:
        schedules.partition(config.model.num_layers, program.placement, first=first, last=last, layout=layout)
        depth, named = config.model.further.depth, schedules.expand_layout(layout or "").count("m")
        if named not in (0, depth):
            yield f"`pipeline_model_parallel_layout`={layout}: {named} times m; `mtp_num_layers` is {depth}"
    except ScheduleError as error:
        yield error.text


def pipeline_schedule(config: Config, world_size: int) -> Iterator[str]:
    """Can the schedule run in this shape, with these features?"""
    parallel, training = config.parallel, config.training
    name, size = parallel.schedule, parallel.pipeline_model_parallel_size
    if parallel.pipeline_schedule_file is not None:
        return
    for micro_batches, samples in batches_in_micro_batches(config, world_size):
        for reason in parallel.schedule_problems(micro_batches):
            legal = meshes_near(config, parallel.meshes, world_size) if reason.startswith("`stage_meshes`") else ""
            yield reason + _enough_samples(parallel, micro_batches, samples) + (legal and f"; nearest: {legal}")
    schedule = schedules.find_schedule(name)
    if parallel.pipedream_vertical_sync and not schedule.update_per_microbatch:
        yield f"`pipedream_vertical_sync`: {name} uses one version on all stages anyway; drop it, or use pipedream"
    delayed = config.optimizer.offload.delayed_parameter_update
    if parallel.pipeline_flush_steps and schedule.flush_schedule is None and not delayed:
        why = "steps after every micro-batch" if schedule.update_per_microbatch else "flushes after every iteration"
        yield f"`pipeline_flush_steps`={parallel.pipeline_flush_steps}: {name} {why}; drop it, or use 2bw"
    if schedule.update_per_microbatch and size > 1:
        why = f"{name} takes a step on each stage after each micro-batch"
        if (action := config.training.spikes.on_spike) is not None:
            yield f"`on_spike`={action}: {why}, so there is no global norm; drop it, or use 2bw"
        if config.optimizer.clip_grad > 0:
            yield f"`clip_grad`={show(config.optimizer.clip_grad)}: {why}, so there is no global norm; use 0 or 2bw"
        if training.precision.fp16:
            yield f"`fp16`: {why}, so stages cannot agree on a loss scale; use `bf16` or 2bw"
        if config.model.further.depth:
            yield f"`pipeline_schedule`={name}: {why}, so embeddings of `mtp_num_layers` would drift apart; use 2bw"
        elif not config.model.untie_embeddings_and_output_weights:
            yield (
                f"`pipeline_schedule`={name}: {why}, so tied embeddings would drift apart; "
                "use `untie_embeddings_and_output_weights` or 2bw"
            )
    if schedule.recomputes and size > 1:
        yield from recomputed_twice(config, f"`pipeline_schedule`={name}")
    excluded = schedule.zero_excluded.get(parallel.zero_stage)
    if excluded is not None:
        legal = listed(stage for stage in range(4) if stage not in schedule.zero_excluded)
        yield f"`zero_stage`={parallel.zero_stage}: not with `pipeline_schedule`={name}: {excluded}; legal: {legal}"


def recomputed_twice(config: Config, flag: str) -> Iterator[str]:
    """What is not said of a run whose schedule, given by `flag`, recomputes whole stages."""
    model, kind = config.model, config.model.recompute_granularity
    if kind in ("full", "auto"):
        yield f"`recompute_granularity`={kind}: {flag} recomputes whole stages itself; leave it out"
    if model.cpu_offloading_num_layers:
        yield (
            f"`cpu_offloading_num_layers`={model.cpu_offloading_num_layers}: {flag} recomputes whole stages and keeps "
            "the activations of one micro-batch; leave it out"
        )


def batches_in_micro_batches(config: Config, world_size: int) -> list[tuple[int, int]]:
    """(Micro-batches, samples) of every batch size that occurs, where they come out even."""
    unit = config.training.micro_batch_size * max(1, config.data_parallel_size(world_size))
    try:
        sizes = config.batch_size_schedule(world_size).sizes
    except ValueError:
        return []
    return [(size // unit, size) for size in dict.fromkeys(sizes) if size % unit == 0 and size >= unit]


def meshes_near(config: Config, meshes: Sequence[StageMesh], world_size: int) -> str:
    """The legal meshes of stages that are nearest to these; empty where there are none."""
    batches = [count for count, _ in batches_in_micro_batches(config, world_size)]
    tensor = [size for size in divisors(config.model.num_attention_heads) if config.model.legal_tensor_size(size)]
    return "; ".join(nearest_meshes(meshes, world_size, batches, tensor))


def _enough_samples(parallel: ParallelConfig, micro_batches: int, samples: int) -> str:
    """The nearest larger batch with which the schedule runs, where that is what is missing."""
    for more in range(micro_batches + 1, micro_batches + 4 * parallel.pipeline_model_parallel_size + 1):
        if not parallel.schedule_problems(more):
            return f" (legal: `global_batch_size`={samples // micro_batches * more})"
    return ""


def batch(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    replicas = max(1, config.data_parallel_size(world_size))
    unit = training.micro_batch_size * replicas
    rule = f"`micro_batch_size`={training.micro_batch_size} x data-parallel size {replicas} = {unit}"
    size = training.global_batch_size
    if size is not None and size < unit:
        yield f"`global_batch_size`={size}: smaller than {rule}; use {unit}, or a smaller `micro_batch_size`"
    elif size is not None and size % unit:
        yield f"`global_batch_size`={size}: not divisible by {rule}; nearest {multiples_around(size, unit)}"
    elif size is not None and size // unit > MOST_MICROBATCHES:
        yield (
            f"`global_batch_size`={size}: {size // unit:,} micro-batches in one iteration of a replica, at most "
            f"{MOST_MICROBATCHES:,}; use a larger `micro_batch_size`, or more replicas"
        )
    ramp = training.batch_ramp
    if ramp.rampup_batch_size is not None:
        yield from _ramp(ramp.rampup_batch_size, unit, rule, size if size is not None else unit)
    elif ramp.step_batch_size_schedule is not None:
        yield from _step_schedule(config, ramp.step_batch_size_schedule, unit, rule)


def _ramp(ramp: tuple[int, ...], unit: int, rule: str, full: int) -> Iterator[str]:
    flag = f"`rampup_batch_size`={show(ramp)}"
    if len(ramp) != 3:
        yield f"{flag}: expected three numbers, START INCREMENT SAMPLES"
        return
    start, increment, _ = ramp
    if start > full:
        yield f"{flag}: starts above `global_batch_size`={full}"
    elif (full - start) % increment:
        yield f"{flag}: increments of {increment} do not lead from {start} to `global_batch_size`={full}"
    for what, number in (("start", start), ("increment", increment)):
        if number % unit:
            yield f"{flag}: the {what} is not divisible by {rule}; nearest {multiples_around(number, unit)}"


def _step_schedule(config: Config, text: str, unit: int, rule: str) -> Iterator[str]:
    flag = f"`step_batch_size_schedule`='{text}'"
    try:
        sizes = BatchSizeSchedule.parse(text, config.model.seq_length).sizes
    except ValueError as error:
        yield f"{flag}: {error}; write it like '0:768 250B:1536'"
        return
    for size in sizes:
        if size % unit:
            yield f"{flag}: {size} is not divisible by {rule}; nearest {multiples_around(size, unit)}"
        elif size // unit > MOST_MICROBATCHES:
            yield f"{flag}: {size // unit:,} micro-batches in one iteration, at most {MOST_MICROBATCHES:,}"


def warnings(config: Config, world_size: int) -> list[str]:
    """What is legal but doubtful, for a configuration without problems."""
    parallel = config.parallel
    lines = []
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        lines.append(f"`sequence_parallel`: has no effect at {TP}=1; drop it")
    lines += context_warnings(config)
    if (groups := config.training.partial_backprop_groups) > 1:
        lines.append(
            f"`partial_backprop_groups`={groups}: changes the optimisation: a layer learns from the micro-batches that "
            f"reach it, the lowest from one in {groups}; compare losses before you trust it"
        )
    if config.model.module.tensor_parallel_globs and parallel.tensor_model_parallel_size == 1:
        lines.append(f"`tensor_parallel_globs`: has no effect at {TP}=1; drop it, or raise {TP}")
    lines += [*_doubtful_numbers(config), *lora_warnings(config.model)]
    if parallel.pipeline_schedule_file is None and parallel.pipeline_model_parallel_size > 1:
        size, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
        for count, _ in batches_in_micro_batches(config, world_size):
            lines += schedules.schedule_warnings(parallel.schedule, size, count, chunks, **parallel.pipeline_shape)
    source = config.data
    named = (source.data_path, source.train_data_path, source.valid_data_path, source.lists, source.mock_data)
    if not any(named):
        lines.append("`data_path`: not given; the text is the Python standard library's own sources")
    if (ids := source.stand_in_ids(config.model.vocab_size)) is not None:
        lines.append(f"`tokenizer_type`={source.tokenizer_type}: has no file; `mock_data` draws numbers below {ids:,}")
    if source.split != type(source)().split and not source.data_path and not source.lists:
        lines.append(f"`split`={source.split}: has no effect without `data_path`; drop it, or give `data_path`")
    return list(dict.fromkeys([*lines, *idle_settings(config, world_size)]))


def _doubtful_numbers(config: Config) -> Iterator[str]:
    """Precision, learning rate, weight decay; what nobody wants of a model that has learned nothing."""
    training, optimizer = config.training, config.optimizer
    if training.precision.fp16 and config.parallel.hardware.device == "cpu":
        yield "`fp16`: slow on a CPU; `bf16` needs no loss scaling"
    name, lr = optimizer.optimizer, optimizer.lr
    high = OPTIMIZER_SPECS[name].high_lr
    if high is not None and lr > high:
        yield f"`lr`={show(lr)}: unusually high for {name}; 1e-4 to 1e-3 is common"
    decay = max(optimizer.weight_decay, optimizer.weight_decay_ramp.end_weight_decay or 0.0)
    if lr * decay >= 1:
        yield f"`weight_decay`={show(decay)}: times `lr`={show(lr)} a step takes whole weights away; use 0.1"
    model, settings = config.model, config.checkpoint
    if settings.load is not None or settings.auto_resume:  # then the start says whether weights are random
        return
    if config.training.skip_train:
        yield "`skip_train`: without `load` a random model is evaluated; add `load`"
    if model.init_method_std == 0 and not model.is_foreign:
        yield "`init_method_std`=0: matrices that are all 0 pass no gradient on and stay 0; use 0.02"
