"""Rules of a module of the user's own (`--model-module`): what is ours alone is refused."""

from collections.abc import Iterator

from megalite.config.model import ModelConfig
from megalite.config.model_parts import KINDS, OF_MODULES
from megalite.config.root import Config
from megalite.config.rules.text import TP
from megalite.config.schema import options_of
from megalite.config.values import as_typed

OF_OUR_MODELS = (
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout", "fp8_format", "seq_length_schedule"),
    *("sample_interval", "eval_task_files", "decoupled_lr", "embedding_offload", "sequence_parallel"),
    *("tp_comm_overlap", "reset_position_ids"),
)
"""Flags of other sections that say something about our own models."""


def foreign_module(config: Config, world_size: int) -> Iterator[str]:
    """What goes with `--model-module`. No other rule's silence applies to it."""
    model, given = config.model, config.model.module
    if given.model_module is None:
        return
    flag, size = f"`model_module`={given.model_module}", config.parallel.tensor_model_parallel_size
    name, colon, factory = given.model_module.rpartition(":")
    if not name or not factory.isidentifier():
        yield f"{flag}: expected package.module:factory, or my_model.py:factory"
    values = dict(config.given)
    if files := config.logging.eval_tasks.eval_task_files:
        values["eval_task_files"] = files[0]
    ours = [each.name for each in options_of("model", ModelConfig) if each.name not in OF_MODULES]
    for name in (*ours, *OF_OUR_MODELS):
        if name in values:
            yield not_with_module(as_typed(f"`{name}`", values[name]))
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
