"""Bad adapters: flags -> the exact line."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config.lora import TARGETS

EXPERTS = "--lora-rank=4: not with --num-experts, whose matrices have no adapters; train it whole"

ONE_LINE = [
    ("--lora-alpha 8", "--lora-alpha=8: needs --lora-rank"),
    ("--lora-targets q_proj", "--lora-targets=q_proj: needs --lora-rank"),
    (
        "--lora-rank 4 --lora-targets q_proj qq",
        f"--lora-targets=q_proj qq: qq is no layer; legal: {', '.join(TARGETS)}",
    ),
    ("--lora-rank 4 --num-experts 4", EXPERTS),
    ("--lora-rank 4 --fp8-format e4m3", "--fp8-format=e4m3: not with --lora-rank; use --bf16"),
    (
        "--lora-rank 4 --lora-targets linear_qkv v_proj",
        "--lora-targets=linear_qkv v_proj: one adapter for all of qkv, or one each (v)? Name one kind",
    ),
    (
        "--lora-rank 4 --lora-targets up_proj",
        "--lora-targets=up_proj: --activation=gelu has no gate; use linear_fc1 (c_fc)",
    ),
]


@pytest.mark.parametrize(("changes", "line"), ONE_LINE)
def test_one_line(changes: str, line: str) -> None:
    assert problems_of(argv(changes), 1) == [line]
