"""Rules of fine-tuning with adapters."""

from collections.abc import Iterator

from megalite.config.lora import TARGETS, TOGETHER
from megalite.config.model import ModelConfig
from megalite.config.root import Config
from megalite.config.rules.beside import excluded


def lora(config: Config, world_size: int) -> Iterator[str]:
    """Which layers may have adapters, and that there is a model beside them."""
    model, given = config.model, config.model.lora
    flag = f"`lora_targets`={' '.join(given.lora_targets)}"
    unknown = [name for name in given.lora_targets if name not in TARGETS]
    if unknown or not given.lora_targets:
        yield f"{flag}: {', '.join(unknown) or 'none'} is no layer; legal: {', '.join(TARGETS)}"
    begins = config.checkpoint.load is not None or config.checkpoint.auto_resume  # auto-resume: the start looks
    if not begins and not config.data.mock_data:
        yield (
            f"`lora_rank`={given.lora_rank}: without `load` the model beside the adapters is random; add `load` MODEL "
            "(only `mock_data` does without)"
        )
    yield from _other_kinds(config)
    if given.frozen_weights_int8:
        yield from _in_int8(config)
    parts, number = model.adapted_parts, model.experts.num_experts
    if given.lora_shared_a and (number is None or not {"fc1", "fc2"} & {*parts}):
        yield "`lora_shared_a`: no experts have adapters; drop it, or add `num_experts` and linear_fc1 or linear_fc2"
    for whole, members in TOGETHER.items():
        both = [part for part in members if part in parts]
        if whole in parts and both:
            yield f"{flag}: one adapter for all of {whole}, or one each ({', '.join(both)})? Name one kind"
    sides = {part: min(size) for part, size in adapted_sizes(model).items()}
    if sides and config.given["lora_rank"] > max(sides.values()):  # then the product is a whole matrix, in more numbers
        largest = max(sides, key=lambda part: sides[part])
        yield (
            f"`lora_rank`={given.lora_rank}: above the smaller side of every adapted matrix, {sides[largest]} at most "
            f"({largest}); use less, or train the model whole"
        )
    if number is not None and model.experts.moe_router_enable_expert_bias:
        yield "`moe_router_enable_expert_bias`: not with `lora_rank`, beside which no router changes; train it whole"
    apart = {"gate", "up"} & {*parts}
    if apart and number is not None:
        yield f"{flag}: gate and value of experts have one adapter; use linear_fc1"
    elif apart and not model.gated:
        yield f"{flag}: `activation`={model.activation} has no gate; use linear_fc1 (c_fc)"


def _other_kinds(config: Config) -> Iterator[str]:
    """What belongs to low-rank adapters alone; what keys in front of the text exclude."""
    model = config.model
    given, positions = model.lora, model.max_positions
    flag = f"`adapter_kind`={given.adapter_kind}"
    if given.adapter_kind == "lora":
        return
    for name in ("lora_alpha", "lora_targets", "lora_shared_a"):
        if name in config.given:
            yield f"`{name}`: {flag} has none; drop it"
    if config.training.compile:
        yield f"`compile`: not with {flag}; drop one"
    if not given.prefix:
        return
    hides = "which hides what is in front"
    others = {"reset_attention_mask": hides, "qk_clip": "which looks at all keys"}
    windows = any(map(model.has_window, range(model.num_layers)))
    yield from excluded(config, flag, ({"window_size": hides} if windows else {}) | others)
    if model.position_embedding_type == "learned_absolute" and model.seq_length + given.prefix > positions:
        yield (
            f"{flag}: {given.prefix} keys in front of {model.seq_length} tokens are more than the {positions} "
            f"positions of `max_position_embeddings`; use `seq_length`={positions - given.prefix} or less"
        )


def prefix_layout(config: Config, world_size: int) -> Iterator[str]:
    """Each rank has whole keys in front of its text."""
    parallel, groups, flag = config.parallel, config.model.query_groups, "`adapter_kind`=prefix"
    if not config.model.lora.prefix:
        return
    yield from excluded(config, flag, {"context_parallel_size": "whose ranks share the keys"})
    name = "stage_meshes" if parallel.meshes else "tensor_model_parallel_size"
    tp = max([parallel.tensor_model_parallel_size, *(mesh.tp for mesh in parallel.meshes)])
    if tp > groups:
        yield f"{flag}: {tp} ranks of `{name}` share {groups} key heads; use {groups} at most"


def _in_int8(config: Config) -> Iterator[str]:
    """Codes stand where the weights were: whole, on the device, of one dtype."""
    beside, offload = "`frozen_weights_int8`: not with", config.optimizer.offload.param_offload
    number, budget = config.model.experts.num_experts, config.parallel.hardware.device_memory_budget_gb
    if number is not None:
        yield f"{beside} `num_experts`={number}, whose matrices stay as they are; drop one"
    if config.parallel.zero_stage == 3:
        yield f"{beside} `zero_stage`=3, which gathers weights; use stage 2"
    if offload == "cpu":
        yield f"{beside} `param_offload`=cpu, which sends weights; drop one"
    if offload == "auto" and budget is not None:
        yield f"{beside} `device_memory_budget_gb`={budget}, which may send weights; add `param_offload` none"


def lora_warnings(model: ModelConfig) -> Iterator[str]:
    """Of a legal rank."""
    rank = model.lora.lora_rank or 0
    wide = {part: min(size) for part, size in adapted_sizes(model).items() if rank > min(size)}
    if wide:
        part, side = next(iter(wide.items()))
        yield f"`lora_rank`={rank}: above the smaller side of {part}, {side}, whose adapter has more numbers than it"


def adapted_sizes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Part that has an adapter -> (columns, rows) of its matrix."""
    h, q, kv = model.hidden_size, model.query_size, model.kv_size
    f = model.ffn_size if model.experts.num_experts is None else model.expert_ffn_size
    sizes = {
        "qkv": (h, q + 2 * kv),
        "q": (h, q),
        "k": (h, kv),
        "v": (h, kv),
        "proj": (q, h),
        "fc1": (h, 2 * f if model.gated else f),
        "gate": (h, f),
        "up": (h, f),
        "fc2": (f, h),
    }
    return {part: sizes[part] for part in model.adapted_parts if part in sizes}
