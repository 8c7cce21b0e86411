"""Rules of a module of the user's own (`--model-module`): what is ours alone is refused."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.foreign import KINDS, OF_MODULES
from megalite.config.model import ModelConfig
from megalite.config.root import Config
from megalite.config.rules.text import TP
from megalite.config.schema import flat, options_of
from megalite.config.values import as_typed


def foreign_module(config: Config, world_size: int) -> Iterator[str]:
    """What goes with `--model-module`. No other rule's silence applies to it."""
    model, given = config.model, config.model.module
    if given.model_module is None:
        return
    flag, size = f"`model_module`={given.model_module}", config.parallel.tensor_model_parallel_size
    name, colon, factory = given.model_module.rpartition(":")
    if not name or not factory.isidentifier():
        yield f"{flag}: expected package.module:factory, or my_model.py:factory"
    values = flat(model)
    for option in options_of("model", ModelConfig):
        value = values[option.name]
        if option.name not in OF_MODULES and not option.required and value != option.default:
            yield not_with_module(as_typed(option.marked, value))
    yield from (not_with_module(typed) for typed in _of_our_models(config))
    if model.recompute_granularity not in (None, "full"):
        kind = f"`recompute_granularity`={model.recompute_granularity}"
        yield f"{kind}: of a `model_module` whole layers are recomputed; use `recompute_granularity`=full"
    budget = config.parallel.hardware.device_memory_budget_gb
    if budget is not None:
        yield (
            f"`device_memory_budget_gb`={budget:g}: decides for megalite's own models; of a `model_module` say by "
            "`optimizer_cpu_offload`, `optimizer_offload_fraction` or `optimizer_offload_path` what leaves the device"
        )
    try:
        table = given.table
    except ValueError as error:
        yield f"`tensor_parallel_globs`={error}: expected {', '.join(f'{kind}:GLOB' for kind in KINDS)}"
        return
    if size > 1 and not table:
        yield f"{TP}={size}: `model_module` says by `tensor_parallel_globs` which layers its ranks share; give it"


def not_with_module(typed: str) -> str:
    """The line about a flag that speaks of our own models."""
    return f"{typed}: speaks of megalite's own models, not of a `model_module`; drop it"


def _of_our_models(config: Config) -> Iterator[str]:
    """Flags of other sections that are set, as typed."""
    parallel, training, data, samples = config.parallel, config.training, config.data, config.logging.samples
    if parallel.experts.expert_model_parallel_size > 1:
        yield f"`expert_model_parallel_size`={parallel.experts.expert_model_parallel_size}"
    if parallel.experts.expert_tensor_parallel_size is not None:
        yield f"`expert_tensor_parallel_size`={parallel.experts.expert_tensor_parallel_size}"
    for name, value in flat(parallel.stage_layout).items():
        if value is not None:
            yield as_typed(f"`{name}`", value)
    if training.float8.fp8_format is not None:
        yield f"`fp8_format`={training.float8.fp8_format}"
    if training.seq_length_schedule is not None:
        yield f"`seq_length_schedule`={training.seq_length_schedule}"
    if samples.sample_interval is not None:
        yield f"`sample_interval`={samples.sample_interval}"
    if config.logging.eval_tasks.eval_task_files:
        yield f"`eval_task_files`={config.logging.eval_tasks.eval_task_files[0]}"
    if config.optimizer.decoupled_lr is not None:
        yield as_typed("`decoupled_lr`", config.optimizer.decoupled_lr)
    if config.optimizer.offload.embedding_offload is not None:
        yield f"`embedding_offload`={config.optimizer.offload.embedding_offload}"
    switches = {
        "`sequence_parallel`": parallel.sequence_parallel,
        "`tp_comm_overlap`": parallel.tp_comm_overlap,
        "`reset_position_ids`": data.reset_position_ids,
    }
    yield from (flag for flag, on in switches.items() if on)
