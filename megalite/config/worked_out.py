"""Names of Megatron-LM that are no field of their own: what they come to, once a level, or all of them, is read."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from megalite.config.megatron_flags import megatron_flags
from megalite.config.optimizer import readers_of
from megalite.config.parallel import StageLayout
from megalite.config.reader import GivenOption
from megalite.config.root import Config, all_options
from megalite.config.schema import flat
from megalite.config.stage_meshes import stage_sizes
from megalite.config.values import show
from megalite.config.yaml_file import COMMAND_LINE
from megalite.errors import ConfigError, ScheduleError
from megalite.schedule import expand_layout

#: Megatron-LM's words for what is sharded -> ZeRO stage.
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def work_out_level(here: dict[str, GivenOption], below: Mapping[str, GivenOption]) -> list[str]:
    """What the names of one level (a file, or the flags) come to. Returns what is wrong.

    here: by field, changed in place. below: what earlier levels gave.
    """
    _groups(here, below)
    return _sharding(here)


def work_out(merged: dict[str, GivenOption], broken: Collection[str]) -> list[str]:
    """The same for names that need other fields than those of their level. Returns what is wrong."""
    sizes = [*_meshes(merged, broken), *_chunks(merged, broken), *_layout_chunks(merged, broken)]
    return [*sizes, *_positions(merged), *_yarn(merged)]


def _meshes(merged: dict[str, GivenOption], broken: Collection[str]) -> list[str]:
    """`--stage-meshes` says the sizes of all stages; where they are alike, it is another spelling of these."""
    given = merged.get("stage_meshes")
    if given is None or not given.value or "stage_meshes" in broken:
        return []
    try:
        sizes = stage_sizes(given.value)
    except ConfigError as error:
        return [str(error)]
    for name, size in sizes.items():
        other = merged.get(name)
        if other is not None and other.value not in (size, None) and name not in broken:
            return [f"`{name}`={other.value}: contradicts `stage_meshes`={given.value}, which says {size}; drop it"]
        merged[name] = replace(given, name=name, value=size)
    tensor = merged.get(name := "tensor_model_parallel_size")
    if name in sizes or tensor is None or tensor.value == 1:
        return []
    return [f"`{name}`={tensor.value}: `stage_meshes`={given.value} says it of each stage; drop it"]


def _groups(here: dict[str, GivenOption], below: Mapping[str, GivenOption]) -> None:
    """`--group-query-attention` alone is Megatron's way to say one group; its `--no-` form undoes groups of a file."""
    switch = here.pop("group_query_attention", None)
    if switch is None or "num_query_groups" in here:
        return
    if not switch.value or "num_query_groups" not in below:
        here["num_query_groups"] = replace(switch, name="num_query_groups", value=1 if switch.value else None)


def _sharding(here: dict[str, GivenOption]) -> list[str]:
    """Either FSDP of Megatron's is a ZeRO stage: which, its sharding strategy says. The distributed optimizer, which
    goes with both there, says less."""
    strategy = here.pop("data_parallel_sharding_strategy", None)
    given = [here.pop(name) for name in ("use_megatron_fsdp", "use_torch_fsdp2") if name in here]
    fsdp = next((each for each in given if each.value), None)
    if strategy is not None and strategy.value not in SHARDING:
        return [f"`data_parallel_sharding_strategy`={strategy.value}: choose from {', '.join(SHARDING)}"]
    if strategy is not None and fsdp is None:
        return ["`data_parallel_sharding_strategy`: goes with `use_megatron_fsdp` there; `zero_stage` says it alone"]
    if fsdp is None:
        return []
    stage = 3 if strategy is None else SHARDING[strategy.value]
    other = here.get("zero_stage")
    if other is not None and other.typed == "zero_stage" and other.value != stage:
        return [f"`zero_stage`={other.value}: contradicts `{fsdp.typed}`, which is stage {stage}; give one of them"]
    here["zero_stage"] = replace(fsdp, name="zero_stage", value=stage)
    return []


