"""Flags beside `--model-module`: what speaks of our own models is refused, one line each."""

from __future__ import annotations

import pytest

from megalite.config import Config, ModelConfig, Offer, architecture_differences, dump_yaml, from_dict, parse, to_dict
from megalite.errors import ConfigError

BASE = (
    "--model-module mine:factory --seq-length 8 --micro-batch-size 1 --lr 1e-3 --train-iters 2 --mock-data "
    "--vocab-size 8"
)
OURS = "speaks of megalite's own models, not of a --model-module; drop it"

ONE_LINE = [
    ("--num-layers 2", f"--num-layers=2: {OURS}"),
    ("--hidden-dropout 0.0", f"--hidden-dropout=0: {OURS}"),
    ("--swiglu", f"--swiglu: {OURS}"),
    ("--num-experts 2", f"--num-experts=2: {OURS}"),
    ("--lora-rank 2", f"--lora-rank=2: {OURS}"),
    (
        "--recompute-granularity selective",
        "--recompute-granularity=selective: of a --model-module whole layers are recomputed; use "
        "--recompute-granularity=full",
    ),
    ("--expert-model-parallel-size 2 --nprocs 2", f"--expert-model-parallel-size=2: {OURS}"),
    ("--sequence-parallel --nprocs 2", f"--sequence-parallel: {OURS}"),
    ("--bf16 --fp8-format e4m3", f"--fp8-format=e4m3: {OURS}"),
    ("--reset-position-ids", f"--reset-position-ids: {OURS}"),
    ("--seq-length-schedule 0:4,8:8", f"--seq-length-schedule=0:4,8:8: {OURS}"),
    ("--sample-interval 2 --sample-prompts PROMPTS", f"--sample-interval=2: {OURS}"),
    (
        "--device-memory-budget-gb 2",
        "--device-memory-budget-gb=2: decides for megalite's own models; of a --model-module say by "
        "--optimizer-cpu-offload, --optimizer-offload-fraction or --optimizer-offload-path what leaves the device",
    ),
    ("--model-module mine", "--model-module=mine: expected package.module:factory, or my_model.py:factory"),
    (
        "--tensor-model-parallel-size 2 --nprocs 2",
        "--tensor-model-parallel-size=2: --model-module says by --tensor-parallel-globs which layers its ranks share; "
        "give it",
    ),
    (
        "--tensor-model-parallel-size 2 --nprocs 2 --tensor-parallel-globs *.up",
        "--tensor-parallel-globs=*.up: expected col:GLOB, row:GLOB, vocab:GLOB",
    ),
]


def parsed(more: str) -> Config:
    return parse(f"{BASE} {more}".split(), check_files=False)


@pytest.mark.parametrize(("changes", "line"), ONE_LINE)
def test_one_line(changes: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(changes)
    assert line in str(caught.value).split("\n")


def test_what_a_run_writes_down_says_nothing_of_our_sizes() -> None:
    config = parsed("--tensor-model-parallel-size 2 --nprocs 2 --tensor-parallel-globs col:*.up row:*.down")
    known = {name for name in to_dict(config)["model"] if not name.startswith(("recompute_", "cpu_offloading_"))}
    assert known == {"model_module", "tensor_parallel_globs", "seq_length", "vocab_size"}
    assert from_dict(to_dict(config)) == config
    assert "hidden_size" not in dump_yaml(config)


def test_globs_alone_are_refused() -> None:
    flags = BASE.replace("--model-module mine:factory", "--num-layers 2 --hidden-size 8 --num-attention-heads 2")
    with pytest.raises(ConfigError, match="--tensor-parallel-globs=col:x: needs --model-module"):
        parse([*flags.split(), "--tensor-parallel-globs", "col:x"])


def test_code_is_never_taken_from_a_checkpoint() -> None:
    offer = Offer("runs/mine", parsed("").model)
    flags = "--load runs/mine --use-checkpoint-args --micro-batch-size 1 --lr 1e-3 --train-iters 2 --mock-data".split()
    line = "--use-checkpoint-args: runs/mine has no code of its --model-module=mine:factory; give the flag"
    with pytest.raises(ConfigError) as caught:
        parse(flags, check_files=False, read_offer=lambda *_: offer)
    assert str(caught.value) == line
    config = parse([*flags, "--model-module", "moved:factory"], check_files=False, read_offer=lambda *_: offer)
    assert (config.model.seq_length, config.model.vocab_size) == (8, 8), "what it says besides is taken"


def test_a_checkpoint_of_ours_is_not_a_module_and_the_other_way_round() -> None:
    ours = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=8)
    theirs = parsed("").model
    assert (
        list(architecture_differences(ours, theirs)) == list(architecture_differences(theirs, ours)) == ["model_module"]
    )
    assert not architecture_differences(theirs, parsed("--seq-length 4").model)
