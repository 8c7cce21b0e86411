"""A model of transformers and what it becomes here train alike: same data, same AdamW, same losses step by step."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence.layouts import TINY, saved_tensors
from torch import Tensor

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import Config
from megalite.config.cli import parse
from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint
from megalite.convert.registry import FAMILIES
from megalite.train.run import open_run
from megalite.train.run_data import open_data, resolve_tokenizer
from tests.unit.convert.double_transformers import double_transformers
from tests.unit.convert.family_cases import CASES, S, V
from tests.unit.convert.test_families import in_fp64, kind_of, peer

transformers = pytest.importorskip("transformers")

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
    data = open_data(config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
    kind, settings = kind_of(case), config.optimizer
    model = peer(case)
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
            with double_transformers(kind):
                logits = model(input_ids=batch.tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
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
    assert expected[0] - expected[-1] > 0.01  # a step is one
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) < 1e-12 * b, f"step {step}: {found} here, {expected} there"


C = 0.5
BALANCED = {"mixtral": 2, "qwen3-moe": 2, "olmoe": 2, "qwen3-moe-mixed": 2}
"""Of each token the experts."""


def balanced_peer(case: str, layers: int) -> Any:
    """A model of transformers in training with its balancing loss."""
    kind, values = CASES[case]
    values = values | {"num_hidden_layers": layers, "router_aux_loss_coef": C, "output_router_logits": True}
    config = getattr(transformers, f"{kind}Config")(**values, attn_implementation="eager", **in_fp64(case))
    torch.manual_seed(5)
    with double_transformers(kind_of(case)):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def router_steps(tmp_path: Path, coefficient: float) -> tuple[list[Tensor], Any]:
    """(What a step of SGD takes from each router here, the micro-batch)."""
    directory = str(tmp_path / "ours")
    flags = "--optimizer sgd --sgd-momentum 0 --lr 1 --clip-grad 0 --weight-decay 0"
    config = parse([*FLAGS, *flags.split(), "--load", directory, "--finetune"], world_size=1)
    model = CheckpointSource(directory).model
    experts = dataclasses.replace(model.experts, moe_aux_loss_coeff=coefficient)
    model = dataclasses.replace(model, seq_length=S, experts=experts)
    save = dataclasses.replace(config.checkpoint, save=str(tmp_path / f"after {coefficient}"))
    config = dataclasses.replace(config, model=model, checkpoint=save)
    with open_run(config, World()) as run:
        run.trainer.train_step(drain=True)
        run.state.save(run.trainer.progress)
    before, after = saved_tensors(directory), saved_tensors(str(save.save))
    config, tokenizer = resolve_tokenizer(config)
    data = open_data(config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
    with data.train_loader(0) as loader:
        (batch,) = loader.next_batch(config.global_batch_size(1))
    names = sorted(name for name in before if name.endswith("mlp.router.weight"))
    return [before[name].double() - after[name].double() for name in names], batch


def their_router_gradients(model: Any, batch: Any, *, each: bool) -> list[Tensor]:
    """each: of every layer's balancing loss by itself, in place of the one over all layers."""
    with double_transformers(type(model)):
        out = model(input_ids=batch.tokens)
    loss = F.cross_entropy(out.logits.flatten(0, 1), batch.labels.flatten())
    layers = [(logits,) for logits in out.router_logits] if each else [out.router_logits]
    experts, k = out.router_logits[0].shape[-1], model.config.num_experts_per_tok
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    with double_transformers(type(model)):
        loss = loss + C * sum(balance(logits, experts, k) for logits in layers) / len(layers)
    routers = [p for name, p in model.named_parameters() if name.endswith("gate.weight")]
    return list(torch.autograd.grad(loss, routers))


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "mixtral" else pytest.mark.full) for c in BALANCED])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_balancing_loss_is_theirs(case: str, layers: int, tmp_path: Path) -> None:
    """One layer with experts: the gradient of their loss. Two: that of the mean of their loss over the layers."""
    if layers == 1 and case == "qwen3-moe-mixed":
        pytest.skip("its first layer is dense")
    model = balanced_peer(case, layers)
    model.save_pretrained(tmp_path / "there")
    source = HuggingFaceSource(tmp_path / "there")
    write_checkpoint(source, tmp_path / "ours")
    sparse = sum(source.model.sparse_layers)
    carried = source.model.experts.moe_aux_loss_coeff
    assert FAMILIES[source.family.name].write(source.model)["router_aux_loss_coef"] == C
    assert carried == pytest.approx(C * BALANCED[case] / sparse, rel=1e-13)
    (plain, batch), (found, _) = router_steps(tmp_path, 0.0), router_steps(tmp_path, carried)
    expected = their_router_gradients(model, batch, each=sparse > 1)
    assert len(found) == len(expected) == sparse
    for here, there, without in zip(found, expected, plain, strict=True):
        assert float((here - without).norm()) > 1e-2 * float(here.norm())
        assert float((here - there).norm()) < 1e-11 * float(there.norm())
