"""`--sample-interval`: what a training run writes is what its checkpoint writes, and the run does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.comm import World
from megalite.config import parse
from megalite.generation import Sampling
from megalite.inference import generate, load_for_inference
from megalite.testing import run_ranks
from megalite.train import run_training

BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 3e-2 "
    "--train-iters 4 --eval-iters 0 --device cpu --num-workers 0 --mock-data --tokenizer-type ByteTokenizer --fp64 "
    "--no-exit-signal-handler --log-interval 1 --save-interval 2 --init-method-std 0.2 --global-batch-size 8 --seed 5"
)
PROMPTS = ["ab", "", "a longer one than that"]


def trained(world: World, flags: str) -> None:
    assert run_training(parse(flags.split(), world_size=world.size), world) == 0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[Any]:
    return [(line["iteration"], line["lm_loss"]) for line in lines(folder / "metrics.jsonl") if line["kind"] == "train"]


def check(tmp_path: Path, layout: str, ranks: int) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    flags = f"{BASE} {layout}"
    with_samples = f"--sample interval=2 prompts={prompts} tokens=20"
    run_ranks(trained, ranks, f"{flags} --save {plain}")
    run_ranks(trained, ranks, f"{flags} --save {sampled} {with_samples}")
    assert losses(sampled) == losses(plain), "bit for bit"
    written = lines(sampled / "samples.jsonl")
    assert [line["iteration"] for line in written] == [2] * 3 + [4] * 3
    for step in (2, 4):
        loaded = load_for_inference(sampled, ckpt_step=step, device="cpu")
        ids = [loaded.tokenizer.encode(prompt) or [256] for prompt in PROMPTS]
        expected = [
            loaded.tokenizer.decode(new) for (new,) in generate(loaded, ids, Sampling(seed=5), max_new_tokens=20)
        ]
        assert [line["text"] for line in written if line["iteration"] == step] == expected
    assert any(line["text"] for line in written)


@pytest.mark.landing
def test_a_delayed_pipeline_writes_what_its_masters_write(tmp_path: Path) -> None:
    """2BW predicts weights for its gradients; samples are of the masters."""
    check(tmp_path, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw", 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--zero-stage 3", 2),
        ("--zero-stage 2", 2),
        ("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --zero-stage 1", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule chimera", 2),
        ("--pipeline-model-parallel-size 4 --pipeline-schedule 2bw --optimizer muon", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule breadth-first --zero-stage 3", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule pipedream --clip-grad 0 "
         "--untie-embeddings-and-output-weights", 2),
        ("--context-parallel-size 2", 2),
        ("--context-parallel-size 2 --cp-comm-type a2a --pipeline-model-parallel-size 2", 4),
        ("--num-experts 4 --expert-model-parallel-size 2", 2),
        ("--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
         "--tensor-model-parallel-size 2 --sequence-parallel --moe-router score_function=sigmoid "
         "--moe-router expert_bias", 2),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1", 1),
    ],
)  # fmt: skip
def test_any_layout_writes_what_its_checkpoint_writes(tmp_path: Path, layout: str, ranks: int) -> None:
    check(tmp_path, layout, ranks)


def test_killed_and_resumed_nothing_is_lost(tmp_path: Path) -> None:
    """Killed after iteration 3, whose samples are written, and begun again from iteration 2."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\n")
    flags = f"{BASE} --sample interval=1 prompts={prompts} tokens=8 --auto-resume"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(trained, 1, f"{flags} --save {whole}")
    run_ranks(trained, 1, f"{flags} --save {killed}", faults=["kill@iteration:step=4"], expect="rank 0")
    run_ranks(trained, 1, f"{flags} --save {killed}")
    latest = {line["iteration"]: line["text"] for line in lines(killed / "samples.jsonl")}
    assert latest == {line["iteration"]: line["text"] for line in lines(whole / "samples.jsonl")}
