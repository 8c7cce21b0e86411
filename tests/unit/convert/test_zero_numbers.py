"""A number that is 0 is a number: files of others that say 0 are refused by name, not read as if they said nothing."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.convert.registry import read_model
from megalite.errors import ConfigError
from tests.unit.convert.family_cases import GATED, WIDTH

LLAMA = GATED | {"model_type": "llama"}
NEOX = WIDTH | {"intermediate_size": 64, "model_type": "gpt_neox", "rotary_pct": 0.5}

#: Fields -> the base, what is changed, the key that is named and its value.
ZEROS = [
    (LLAMA, {"rope_theta": 0}, "rope_theta '0'"),
    (LLAMA, {"rope_theta": 0.0}, "rope_theta '0.0'"),
    (LLAMA, {"rope_theta": False}, "rope_theta 'False'"),
    (LLAMA, {"rope_theta": ""}, "rope_theta ''"),
    (LLAMA, {"rope_theta": []}, "rope_theta '[]'"),
    (LLAMA, {"rope_theta": -1}, "rope_theta '-1'"),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta 'inf'"),
    (LLAMA, {"rope_parameters": {"rope_theta": 0}}, "rope_theta '0'"),
    (LLAMA, {"rope_parameters": {"rope_theta": 0}, "rope_theta": 1e4}, "rope_theta '0'"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor '0'"),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0}},
        "original_max",
    ),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps '0'"),
    (LLAMA, {"head_dim": 0}, "head_dim '0'"),
    (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads '0'"),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads '0'"),
    (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings '0'"),
    (LLAMA, {"vocab_size": 0}, "vocab_size '0'"),
    (NEOX, {"rope_theta": 0}, "rope_theta '0'"),
    (NEOX, {"rotary_emb_base": 0}, "rotary_emb_base '0'"),
    (NEOX, {"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor '0'"),
    (NEOX, {"rope_parameters": {"partial_rotary_factor": 0.0}, "rotary_pct": 0.25}, "partial_rotary_factor '0.0'"),
    (NEOX, {"rotary_pct": 0}, "rotary_pct '0'"),
    (NEOX, {"rotary_pct": 0.01}, "rotary_pct '0.01' turns 0 of"),
    (NEOX, {"rotary_pct": 1.5}, "rotary_pct '1.5' is not a part"),
    (NEOX, {"layer_norm_eps": 0}, "layer_norm_eps '0'"),
    (NEOX, {"initializer_range": 0}, "initializer_range '0'"),
]


@pytest.mark.parametrize(("base", "changed", "named"), ZEROS, ids=[str(row[1])[:50] for row in ZEROS])
def test_a_zero_is_refused_by_name(base: dict[str, Any], changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(base | changed, "c")
    (line,) = caught.value.problems
    assert line.startswith("c: ") and named in line


def test_what_is_absent_or_null_takes_the_default() -> None:
    for changed in ({}, {"rope_theta": None}, {"rope_parameters": None}, {"rope_parameters": {"rope_theta": None}}):
        assert read_model({**LLAMA, **changed}, "c")[1].rotary_base == 1e4
    assert read_model(NEOX | {"rotary_emb_base": 500}, "c")[1].rotary_base == 500
    newer = NEOX | {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0}, "rope_theta": 8.0}
    assert (read_model(newer, "c")[1].rotary_base, read_model(newer, "c")[1].rotary_percent) == (7.0, 1.0)
