"""`--moe-token-dispatcher-type flex`: a library carries tokens, and experts are what they are with messages of our own.

The library is a stand-in with DeepEP's interface (`tests/stand_ins/deep_ep.py`); DeepEP itself needs several GPUs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY, Layout, compare, train_body
from megalite.comm import ParallelMesh
from megalite.comm.world import World
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.extras import ELSEWHERE
from megalite.parallel.expert import Carried, Dispatched, carried, expert_axes, plan_dispatch
from megalite.parallel.expert.deep_ep import DeepEP, deep_ep_over
from megalite.testing import RanksFailed, run_ranks
from megalite.testing.oracle import reference

STAND_INS = str(Path(__file__).parents[1] / "stand_ins")
FLEX = ("--device", "cpu", "--moe-token-dispatcher-type", "flex")
LOSSES = ("--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.1")
GPT = ("--num-layers", "2", "--num-experts", "4", *LOSSES)
PER_SEQUENCE = ("--moe-router-load-balancing-type", "seq_aux_loss")
LLAMA = (*GPT, "--model-type", "llama", "--moe-ffn-hidden-size", "24", *PER_SEQUENCE)
LLAMA = (*LLAMA, "--moe-expert-capacity-factor", "1.0")
SHARED = (*LLAMA, "--moe-router", "score_function=sigmoid", "--moe-shared-expert-intermediate-size", "16")
EP2, TP2 = ("--expert-model-parallel-size", "2"), ("--tensor-model-parallel-size", "2")
PP2, FULL = ("--pipeline-model-parallel-size", "2"), ("--recompute-granularity", "full")
SP, ETP1 = ("--sequence-parallel",), ("--expert-tensor-parallel-size", "1")
ONE, TWO = ("--micro-batch-size", "1"), ("--micro-batch-size", "2")

CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "ep2": (GPT, (*ONE, *EP2), 2),
    "ep2 capacity, recomputed": (LLAMA, (*TWO, *EP2, *FULL), 2),
    "ep2 x tp2, recomputed": (GPT, (*ONE, *TP2, *EP2, *FULL), 4),
    "ep2 x tp2, sequence parallel, shared": (SHARED, (*TWO, *TP2, *SP, *EP2), 4),
    "ep2 over tp's ranks": (SHARED, (*ONE, *TP2, *SP, *ETP1, *EP2), 2),
    "ep2 x pp2 zb-h1": (GPT, (*ONE, *PP2, *EP2, "--pipeline-schedule", "zb-h1"), 4),
    "ep2 x pp2 interleaved, recomputed": (
        (*LLAMA, "--num-layers", "4"),
        (*ONE, *PP2, *EP2, *FULL, "--pipeline-schedule", "interleaved", "--virtual-pipeline-model-parallel-size", "2"),
        4,
    ),
    "ep2 zero3 in halves": (GPT, (*TWO, *EP2, "--zero-stage", "3", "--tp-comm-overlap"), 2),
}


def stand_in() -> Any:
    """Puts the stand-in where a rank finds it."""
    if STAND_INS not in sys.path:
        sys.path.insert(0, STAND_INS)
    return importlib.import_module("deep_ep")


def carried_body(world: World, argv: list[str], steps: int) -> tuple[list[float], list[float | None]]:
    library = stand_in()
    found = train_body(world, argv, steps)
    assert {"dispatch", "dispatch again", "combine", "waited"} <= set(library.CALLS), "nothing was carried"
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_our_own_messages(name: str) -> None:
    model, layout, ranks = CASES[name]
    compare(Layout(model, (*layout, *FLEX), ranks), body=carried_body)


def one_layer(world: World, kind: str, flex: bool) -> list[Tensor]:
    """Of one dispatch and combine in fp64, with experts that multiply by their number: result and gradients."""
    library = stand_in()
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, ep=world.size)
    axes = expert_axes(mesh)
    tokens, number, k, h = 7 + world.rank, 8, 3, 4
    generator = torch.Generator().manual_seed(world.rank)
    x, weights = (torch.randn(tokens, n, generator=generator, dtype=torch.float64).requires_grad_() for n in (h, k))
    experts = torch.stack([torch.randperm(number, generator=generator)[:k] for _ in range(tokens)])
    if kind == "all to the last rank":
        experts = torch.arange(k).expand(tokens, k) % (number // world.size) + number - number // world.size
    kept = torch.rand(tokens, k, generator=generator) > 0.4 if kind == "some dropped" else None
    if kind == "nothing of rank 0" and world.rank == 0:
        kept = torch.zeros(tokens, k, dtype=torch.bool)
    way: Dispatched | Carried
    if flex:
        axes = type(axes)(axes.etp, axes.ep, deep_ep_over(axes.ep.group, axes.ep.size, h))
        way = Carried(x, experts, kept, weights, number, axes)
    else:
        way = Dispatched(x, plan_dispatch(experts, kept, number, axes.ep))
    rows = way.wait()
    own = torch.arange(number // world.size) + world.rank * number // world.size
    factors = (own + 1.0).double().repeat_interleave(way.counts.on_device)
    y = way.back(rows * factors[:, None]).combine(weights)
    y.square().sum().backward()
    assert not flex or len(library.CALLS) == 8  # four messages, each waited for
    return [y.detach(), x.grad, weights.grad]  # type: ignore[list-item]  # both were computed


@pytest.mark.parametrize("kind", ["", "some dropped", "all to the last rank", "nothing of rank 0"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_there_and_back(kind: str, ranks: int) -> None:
    found, expected = (run_ranks(one_layer, ranks, kind, flex) for flex in (True, False))
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert b.isfinite().all()
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


# ---- ways to be quietly wrong ----------------------------------------------------------------------------------------


def nobody_waits():
    return patch("megalite.parallel.expert.deep_ep._Event.wait", lambda self: None)


def weights_without_gradients():
    right = DeepEP.combine

    def combine(self, x, trip, weights=None):
        return right(self, x, trip, None if weights is None else torch.zeros_like(weights))

    return patch.object(DeepEP, "combine", combine)


def gradients_of_other_tokens():
    right = carried._Way.gradients_there

    def there(self, dy):
        return right(self, dy.roll(1, 0))

    return patch.object(carried._Way, "gradients_there", there)


def dropped_tokens_go_all_the_same():
    right = Carried.__init__

    def begin(self, x, experts, kept, *more):
        right(self, x, experts, None, *more)

    return patch.object(Carried, "__init__", begin)


def sums_without_weights():
    right = Carried.back

    def back(self, y):
        self._weights = torch.ones_like(self._weights)
        return right(self, y)

    return patch.object(Carried, "back", back)


MUTATIONS = [
    nobody_waits, weights_without_gradients, gradients_of_other_tokens, dropped_tokens_go_all_the_same,
    sums_without_weights,
]  # fmt: skip


def mutated_body(world: World, argv: list[str], name: str) -> tuple[list[float], list[float | None]]:
    stand_in()
    with next(m for m in MUTATIONS if m.__name__ == name)():
        return train_body(world, argv, 2)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.__name__ for m in MUTATIONS])
def test_mutation_is_seen(mutation: Callable[[], Any]) -> None:
    argv = [*TINY, *LLAMA, *ONE]
    expected = reference(tuple(argv), 2)
    try:
        losses, _ = run_ranks(mutated_body, 2, [*argv, *EP2, *FLEX], mutation.__name__)[0]
    except RanksFailed as error:
        assert "the gradient norm is nan" in str(error)
        return
    assert max(abs(a - b) for a, b in zip(losses, expected.losses, strict=True)) > 1e-9, "went unseen"


MISSING = f"--moe-token-dispatcher-type=flex: needs the package deep_ep; build it from {ELSEWHERE['deep_ep']}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-experts 4 --bf16 --expert-model-parallel-size 2", MISSING),
        ("--bf16", "--moe-token-dispatcher-type=flex: needs --num-experts"),
        (
            "--num-experts 4 --bf16",
            "--moe-token-dispatcher-type=flex: carries tokens to other ranks, and --expert-model-parallel-size is 1; "
            "give that, or drop this",
        ),
        (
            "--num-experts 4 --device cuda --expert-model-parallel-size 2",
            "--moe-token-dispatcher-type=flex: DeepEP carries bf16, and the run is in fp64; add --bf16, or drop it",
        ),
        (
            "--num-experts 4 --bf16 --expert-model-parallel-size 2 --moe-flex-dispatcher-backend hybridep",
            "--moe-flex-dispatcher-backend=hybridep: the library that carries tokens is DeepEP and no other; "
            "leave this out, or say deepep",
        ),
    ],
)
def test_what_lacks_is_said_in_one_line(words: str, said: str) -> None:
    argv = [word for word in TINY if word != "--fp64" or "--bf16" not in words]
    with pytest.raises(ConfigError) as caught:
        parse([*argv, "--num-layers", "2", *ONE, *words.split(), "--moe-token-dispatcher-type", "flex"], world_size=2)
    assert list(caught.value.problems) == list(dict.fromkeys((said, MISSING)))


def test_other_names_of_our_own_messages() -> None:
    argv = [*TINY, *GPT, *ONE]
    for name in ("allgather", "alltoall_seq"):
        assert parse([*argv, "--moe-token-dispatcher-type", name], world_size=1) == parse(argv, world_size=1)
