"""Rules of features that go with little else: settings beside which they are refused, and why."""

from collections.abc import Callable, Iterator, Mapping
from math import gcd

from megalite.config.root import Config
from megalite.config.schema import flat
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.config.values import as_typed
from megalite.schedule import find_schedule


def _grows(config: Config) -> bool:
    """Whether batches grow; a malformed ramp has a line of its own."""
    try:
        return len(config.batch_size_schedule(1).steps) > 1
    except ValueError:
        return False


ON: Mapping[str, Callable[[Config], object]] = {
    "recompute_granularity": lambda config: config.model.recompute_granularity == "full",
    "param_offload": lambda config: config.optimizer.offload.param_offload == "cpu",
    "on_spike": lambda config: config.training.spikes.on_spike == "rollback",
    "rampup_batch_size": _grows,
    "optimizer": lambda config: OPTIMIZER_SPECS[config.optimizer.optimizer].taps,
}
"""Settings that are on by one of their values, or by others'; all else is where it has not its default."""


def is_on(config: Config, name: str) -> object:
    return ON[name](config) if name in ON else name in config.given


def excluded(config: Config, flag: str, reasons: Mapping[str, str], fix: str = "drop one") -> Iterator[str]:
    """A line for each setting that is on and does not go with `flag`. reasons: name, or several -> why."""
    for names, why in reasons.items():
        for name in names.split():
            if is_on(config, name):
                yield f"{flag}: not with `{name}`, {why}; {fix}"


PAIRS: tuple[tuple[str, str, str], ...] = (
    ("attention_output_gate", "lora_rank", "not with {}; train it whole"),
    ("attention_output_gate", "multi_latent_attention", "not with {}; drop one of them"),
    ("cpu_offloading_num_layers", "compile", "not with {}, which decides itself what is kept"),
    ("decoupled_lr", "lora_rank", "not with {}, beside which embedding and output layer do not train"),
    ("ema_decay", "embedding_offload", "not with {}, which steps only the rows that a batch uses; drop one"),
    ("ema_decay", "optimizer_impl", "not with {}=apex, whose step is closed; drop one"),
    ("embedding_offload", "optimizer_impl", "not with {}=apex, which steps on GPUs alone; use torch"),
    ("experimental_attention_variant", "lora_rank", "not with {}, its matrices have no adapters"),
    ("fp8_format", "fp16", "not with {}, whose loss scale has no use for it; use `bf16`"),
    ("fp8_format", "lora_rank", "not with {}; use `bf16`"),
    ("global_batch_size", "step_batch_size_schedule", "excludes {}; give one of them"),
    ("lora_rank", "use_mup", "not with {}, which has no rule for it; drop one of them"),
    ("mtp_num_layers", "lora_rank", "not with {}, beside which nothing else is trained; drop one of them"),
    ("mtp_num_layers", "tp_comm_overlap", "not with {}; drop one of them"),
    ("norm_placement", "use_parallel_residual", "not with {}; drop one of them"),
    ("optimizer_impl", "use_mup", "not with {}, where epsilon is a parameter's own; use torch"),
    ("param_offload", "compile", "not with {}, whose code reads weights where they were; drop one"),
    ("param_offload", "delayed_parameter_update", "not with {}, which keeps two versions of the weights; drop one"),
    ("param_offload", "embedding_offload", "not with {}, whose rows are on the host already; drop one"),
    ("param_offload", "model_module", "not with {}, whose layers have no plan; use `zero_stage`=3"),
    ("pipeline_schedule", "pipeline_schedule_file", "excludes {}; give one of them"),
    ("softmax_scale", "use_mup", "not with {}, whose scores are / d; use `mup_base_head_dim`"),
    ("store_param_remainders", "optimizer_cpu_offload", "excludes {}; give one of them"),
    ("store_param_remainders", "optimizer_offload_path", "excludes {}; give one of them"),
    ("store_param_remainders", "param_offload", "excludes {}=cpu; give one of them"),
)
"""What is refused, beside what, and the words about it."""


def pairs(config: Config, world_size: int) -> Iterator[str]:
    for refused, beside, words in PAIRS:
        if is_on(config, refused) and is_on(config, beside):
            yield f"{as_typed(f'`{refused}`', config.given[refused])}: {words.format(f'`{beside}`')}"


