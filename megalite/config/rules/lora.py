"""Rules of fine-tuning with adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.lora import TARGETS, TOGETHER
from megalite.config.model import ModelConfig
from megalite.config.root import Config


def lora(config: Config, world_size: int) -> Iterator[str]:
    """Which layers may have adapters, and that there is a model beside them."""
    model, given = config.model, config.model.lora
    if given.lora_rank is None:
        return
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
    if model.experts.num_experts is not None:
        yield f"`lora_rank`={given.lora_rank}: not with `num_experts`, whose matrices have no adapters; train it whole"
    if config.training.float8.fp8_format is not None:
        yield f"`fp8_format`={config.training.float8.fp8_format}: not with `lora_rank`; use `bf16`"
    parts = model.adapted_parts
    for whole, members in TOGETHER.items():
        both = [part for part in members if part in parts]
        if whole in parts and both:
            yield f"{flag}: one adapter for all of {whole}, or one each ({', '.join(both)})? Name one kind"
    yield from _rank(model)
    if not model.gated and {"gate", "up"} & set(parts):
        yield f"{flag}: `activation`={model.activation} has no gate; use linear_fc1 (c_fc)"


def _rank(model: ModelConfig) -> Iterator[str]:
    """A product of rank R beside a matrix whose smaller side is below R is a whole matrix, written in more numbers."""
    rank, sides = model.lora.lora_rank or 0, {part: min(size) for part, size in adapted_sizes(model).items()}
    if sides and rank > max(sides.values()):
        largest = max(sides, key=lambda part: sides[part])
        yield (
            f"`lora_rank`={rank}: above the smaller side of every adapted matrix, {sides[largest]} at most "
            f"({largest}); use less, or train the model whole"
        )


def lora_warnings(model: ModelConfig) -> Iterator[str]:
    """Of a legal rank."""
    rank = model.lora.lora_rank or 0
    wide = {part: min(size) for part, size in adapted_sizes(model).items() if rank > min(size)}
    if wide:
        part, side = next(iter(wide.items()))
        yield f"`lora_rank`={rank}: above the smaller side of {part}, {side}, whose adapter has more numbers than it"


def adapted_sizes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Part that has an adapter -> (columns, rows) of its matrix."""
    h, f, q, kv = model.hidden_size, model.ffn_size, model.query_size, model.kv_size
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
    return {part: sizes[part] for part in model.adapted_parts}
