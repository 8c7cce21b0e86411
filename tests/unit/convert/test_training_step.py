"""A model of transformers and what it becomes here train alike: same data, same AdamW, same losses step by step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from equivalence.layouts import TINY

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import Config
from megalite.config.cli import parse
from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint
from megalite.train.run import open_run
from megalite.train.run_data import open_data, resolve_tokenizer
from tests.unit.convert.test_families import S, V, peer

STEPS = 3
FLAGS = [*TINY, *f"--num-layers 2 --micro-batch-size 8 --adam-eps 1e-3 --vocab-size {V}".split()]
SAMPLE = ("gpt2", "llama")


def configuration(directory: str) -> Config:
    config = parse([*FLAGS, "--load", directory, "--finetune"], world_size=1)
    model = dataclasses.replace(CheckpointSource(directory).model, seq_length=S)
    return dataclasses.replace(config, model=model)


def our_losses(directory: str) -> list[float]:
    with open_run(configuration(directory), World()) as run:
        return [float(run.trainer.train_step(drain=i == STEPS - 1).lm_loss) for i in range(STEPS)]


def their_losses(case: str, directory: str) -> list[float]:
    """In plain torch: the mean over all tokens, clipping, AdamW that decays matrices only."""
    config, tokenizer = resolve_tokenizer(configuration(directory))
    data = open_data(config, ParallelMesh.single(), tokenizer, torch.device("cpu"), earlier_requests=())
    model, settings = peer(case), config.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (settings.args.adam_beta1, settings.args.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.args.adam_eps)
    losses = []
    with data.train_loader(0) as loader:
        for _ in range(STEPS):
            (batch,) = loader.next_batch(config.global_batch_size(1))
            loss = F.cross_entropy(model(input_ids=batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in SAMPLE else pytest.mark.full)
        for case in ("gpt2", "neox", "llama", "mistral-window", "qwen2", "qwen3")
    ],
)
def test_a_training_step_is_theirs(case: str, tmp_path: Path) -> None:
    peer(case).save_pretrained(tmp_path / "there")
    write_checkpoint(HuggingFaceSource(tmp_path / "there"), tmp_path / "ours")
    found = our_losses(str(tmp_path / "ours"))
    expected = their_losses(case, str(tmp_path / "ours"))
    # transformers computes rotary angles and softmax in fp32, the RMSNorms too
    tolerance = 1e-10 if case == "gpt2" else 5e-6
    assert expected[0] - expected[-1] > 0.01  # a step is one
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) < tolerance * b, f"step {step}: {found} here, {expected} there"