def cuda_graphs(config: Config, world_size: int) -> Iterator[str]:
    """What the blocks of a run must not have for their kernels to be the same each time."""
    parallel = config.parallel
    flag, schedule = "`cuda_graph_impl`=local", find_schedule(parallel.schedule)
    if parallel.hardware.device == "cpu":
        yield f"{flag}: a CPU has none; leave it out"
    if parallel.zero_stage == 3:
        yield f"{flag}: not with `zero_stage`=3, whose weights are elsewhere each time; use 0, 1 or 2"
    reasons = {
        "model_module": "whose layers are its own",
        "num_experts": "which get another number of tokens each time",
        "multi_latent_attention experimental_attention_variant": "which was never captured",
        "tensor_model_parallel_size stage_meshes context_parallel_size": "whose messages are inside of blocks",
        "pipeline_schedule_file": "which may run blocks twice",
        "window_size": "whose mask is made anew each time",
        "reset_attention_mask": "whose documents have other lengths each time",
        "seq_length_schedule": "whose samples have other lengths",
        "attn_logit_softcapping softmax_type attention_dropout": "whose kernel is compiled",
        "recompute_granularity": "which runs blocks twice",
        "lora_rank": "whose matrices were never captured",
        "fp8_format": "whose scales the host keeps",
        "qk_clip": "which looks at the scores of each micro-batch",
        "partial_backprop_groups": "whose backward has other depths",
        "optimizer": "which looks at the operands of products",
        "cpu_offloading_num_layers": "whose activations move",
        "device_memory_budget_gb": "whose activations may move",
        "optimizer_cpu_offload optimizer_offload_path embedding_offload": "which was never captured",
        "param_offload": "whose weights move",
    }
    yield from excluded(config, flag, reasons)
    if schedule.asynchronous:
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which keeps several versions of weights; use 1f1b"


def partial_backprop(config: Config, world_size: int) -> Iterator[str]:
    """What needs the backward of every layer from every micro-batch."""
    groups, parallel, layers = config.training.partial_backprop_groups, config.parallel, config.model.num_layers
    flag = f"`partial_backprop_groups`={groups}"
    if groups > layers:
        yield f"{flag}: more than the {layers} layers; use {layers} at most"
    schedule = find_schedule(parallel.schedule)
    if parallel.zero_stage > 1 and schedule.splits_backward:
        yield (
            f"{flag}: not with `zero_stage`={parallel.zero_stage} and `pipeline_schedule`={parallel.schedule}, whose "
            "ranks would sum unlike micro-batches; use 1f1b"
        )
    reasons = {
        "model_module": "whose layers are its own",
        "stage_meshes": "whose stages have other replicas",
        "num_experts": "whose routers add a loss in every layer",
        "mtp_num_layers": "whose blocks are not those of the model",
        "lora_rank": "whose adapters are few",
        "recompute_granularity": "which runs layers where no depth is known",
        "tp_comm_overlap": "which runs the parts of layers in turns",
        "fp8_format": "whose scales look at every gradient",
        "calculate_per_token_loss": "whose means are over tokens",
        "rampup_batch_size": "whose steps have other depths",
        "cpu_offloading_num_layers device_memory_budget_gb param_offload": "which waits for every backward",
        "embedding_offload": "whose rows wait for every backward",
        "optimizer": "whose factors are of all tokens",
    }
    yield from excluded(config, flag, reasons)
    if schedule.asynchronous:
        yield f"{flag}: not with `pipeline_schedule`={parallel.schedule}, whose gradients are late; use 1f1b"


def tapped_products(config: Config, world_size: int) -> Iterator[str]:
    """What an optimizer that looks at the operands of weight gradients does not go with."""
    optimizer, parallel = config.optimizer, config.parallel
    flag, schedule = f"`optimizer`={optimizer.optimizer}", find_schedule(parallel.schedule)
    reasons = {
        "model_module": "whose layers hand over nothing",
        "num_experts": "whose layers see other tokens each",
        "multi_latent_attention": "whose projections hand over nothing",
        "experimental_attention_variant": "whose layers have other matrices",
        "mtp_num_layers": "whose blocks are not those of the model",
        "lora_rank": "whose matrices are frozen",
        "fp8_format": "whose products are of other numbers",
        "fp16": "whose scaled gradients overflow when they are squared",
        "calculate_per_token_loss": "which scales gradients after the backward",
        "compile": "whose code hands over nothing",
        "optimizer_cpu_offload optimizer_offload_path": "whose steps do not wait for all of a rank",
        "param_offload": "whose gradients are on the host",
        "delayed_parameter_update": "whose step overlaps the next batch",
        "embedding_offload": "whose rows have an optimizer of their own",
    }
    yield from excluded(config, flag, reasons, "drop one, or use `optimizer`=shampoo")
    if schedule.asynchronous or schedule.paired:
        why = "keeps factors of several updates" if schedule.asynchronous else "has copies of a stage on several ranks"
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which {why}; use 1f1b"
    if optimizer.args.kfac_factors == "own" and parallel.zero_stage == 0:
        yield "`kfac_factors`=own: with `zero_stage`=0 every rank owns all matrices; use `zero_stage`=1 or more, or all"


