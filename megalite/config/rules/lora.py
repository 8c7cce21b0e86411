"""Rules of fine-tuning with adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.lora import TARGETS, TOGETHER
from megalite.config.root import Config


def lora(config: Config, world_size: int) -> Iterator[str]:
    """Which layers may have adapters."""
    model, given = config.model, config.model.lora
    if given.lora_rank is None:
        return
    flag = f"--lora-targets={' '.join(given.lora_targets)}"
    unknown = [name for name in given.lora_targets if name not in TARGETS]
    if unknown or not given.lora_targets:
        yield f"{flag}: {', '.join(unknown) or 'none'} is no layer; legal: {', '.join(TARGETS)}"
    if model.experts.num_experts is not None:
        yield f"--lora-rank={given.lora_rank}: not with --num-experts, whose matrices have no adapters; train it whole"
    if config.training.float8.fp8_format is not None:
        yield f"--fp8-format={config.training.float8.fp8_format}: not with --lora-rank; use --bf16"
    parts = model.adapted_parts
    for whole, members in TOGETHER.items():
        both = [part for part in members if part in parts]
        if whole in parts and both:
            yield f"{flag}: one adapter for all of {whole}, or one each ({', '.join(both)})? Name one kind"
    if not model.gated and {"gate", "up"} & set(parts):
        yield f"{flag}: --activation={model.activation} has no gate; use linear_fc1 (c_fc)"
