"""Names of Megatron-LM that are no field of their own: what they come to, once a level, or all of them, is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megalite.config.reader import GivenOption
from megalite.config.stage_meshes import parse_meshes, unlike

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
    return _meshes(merged, broken) + _chunks(merged, broken) + _positions(merged)


def _meshes(merged: dict[str, GivenOption], broken: Collection[str]) -> list[str]:
    """`--stage-meshes` says the sizes of all stages; where they are alike, it is another spelling of these."""
    given = merged.get("stage_meshes")
    if given is None or not given.value or "stage_meshes" in broken:
        return []
    try:
        meshes = parse_meshes(given.value)
    except ValueError as error:
        return [f"`stage_meshes`={given.value}: {error}"]
    sizes = {"pipeline_model_parallel_size": len(meshes)}
    sizes |= {} if unlike(meshes) else {"tensor_model_parallel_size": meshes[0].tp}
    for name, size in sizes.items():
        other = merged.get(name)
        if other is not None and other.value not in (size, None) and name not in broken:
            return [f"`{name}`={other.value}: contradicts `stage_meshes`={given.value}, which says {size}; drop it"]
        merged[name] = replace(given, name=name, value=size)
    tensor = merged.get("tensor_model_parallel_size")
    if unlike(meshes) and tensor is not None and tensor.value != 1:
        return [
            f"`tensor_model_parallel_size`={tensor.value}: `stage_meshes`={given.value} says it of each stage; drop it"
        ]
    return []


def _groups(here: dict[str, GivenOption], below: Mapping[str, GivenOption]) -> None:
    """`--group-query-attention` alone is Megatron's way to say one group; its `--no-` form undoes groups of a file."""
    switch = here.pop("group_query_attention", None)
    if switch is None or "num_query_groups" in here:
        return
    if not switch.value:
        here["num_query_groups"] = replace(switch, name="num_query_groups", value=None)
    elif "num_query_groups" not in below:
        here["num_query_groups"] = replace(switch, name="num_query_groups", value=1)


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
    name = "virtual_pipeline_model_parallel_size"
    merged[name] = replace(given, name=name, value=layers // (per_chunk * pipeline))
    return []


def _positions(merged: dict[str, GivenOption]) -> list[str]:
    """Megatron-LM takes `--no-position-embedding` with rotary positions alone, of which it says nothing new."""
    given = merged.pop("no_position_embedding", None)
    if given is None or not given.value:
        return []
    family, kind = merged.get("model_type"), merged.get("position_embedding_type")
    if kind is None and family is not None and family.value == "llama":
        return []
    if kind is None or kind.value == "learned_absolute":
        return ["`no_position_embedding`: say which instead: `position_embedding_type` rope, or none"]
    return []