def _chunks(merged: dict[str, GivenOption], broken: Collection[str]) -> list[str]:
    given = merged.pop("num_layers_per_virtual_pipeline_stage", None)
    if given is None or "num_layers" not in merged or {"num_layers", "pipeline_model_parallel_size"} & {*broken}:
        return []
    layers = merged["num_layers"].value
    pipeline = merged["pipeline_model_parallel_size"].value if "pipeline_model_parallel_size" in merged else 1
    per_chunk = given.value
    if per_chunk < 1 or pipeline < 1 or layers % (per_chunk * pipeline):
        return [
            f"`num_layers_per_virtual_pipeline_stage`={per_chunk}: `num_layers`={layers} is not a multiple of it times "
            f"`pipeline_model_parallel_size`={pipeline}; use `virtual_pipeline_model_parallel_size`, which balances"
        ]
    stages = layers // per_chunk
    name = "virtual_pipeline_model_parallel_size"
    merged[name] = replace(given, name=name, value=stages // pipeline)
    if stages > pipeline > 1 and not any(
        name in merged and merged[name].value is not None for name in flat(StageLayout())
    ):
        # As many for each, whatever a head costs.
        layout = f"Et*{per_chunk}|(t*{per_chunk}|)*{stages - 2}t*{per_chunk}L"
        merged["pipeline_model_parallel_layout"] = replace(given, name="pipeline_model_parallel_layout", value=layout)
    return []


def _layout_chunks(merged: dict[str, GivenOption], broken: Collection[str]) -> list[str]:
    """`--pipeline-model-parallel-layout` says how many stages there are, and so how many chunks a rank has."""
    given, pipeline = merged.get("pipeline_model_parallel_layout"), merged.get("pipeline_model_parallel_size")
    name = "virtual_pipeline_model_parallel_size"
    known = merged.get(name)
    if given is None or not given.value or pipeline is None or (known is not None and known.value is not None):
        return []
    try:
        stages = expand_layout(given.value).count("|") + 1
    except ScheduleError as error:
        return [error.text]
    if pipeline.name not in broken and stages > pipeline.value > 1 and stages % pipeline.value == 0:
        merged[name] = replace(given, name=name, value=stages // pipeline.value)
    return []


def _positions(merged: dict[str, GivenOption]) -> list[str]:
    """Megatron-LM takes `--no-position-embedding` with rotary positions alone, of which it says nothing new."""
    given = merged.pop("no_position_embedding", None)
    if given is None or not given.value:
        return []
    family, kind = merged.get("model_type"), merged.get("position_embedding_type")
    rotary = kind is None and family is not None and family.value == "llama"
    if not rotary and (kind is None or kind.value == "learned_absolute"):
        return ["`no_position_embedding`: say which instead: `position_embedding_type` rope, or none"]
    return []


#: What Megatron-LM's latent attention has where no flag says otherwise.
YARN: Mapping[str, Any] = {"use_rope_scaling": True, "rope_scaling_type": "yarn", "rope_scaling_original_length": 4096}
MSCALES: Mapping[str, float] = {"mscale": 1.0, "mscale_all_dim": 0.0}


def _yarn(merged: dict[str, GivenOption]) -> list[str]:
    """Megatron-LM's latent attention is scaled by YaRN unless `--rope-type rope` is given; its factor is 1 by default,
    which changes nothing. Other attention reads neither flag."""
    factor, kind = merged.pop("rotary_scaling_factor", None), merged.pop("rope_type", None)
    latent = merged.get("multi_latent_attention")
    if kind is not None and kind.value not in ("rope", "yarn"):
        return [f"`rope_type`={kind.value}: choose rope or yarn"]
    if latent is None or not latent.value:
        unread = [each for each in (factor, kind) if each is not None and each.value != "rope"]
        why = "Megatron-LM reads it for latent attention; drop it"
        return [f"`{each.name}`={show(each.value)}: {why}" for each in unread]
    given = [name for name in MSCALES if name in merged]
    if all(merged[name].value == MSCALES[name] for name in given):  # the temperature that there is without them
        for name in given:
            del merged[name]
    elif given == ["mscale_all_dim"]:
        merged["mscale"] = replace(merged["mscale_all_dim"], name="mscale", value=MSCALES["mscale"])
    if factor is None or factor.value == 1:
        return []
    flag = f"`rotary_scaling_factor`={show(factor.value)}"
    if kind is not None and kind.value == "rope":
        return [f"{flag}: contradicts `rope_type`=rope; give one of them"]
    values = {**YARN, "rope_scaling_factor": factor.value}
    for name in ("use_rope_scaling", "rope_scaling_type", "rope_scaling_factor"):
        if name in merged and merged[name].value != values[name]:
            return [f"{flag}: contradicts `{name}`={show(merged[name].value)}; give one of them"]
    merged |= {name: replace(factor, name=name, value=value) for name, value in values.items() if name not in merged}
    return []


def dropped_otherwise(merged: Mapping[str, GivenOption], ignored: Mapping[str, GivenOption]) -> list[str]:
    """Megatron-LM drops the least probable tokens by default; which ones says nothing where none is dropped.

    ignored: flags without effect, by what a message about them begins with.
    """
    name, capacity = "moe_token_drop_policy", merged.get("moe_expert_capacity_factor")
    given = {each.where == COMMAND_LINE: (label, each.value) for label, each in ignored.items() if each.name == name}
    label, value = given.get(True) or given.get(False) or ("", "")
    if capacity is None or capacity.value is None or value != "probs":
        return []
    return [f"{label}={value}: {megatron_flags()[name].otherwise}"]


def other_defaults(config: Config, origins: Mapping[str, str], typed: Iterable[str]) -> list[str]:
    """The line about values that were left to defaults which are others in Megatron-LM, where the flags are its own.

    typed: flags as they were given; those that have no effect here tell its scripts from ours.
    """
    theirs, model = megatron_flags(), config.model
    names = [name.rpartition(" ")[2].strip("-").replace("-", "_") for name in typed]
    if not any(name in theirs and theirs[name].verdict == "ignored" for name in names):
        return []
    left = [f"`{name}` 0 (there 0.1)" for name in ("hidden_dropout", "attention_dropout") if origins[name] == "default"]
    if origins["activation"] == "default" and model.add_bias_linear and "no_bias_gelu_fusion" not in names:
        left.append("`activation` gelu, exact (there fused with the bias: gelu-tanh)")
    left += _float8_left(config, origins)
    factor = all_options()["muon_extra_scale_factor"]
    if origins[factor.name] == "default" and config.optimizer.optimizer in (readers_of(factor) or ()):
        left.append(f"{factor.marked} {show(factor.default)} (there 1)")
    return [f"not given, and otherwise in Megatron-LM: {', '.join(left)}"] if left and not model.is_foreign else []


def _float8_left(config: Config, origins: Mapping[str, str]) -> list[str]:
    """What of float8 was left to other defaults."""
    given = config.training.float8
    if given.fp8_format is None:
        return []
    if origins["fp8_recipe"] == "default":
        unread = ", which reads no `fp8_amax_history_len`" if origins["fp8_amax_history_len"] != "default" else ""
        return [f"`fp8_recipe` {given.fp8_recipe}{unread} (there delayed)"]
    if given.fp8_recipe == "delayed" and origins["fp8_amax_history_len"] == "default":
        return [f"`fp8_amax_history_len` {given.fp8_amax_history_len} (there 1)"]
    return []


def without_a_checkpoint(config: Config, merged: Mapping[str, GivenOption]) -> list[str]:
    """The line about `--exit-on-missing-checkpoint` where no checkpoint is asked for."""
    given, settings = merged.get("exit_on_missing_checkpoint"), config.checkpoint
    if given is None or not given.value or settings.load is not None or settings.auto_resume:
        return []
    return ["`exit_on_missing_checkpoint`: has no effect without `load`; add that, or drop this"]