def message_driven(config: Config, world_size: int) -> Iterator[str]:
    """What asks for the order of a rank's actions before the run, or for another library than gloo."""
    parallel, hardware = config.parallel, config.parallel.hardware
    if not find_schedule(parallel.schedule).takes_arrivals or parallel.pipeline_model_parallel_size == 1:
        return
    flag = f"`pipeline_schedule`={parallel.schedule}"
    reasons = {
        "device_memory_budget_gb param_offload": "which plans what moves when",
        "embedding_offload": "whose rows are fetched ahead",
        "expert_model_parallel_size": "whose ranks are in several pipelines",
    }
    yield from excluded(config, flag, reasons, "use 1f1b")
    nccl = hardware.distributed_backend == "nccl" or (hardware.device == "cuda" and not hardware.distributed_backend)
    if nccl:
        yield f"{flag}: is told by gloo what has arrived, not by NCCL; use `distributed_backend`=gloo, or eager-1f1b"


def zero_plus_plus(config: Config, world_size: int) -> Iterator[str]:
    """There are weights to gather, over ranks that come in whole partitions."""
    parallel, given = config.parallel, config.parallel.zero_plus_plus
    flags = [as_typed(f"`{name}`", value) for name, value in flat(given).items() if name in config.given]
    if not flags:
        return
    size, flag = given.zero_hpz_partition_size, flags[0]
    if parallel.zero_stage != 3:
        yield f"{flag}: needs `zero_stage`=3, whose weights are gathered; it is {parallel.zero_stage}"
        return
    if config.optimizer.offload.param_offload == "cpu":
        yield f"{flag}: not with `param_offload`=cpu, whose weights come from the host; drop one"
    if config.gathers_float8 and given.changes_gathers:
        yield f"{flag}: not with `fp8_param_gather`, whose weights travel in 8 bits already; drop one"
    if not parallel.meshes and world_size % parallel.model_parallel_size:
        return
    alike = config.gradient_ranks(world_size) // parallel.num_distributed_optimizer_instances
    several = [shards for shards in parallel.workers or (alike,) if shards > 1]
    if not several:
        yield f"{flag}: one rank holds all weights of a stage, so nothing travels; leave it out, or add ranks"
    elif odd := [shards for shards in several if shards % size]:
        common = gcd(*several)
        yield (
            f"`zero_hpz_partition_size`={size}: does not divide the {odd[0]} ranks over which weights are sharded; use "
            f"{next(n for n in range(min(size, common), 0, -1) if common % n == 0)}"
        )
    elif size > 1 and config.model.experts.num_experts is not None:
        yield f"`zero_hpz_partition_size`={size}: not with `num_experts`, which are sharded over other ranks; drop one"


def param_offload(config: Config, world_size: int) -> Iterator[str]:
    """Weights and gradients that come and go: schedules that keep two of them, or a stage's."""
    flag, schedule = "`param_offload`=cpu", find_schedule(config.parallel.schedule)
    if config.parallel.pipeline_schedule_file is not None:
        return
    if schedule.asynchronous:
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which keeps two versions of the weights; use 1f1b"
    if config.parallel.zero_stage == 3 and schedule.gathers_once:
        yield (
            f"{flag}: not with `zero_stage`=3 and `pipeline_schedule`={schedule.name}, which keeps a stage's weights "
            "on the device; use `zero_stage`=2, or `pipeline_schedule`=1f1b"
        )


def embedding_offload(config: Config, world_size: int) -> Iterator[str]:
    """What it goes with, and how small its cache may be."""
    optimizer, model, given = config.optimizer, config.model, config.optimizer.offload
    schedule, flag = find_schedule(config.parallel.schedule), f"`embedding_offload`={given.embedding_offload}"
    if model.further.depth:
        yield f"{flag}: not with `mtp_num_layers`, which reads other rows, too; drop one of them"
    elif not model.untie_embeddings_and_output_weights:
        yield f"{flag}: a tied output layer reads every row; needs `untie_embeddings_and_output_weights`"
    if model.lora.lora_rank is not None:
        yield f"{flag}: not with `lora_rank`={model.lora.lora_rank}, beside which no embedding is trained; drop it"
    if OPTIMIZER_SPECS[optimizer.optimizer].statistics:
        yield f"{flag}: not with `optimizer`={optimizer.optimizer}, whose step of a row depends on all; use adam"
    if given.delayed_parameter_update:
        yield f"{flag}: not with `delayed_parameter_update`, which reads older weights; drop one"
    elif schedule.asynchronous and config.parallel.pipeline_schedule_file is None:
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which keeps older weights; use 1f1b"
    problem = cache_problem(config)
    if problem is not None:
        yield problem


def cache_problem(config: Config) -> str | None:
    """Why the cache that is asked for is too small; None where it is not, or the vocabulary is not known yet."""
    rows, needed = config.optimizer.offload.embedding_cache_rows, config.rows_at_once
    if not config.model.vocab_size or rows is None or rows >= needed:
        return None
    return (
        f"`embedding_cache_rows`={rows}: a micro-batch may use {needed:,} rows at once; use {needed} or more, or a "
        "smaller `micro_batch_size`"
    )
