"""Bad adapters: flags -> the exact line."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv, problems_of

from megalite.config import ModelConfig, Offer, parse
from megalite.config.lora import TARGETS
from megalite.errors import ConfigError

NONE = "--lora-shared-a: no experts have adapters; drop it, or add --num-experts and linear_fc1 or linear_fc2"

ONE_LINE = [
    ("--lora-alpha 8", "--lora-alpha=8: needs --lora-rank"),
    ("--lora-targets q_proj", "--lora-targets=q_proj: needs --lora-rank"),
    (
        "--lora-rank 4 --lora-targets q_proj qq",
        f"--lora-targets=q_proj qq: qq is no layer; legal: {', '.join(TARGETS)}",
    ),
    ("--lora-rank 4 --num-experts 4 --lora-shared-a --lora-targets linear_qkv", NONE),
    ("--lora-rank 4 --lora-shared-a", NONE),
    ("--lora shared_a", "--lora shared_a: needs --lora-rank"),
    (
        "--lora-rank 4 --num-experts 4 --swiglu --lora-targets up_proj",
        "--lora-targets=up_proj: gate and value of experts have one adapter; use linear_fc1",
    ),
    (
        "--lora-rank 4 --num-experts 4 --moe-router score_function=sigmoid expert_bias",
        "--moe-router expert_bias: not with --lora-rank, beside which no router changes; train it whole",
    ),
    ("--lora int8", "--lora int8: needs --lora-rank"),
    (
        "--lora rank=4 int8 --num-experts 4",
        "--lora int8: not with --num-experts=4, whose matrices stay as they are; drop one",
    ),
    ("--lora rank=4 int8 --zero-stage 3", "--lora int8: not with --zero-stage=3, which gathers weights; use stage 2"),
    (
        "--lora rank=4 int8 --offload params",
        "--lora int8: not with --offload params, which sends weights; drop one",
    ),
    (
        "--lora rank=4 int8 --device-memory-budget-gb 9",
        "--lora int8: not with --device-memory-budget-gb=9.0, which may send weights; add --param-offload none",
    ),
    ("--lora kind=prefix", "--lora kind=prefix: needs --lora-rank"),
    ("--lora rank=4 kind=bottleneck alpha=8", "--lora-alpha: --lora kind=bottleneck has none; drop it"),
    ("--lora rank=4 kind=bottleneck --compile", "--compile: not with --lora kind=bottleneck; drop one"),
    (
        "--lora rank=4 kind=prefix --position-embedding-type rope --window-size 4",
        "--lora kind=prefix: not with --window-size, which hides what is in front; drop one",
    ),
    (
        "--lora rank=4 kind=prefix --position-embedding-type rope --reset-attention-mask",
        "--lora kind=prefix: not with --reset-attention-mask, which hides what is in front; drop one",
    ),
    (
        "--lora rank=4 kind=prefix",
        "--lora kind=prefix: 4 keys in front of 64 tokens are more than the 64 positions of --max-position-embeddings; "
        "use --seq-length=60 or less",
    ),
    (
        "--lora rank=2 kind=prefix --position-embedding-type rope --num-query-groups 1 --tensor-model-parallel-size 2",
        "--lora kind=prefix: 2 ranks of --tensor-model-parallel-size share 1 key heads; use 1 at most",
    ),
    (
        "--lora rank=2 kind=prefix --position-embedding-type rope --num-query-groups 1 --stage-meshes 2x1,1x1",
        "--lora kind=prefix: 2 ranks of --stage-meshes share 1 key heads; use 1 at most",
    ),
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
    ranks = 3 if "stage-meshes" in changes else 2 if "parallel-size 2" in changes else 1
    assert problems_of(argv(changes), ranks) == [line]


def test_a_hugging_face_directory_without_a_tokenizer_is_no_base_for_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "corpus.txt").write_text("some words")
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=300)
    offer = Offer("there", model, {"tokenizer_type": "NullTokenizer"}, huggingface=True)
    flags = f"--load {tmp_path} --use-checkpoint-args --seq-length 8 --micro-batch-size 1 --lr 1e-3 --train-iters 2"
    for data in ("", f" --data-path {tmp_path}/corpus.txt"):
        with pytest.raises(
            ConfigError, match=r"^--load=.*: the directory holds no tokenizer, .*--tokenizer-model"
        ) as no:
            parse((flags + data).split(), read_offer=lambda *_: offer)
        assert len(str(no.value).splitlines()) == 1
    for data in (" --mock-data", " --tokenizer-type ByteTokenizer", " --tokenizer-type NullTokenizer"):
        parse((flags + data).split(), read_offer=lambda *_: offer)
