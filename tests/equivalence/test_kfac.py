"""K-FAC: its factors against autograd, who computes them, what travels; the layouts are in test_layouts.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY, assert_close, assert_same_tensors, compare, draw, saved_tensors, train_body
from megalite.comm import Axis
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.gradient import GradSink, attach_sink
from megalite.inventory import Parameter
from megalite.optim import kfac
from megalite.parallel.tensor import ColumnParallelLinear, LayerContext, RowParallelLinear
from megalite.testing import run_ranks
from megalite.testing.oracle import Pupil, Trajectory

ARGV = [*TINY, "--num-layers", "2", "--micro-batch-size", "1", "--optimizer", "kfac", "--kfac-inverse-frequency", "2"]
ARGV += ["--kfac-kl-clip", "1e-7"]  # shortens steps


def test_a_tap_gets_what_autograd_sees() -> None:
    """Inputs behind the activation, gradients of outputs; `[s, b, h]` tokens one by one."""
    ctx = LayerContext(dtype=torch.float64, tapped=True)
    weights = [Parameter("weight", (2, 10, 6), 1), Parameter("bias", (2, 10), 1)]
    up = ColumnParallelLinear(weights, ctx)
    down = RowParallelLinear([Parameter("weight", (6, 20), 1)], ctx, activation=(torch.tanh, grad))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in (("up", up), ("down", down)):
        for p in layer.parameters():
            torch.nn.init.normal_(p)
            attach_sink(p, GradSink(torch.zeros_like(p)))
        layer.weight.sink.tap = lambda dy, x, name=name: found.update({name: (dy, x)})
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    h = up(x)
    h.retain_grad()
    y = down(h)
    y.retain_grad()
    y.sin().sum().backward()
    assert h.grad is not None and y.grad is not None
    want = {"up": (h.grad, x), "down": (y.grad, torch.tanh(h))}
    for name, pair in want.items():
        for got, expected in zip(found[name], pair, strict=True):
            assert torch.equal(got, expected.flatten(0, 1)), name


def grad(x: Tensor, dy: Tensor) -> Tensor:
    return dy * (1 - torch.tanh(x) ** 2)


def body(world: World, argv: list[str], steps: int) -> tuple[list[float], list[float | None], list[str], int]:
    """Losses and norms, the matrices whose factors this rank adds up, elements of factors that it has sent."""
    sent, rules, reduce, step = 0, set[kfac.Kfac](), kfac.all_reduce_, kfac.Kfac.step

    def counted(x: Tensor, axis: Axis) -> Any:
        nonlocal sent
        sent += x.numel() if axis.size > 1 else 0
        return reduce(x, axis)

    def noted(rule: kfac.Kfac) -> None:
        rules.add(rule)
        step(rule)

    with patch.object(kfac, "all_reduce_", counted), patch.object(kfac.Kfac, "step", noted):
        losses, norms = train_body(world, argv, steps)
    # The start has looked at one without values.
    [rule] = (rule for rule in rules if rule.param_groups[0]["params"][0].device.type != "meta")
    return losses, norms, sorted(rule.factors), sent


def test_owners_use_their_own_tokens_and_send_no_factor(tmp_path: Path) -> None:
    """DP-KFAC at two replicas beside one process whose factors are of the samples of each matrix's owner. D-KFAC sends
    46 h^2 elements a layer of this GPT, each step."""
    steps, layout = 3, ["--zero-stage", "1", "--data-cache-path", str(tmp_path / "cache")]
    argv = [*ARGV, *layout, "--kfac-factors", "own"]
    ranks = run_ranks(body, 2, [*argv, "--save", str(tmp_path / "own")], steps)
    owner = {name: rank for rank, (_, _, names, _) in enumerate(ranks) for name in names}
    assert len(owner) == 8 == sum(len(names) for _, _, names, _ in ranks) and set(owner.values()) == {0, 1}
    assert [sent for *_, sent in ranks] == [0, 0]

    pupil = Pupil(tuple(ARGV))
    rule: Any = pupil.rule
    rule.chosen = lambda name: list(range(owner[name], 8, 2))  # micro-batches are dealt in turn
    losses, norms = [], []
    with pupil.data.train_loader(0) as loader:
        for step in range(steps):
            loss, gradients = pupil.gradients(pupil.weights(), loader.next_batch(pupil.samples))
            losses.append(loss)
            norms.append(pupil.update(gradients, step * pupil.samples))
    expected = Trajectory(losses, norms, pupil.tensors(), {}, rule.magnified)
    assert_close(ranks[0][0], losses, 1e-12, "loss")
    assert_same_tensors(saved_tensors(tmp_path / "own"), expected, 1e-11)

    everyone = run_ranks(body, 2, [*ARGV, *layout], 1)
    assert [(len(names), sent) for _, _, names, sent in everyone] == [(8, 2 * 46 * 32**2)] * 2


@pytest.mark.full
def test_random_layouts(fresh: int) -> None:
    for seed in (1, fresh):
        rng = random.Random(f"kfac {seed}")
        for number in range(20):
            try:
                compare(draw(rng, "kfac"))
            except BaseException:
                print(f"seed {seed}, configuration {number}")
                raise


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num-experts 4", "--num-experts"),
        ("--pipeline-schedule 2bw", "which keeps factors of several updates; use 1f1b"),
        ("--calculate-per-token-loss", "which scales gradients after the backward"),
        ("--kfac-factors own", "--kfac-factors=own: with --zero-stage=0 every rank owns all matrices"),
        ("--offload optimizer", "whose steps do not wait for all of a rank"),
    ],
)
def test_what_kfac_does_not_go_with_is_one_line(flags: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*ARGV, *flags.split()])
    [problem] = [each for each in caught.value.problems if "kfac" in each]
    assert line in problem, problem
