"""Is the checkpoint one of this model? All differences in one message, by flag.

Parallel and training flags may differ freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megalite.config.model import ModelConfig
from megalite.errors import CheckpointError

# These change how the model is trained or held, not which function of the weights it is.
FREE = frozenset(
    {
        "model_type",  # sets defaults of the others
        "seq_length",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "make_vocab_size_divisible_by",
        "fp32_residual_connection",
        "attention_softmax_in_fp32",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
    }
)


def effective(model: ModelConfig) -> Mapping[str, Any]:
    """Field name -> what it amounts to, defaults applied; fields without effect on this model are None."""
    values = {field.name: getattr(model, field.name) for field in fields(model) if field.name not in FREE}
    values["ffn_hidden_size"] = model.ffn_size
    values["num_query_groups"] = model.query_groups
    values["kv_channels"] = model.head_dim
    values["add_qkv_bias"] = model.has_qkv_bias
    values["max_position_embeddings"] = model.max_positions
    if model.position_embedding_type != "learned_absolute":
        values["max_position_embeddings"] = None
    if model.position_embedding_type != "rope":
        values |= {name: None for name in values if name.startswith("rotary_")} | {"use_rope_scaling": None}
    if not values["use_rope_scaling"]:
        values["rope_scaling_factor"] = None
    return values


def check_model(saved: ModelConfig, now: ModelConfig, where: str) -> None:
    """Raises CheckpointError naming every flag in which the checkpoint's model is another one.

    where: how the message begins, e.g. `--load=runs/a`.
    """
    theirs, ours = effective(saved), effective(now)
    differing = [
        f"--{name.replace('_', '-')}={_text(ours[name])} (checkpoint {_text(theirs[name])})"
        for name in ours
        if ours[name] != theirs[name]
    ]
    if differing:
        raise CheckpointError(
            f"{where}: model differs from checkpoint: {', '.join(differing)}; use the checkpoint's values"
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
