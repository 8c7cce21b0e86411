"""PipeDream against its paper: each stage steps after every micro-batch, by the mean gradient of it alone.

The reference shares layers and samples with the product, and nothing else: a loop, autograd and `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from equivalence.layouts import TINY, Layout, assert_close, compare, train, train_body
from megalite.comm.world import World
from megalite.inventory import layer_of, stage_layer_ranges
from megalite.schedule import build_program
from megalite.testing.harness import RanksFailed
from megalite.testing.oracle import Pupil
from megalite.train.batch_reader import BatchReader

LR, DECAY = 1e-2, 0.1
BASE = [
    *TINY, "--vocab-size", "64", "--num-layers", "4", "--untie-embeddings-and-output-weights", "--clip-grad", "0",
    "--lr", str(LR), "--weight-decay", str(DECAY), "--micro-batch-size", "1",
]  # fmt: skip
PER_TOKEN = ["--eod-mask-loss", "--calculate-per-token-loss"]
EXPERTS = [
    "--num-experts", "4", "--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.1",
    "--moe-router-load-balancing-type", "seq_aux_loss",
]  # fmt: skip


def stages_of(p: int) -> list[str]:
    return ["--pipeline-model-parallel-size", str(p), "--pipeline-schedule", "pipedream"]


class Muon(torch.optim.Optimizer):
    """kellerjordan.github.io/posts/muon with Nesterov's momentum, the size of arXiv 2502.16982."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.95).add_(p.grad)
            x = p.grad + 0.95 * momentum
            x = x if x.shape[0] <= x.shape[1] else x.T
            x = x / (x.norm() + 1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x if x.shape == p.shape else x.T
            p.mul_(1 - LR * DECAY).sub_(LR * 0.2 * max(p.shape) ** 0.5 * x)


def optimizers(kind: str, weights: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [name for name, p in weights.items() if p.dim() >= 2]
    own = {name for name in matrices if kind == "muon" and name.startswith("layers.")}
    decayed = [weights[name] for name in matrices if name not in own]
    groups = [{"params": decayed}, {"params": [p for p in weights.values() if p.dim() < 2], "weight_decay": 0.0}]
    if kind == "sgd":
        return [torch.optim.SGD(groups, lr=LR, momentum=0.9, weight_decay=DECAY)]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-5, weight_decay=DECAY)
    return [adam, Muon([weights[name] for name in own])] if own else [adam]


def by_hand(kind: str, p: int, iterations: int, of: int) -> tuple[list[float], dict[str, Tensor]]:
    """(Mean loss of each iteration, weights after the last.) of: micro-batches of one sample in an iteration."""
    pupil = Pupil((*BASE, "--global-batch-size", str(of)))  # layers and samples alone
    cuts = stage_layer_ranges(pupil.config, build_program("pipedream", p, 4))
    stage = {pupil.specs[i].name: number for number, cut in enumerate(cuts) for i in cut}
    newest = {name: nn.Parameter(value.clone()) for name, value in pupil.masters.items()}
    steppers, stash, losses = optimizers(kind, newest), [], []
    with pupil.data.train_loader(0) as loader:
        for _ in range(iterations):
            seen = []
            for sample in loader.next_batch(of):
                k = len(stash)
                stash.append({name: value.detach().clone().requires_grad_() for name, value in newest.items()})
                used = {name: stash[max(0, k - (p - 1 - stage[layer_of(name)]))][name] for name in newest}
                by_path = {pupil.paths[name]: value for name, value in used.items()}
                loss = functional_call(pupil.model, by_path, (None, sample)) / sample.tokens.numel()
                gradients = torch.autograd.grad(loss, list(used.values()))
                for parameter, gradient in zip(newest.values(), gradients, strict=True):
                    parameter.grad = gradient
                for stepper in steppers:
                    stepper.step()
                seen.append(float(loss.detach()))
            losses.append(sum(seen) / of)
    return losses, {name: value.detach() for name, value in newest.items()}


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_an_update_is_that_of_its_own_micro_batch(kind: str, p: int) -> None:
    losses, weights = by_hand(kind, p, iterations=2, of=4)
    found = train([*BASE, "--optimizer", kind, "--global-batch-size", "4", *stages_of(p)], p, 2)
    assert_close(found.losses, losses, 1e-12, "loss")
    for name, value in weights.items():
        assert float((found.tensors[name] - value).abs().max()) < 1e-12, name


GROUPED = {
    "adam": ([], 2),
    "sgd": (["--optimizer", "sgd"], 2),
    "muon": (["--optimizer", "muon"], 2),
    "one stage": ([], 1),
    "tokens": (PER_TOKEN, 2),
    "tokens of replicas": ([*PER_TOKEN, "--num-layers", "2"], 4),
    "means of unlike micro-batches": (["--eod-mask-loss", "--micro-batch-size", "2"], 2),
    "experts": ([*EXPERTS, "--num-layers", "2"], 2),
    "biases of experts": (
        ["--num-experts", "4", "--moe-router", "score_function=sigmoid", "expert_bias"], 2,
    ),
    "predicted": (["--staleness-correction", "predict"], 2),
}  # fmt: skip


@pytest.mark.in_turn
@pytest.mark.parametrize("case", GROUPED)
def test_the_global_batch_size_groups_losses_alone(case: str) -> None:
    """With a constant rate 4 iterations of 8 samples are 2 of 16, bit for bit: weights, moments and older versions."""
    flags, ranks = GROUPED[case]
    argv = [*BASE, *stages_of(min(ranks, 2)), *flags]
    short, long = (
        train([*argv, "--global-batch-size", str(size), "--train-iters", str(iterations)], ranks, iterations)
        for size, iterations in ((8, 4), (16, 2))
    )
    assert short.tensors.keys() == long.tensors.keys()
    for name, value in short.tensors.items():
        assert torch.equal(value, long.tensors[name]), name
    if "--calculate-per-token-loss" not in flags:
        means = [(a + b) / 2 for a, b in zip(short.losses[::2], short.losses[1::2], strict=True)]
        assert_close(long.losses, means, 1e-12, "mean loss")


# Ways in which an update can be that of its iteration again.


def divided_by_the_iteration() -> AbstractContextManager[object]:
    """The gradient's factor is the micro-batch's part of the iteration's mean loss."""
    factors, parts = BatchReader._factors, BatchReader._parts
    return patch.multiple(
        BatchReader,
        _factors=lambda self, tokens, scale: [
            f * part for f, part in zip(factors(self, tokens, scale), parts(self, tokens), strict=True)
        ],
        _parts=lambda self, tokens: torch.ones_like(tokens),
    )


def losses_of_layers_divided_by_the_iteration() -> AbstractContextManager[object]:
    right = BatchReader._together
    return patch.object(BatchReader, "_together", lambda self, of: len(of) if isinstance(of, list) else right(self, of))


def logged_loss_summed() -> AbstractContextManager[object]:
    return patch.object(BatchReader, "_parts", lambda self, tokens: torch.ones_like(tokens))


MUTATIONS: dict[Callable[[], AbstractContextManager[object]], list[list[str]]] = {
    divided_by_the_iteration: [[], ["--optimizer", "sgd"], ["--optimizer", "muon"], PER_TOKEN, EXPERTS],
    losses_of_layers_divided_by_the_iteration: [EXPERTS],
    logged_loss_summed: [[], PER_TOKEN],
}


def mutated_body(world: World, argv: list[str], steps: int, name: str) -> tuple[list[float], list[float | None]]:
    (mutation,) = [made for made in MUTATIONS if made.__name__ == name]
    with mutation():
        return train_body(world, argv, steps)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("mutation", "flags"),
    [pytest.param(made, flags, id=f"{made.__name__} {flags[-1:]}") for made in MUTATIONS for flags in MUTATIONS[made]],
)
def test_mutation_is_seen(mutation: Callable[[], AbstractContextManager[object]], flags: list[str]) -> None:
    model = ("--num-layers", "2", "--untie-embeddings-and-output-weights", "--clip-grad", "0", *flags)
    case = Layout(model, (*stages_of(2), "--micro-batch-size", "1"), 2, stages=2)
    with pytest.raises(AssertionError) as seen:
        compare(case, steps=2, body=mutated_body, more=(mutation.__name__,))
    assert not isinstance(seen.value, RanksFailed), "it did not run at all"
