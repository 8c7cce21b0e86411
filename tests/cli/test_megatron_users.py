"""What a user of Megatron-LM types and sees: its data tool's flags, warnings of one rank, hints, a laptop's dry run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import preprocess_data
from megalite.config import Experts, Latent, ModelConfig, architecture_differences, parse, parse_with_origins
from megalite.convert.megatron_args import write_args
from megalite.errors import ConfigError
from megalite.planner import available, load_hardware
from megalite.progress import in_units
from megalite.train import dry_run
from pretrain_gpt import main

ROOT = Path(__file__).parents[2]
TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 20"
).split()
OF_TOOL = ["--input", str(ROOT / "README.md"), "--output-prefix", "x"]


def test_the_data_tool_takes_what_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--workers 2 --partitions 4 --keep-newlines --lang=german --keep_sequential_samples --dataset-impl mmap".split()
    )
    args = preprocess_data.parse([*OF_TOOL, *words, "--tokenizer-type", "GPTSentencePieceTokenizer"])
    assert args.workers == 2 and args.tokenizer_type == "SentencePieceTokenizer"
    assert capsys.readouterr().err == (
        "Megatron-LM flags without effect here: --partitions, --keep-newlines, --lang, --keep-sequential-samples, "
        "--dataset-impl\n"
    )
    assert preprocess_data.parse([*OF_TOOL, "--tokenizer-type", "Llama2Tokenizer"]).tokenizer_type[:8] == "Sentence"


def test_the_data_tool_says_all_that_is_wrong_at_once() -> None:
    words = "--split-sentences --dataset-impl lazy --workers-to-check 1 2 --tokenizer-type TikTokenizer".split()
    with pytest.raises(ConfigError) as caught:
        preprocess_data.parse([*OF_TOOL, *words])
    begins = (
        "--split-sentences: a doc",
        "--dataset-impl=lazy: .bin",
        "--workers-to-check: give",
        "--tokenizer-type: TikTokenizer is not here",
    )
    assert [line.startswith(begin) for line, begin in zip(caught.value.problems, begins, strict=True)] == [True] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_what_the_flags_come_to(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main([*TINY, "--sequence-parallel", "--manual-gc", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert ("--sequence-parallel" in out.partition("model:")[0]) == ("--manual-gc" in out) == (rank == 0), out


def test_help_that_nobody_reads_to_its_end_is_silent() -> None:
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b"" and program.wait(60) == 0
    program.stderr.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="its memory is that of GPUs then")
def test_a_dry_run_that_is_too_large_for_a_laptop_is_planned_for_gpus(caplog: pytest.LogCaptureFixture) -> None:
    large = (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 --lr 1e-3 "
        "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 50000 --bf16 --nprocs 8 "
        "--tensor-model-parallel-size 8 --dry-run"
    ).split()
    parsed = parse_with_origins(large)
    text = dry_run(parsed.config, parsed.origins, parsed.ranks)
    assert "8 ranks do not fit into this host" in text and "GPU" in text
    (line,) = caplog.messages
    assert (
        line.startswith("predicted memory: 8 ranks need ") and "planned for GPUs elsewhere, whose needs differ" in line
    )
    parsed = parse_with_origins([*large, "--device", "cpu"])
    with pytest.raises(ConfigError, match="predicted memory: 8 ranks need"):
        dry_run(parsed.config, parsed.origins, parsed.ranks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its memory is that of GPUs then")
def test_a_dry_run_names_the_devices_that_are_too_small_and_why() -> None:
    """Llama 3 8B without ZeRO: the linear layers of each of its 32 blocks hold 218,103,808 numbers."""
    llama = (
        "--model-type llama --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--num-query-groups 8 --seq-length 8192 --micro-batch-size 1 --global-batch-size 8 --bf16 --lr 1e-4 --nprocs 8 "
        "--train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --dry-run"
    ).split()

    def rows(*more: str) -> tuple[str, str, str]:
        parsed = parse_with_origins([*llama, *more])
        lines = dry_run(parsed.config, parsed.origins, parsed.ranks).splitlines()
        memory, room = (next(line for line in lines if line.startswith(f" {name} ")) for name in ("memory", "room"))
        return memory, room, lines[-1]

    memory, room, last = rows("--fp8-format", "hybrid")
    assert f"weights 30 GB ({in_units(2 * 32 * 218_103_808, 'B')} of them copies in fp8), " in memory
    known = [each for each in map(load_hardware, available()) if not each.on_cpu]
    total = float(memory.split()[1]) * 1e9
    small = ", ".join(each.name for each in known if each.usable_bytes < total)
    assert (
        f"; too small for this layout: {small} (largest: optimizer 96.4 GB, gradients 32.1 GB, activations 31.7 GB)"
        in room
    )
    assert small == ", ".join(each.name for each in known) and room.endswith("), no known device has more")
    assert last.startswith(" A problem: no known device has room for a rank (room, above); ")
    _, room, last = rows("--zero-stage", "1", "--optimizer", "sgd")
    assert "too small" in room and "no known device" not in room and "B200" not in room.partition("small")[2]
    assert last.startswith(
        " No problem found but for what the lines above leave open, and devices that are too small (room): "
    )
    memory, room, last = rows("--zero-stage", "3", "--recompute-granularity", "full", "--num-layers", "1")
    assert "in fp8" not in memory and "too small" not in room + last
    assert last.startswith(" No problem found but for what the lines above leave open: ")


def test_tokenizers_that_are_not_there_lead_to_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a_text").write_text("text")
    flags = [
        *(word for word in TINY if word not in ("--mock-data", "NullTokenizer")),
        "--data-path",
        str(tmp_path / "a_text"),
    ]
    flags.remove("--tokenizer-type")

    def lines(*more: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            parse([*flags, *more])
        return caught.value.problems

    path = tmp_path / "tokenizer.model"
    (line,) = lines("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(path))
    hint = f"{tmp_path} holds tokenizer.json: --tokenizer-type HuggingFaceTokenizer, --tokenizer-model {tmp_path}"
    assert line == f"--tokenizer-model={path}: no such file; {hint}"
    found = lines(
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "deepseek-ai/DeepSeek-V3", "--lr", "0"
    )
    assert "looks like a name on the Hub; nothing is downloaded here" in found[-1] and len(found) == 2, found


def test_what_megatron_has_no_place_for_is_named_once() -> None:
    model = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20)
    latent = Latent(multi_latent_attention=True, kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5)
    with pytest.raises(ConfigError) as caught:
        write_args(dataclasses.replace(model, latent=latent), "transformer_engine")
    (line,) = caught.value.problems
    assert line == (
        "not written for Megatron-LM (transformer_engine): a model with --multi-latent-attention; hf and dcp have it"
    )


def test_a_flag_that_sigmoid_does_not_read_makes_no_other_model() -> None:
    shape = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20)
    for score, differing in (("sigmoid", set()), ("softmax", {"moe_router_pre_softmax"})):
        experts = Experts(num_experts=4, moe_router_score_function=score)
        plain, given = (
            dataclasses.replace(shape, experts=dataclasses.replace(experts, moe_router_pre_softmax=on))
            for on in (False, True)
        )
        assert architecture_differences(plain, given).keys() == differing
