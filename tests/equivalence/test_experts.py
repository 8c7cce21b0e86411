"""Experts at any layout equal their definition in one process; and ways to be quietly wrong, each of which is seen.

Bugs that others have had, and what sees them here: gradients of experts doubled at ep = 2 (torch 160285), the norm
undercounted with ep and tp (Megatron-LM 5916), auxiliary losses that are not attached or scaled by the size of an axis
(Automodel 1412, Megatron-LM 5047), experts reduced over the wrong ranks at ep = 1 (Megatron-LM 1622).
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY, Layout, compare, draw, train_body
from megalite.comm import Axis, conjugates
from megalite.comm.mesh import FamilyAxes
from megalite.comm.world import World
from megalite.config import parse
from megalite.engine import expert_bias, versioned, weights
from megalite.nn import experts, router
from megalite.parallel.expert import plan
from megalite.rehearsal import rehearse_run, rehearsed
from megalite.testing import experts as testing_experts
from megalite.testing import run_ranks
from megalite.testing.oracle import Pupil, reference
from megalite.train import batch_reader, build
from megalite.train.run import run_training

TP2, TP2SP = ("--tensor-model-parallel-size", "2"), ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2, CP2 = ("--pipeline-model-parallel-size", "2"), ("--context-parallel-size", "2")
EP2, EP4 = ("--expert-model-parallel-size", "2"), ("--expert-model-parallel-size", "4")
ETP1 = ("--expert-tensor-parallel-size", "1")
PER_SEQUENCE = ("--moe-router-load-balancing-type", "seq_aux_loss")
LOSSES = ("--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.1")
GPT = ("--num-layers", "2", "--num-experts", "4", *LOSSES)
LLAMA = (*GPT, "--model-type", "llama", "--moe-ffn-hidden-size", "24", *PER_SEQUENCE)
FOUR = (*LLAMA, "--num-layers", "4")
CAPACITY = (*LLAMA, "--moe-expert-capacity-factor", "1.0")
BIAS = ("--moe-router", "expert_bias", "--moe-router-bias-update-rate", "0.03")
SIGMOID = (
    *(*LLAMA, "--moe-router", "score_function=sigmoid", "--moe-shared-expert-intermediate-size", "16"),
    *(*BIAS, "--moe-router", "topk_scaling_factor=2.5"),
)

CORNERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "one process": (GPT, ("--micro-batch-size", "1"), 1),
    "two samples at once": (LLAMA, ("--micro-batch-size", "2"), 1),
    "dp2 ep2": (GPT, ("--micro-batch-size", "1", *EP2), 2),
    "dp2 zero2": (LLAMA, ("--micro-batch-size", "2", "--zero-stage", "2"), 2),
    "dp4 ep2 zero1": (SIGMOID, ("--micro-batch-size", "1", *EP2, "--zero-stage", "1"), 4),
    "dp4 ep4 zero3": (LLAMA, ("--micro-batch-size", "2", *EP4, "--zero-stage", "3"), 4),
    "tp2": (SIGMOID, ("--micro-batch-size", "2", *TP2), 2),
    "tp2 sequence parallel": (CAPACITY, ("--micro-batch-size", "2", *TP2SP), 2),
    "tp2 etp1": (CAPACITY, ("--micro-batch-size", "2", *TP2SP, *ETP1), 2),
    "tp2 etp1 ep2": (SIGMOID, ("--micro-batch-size", "1", *TP2SP, *ETP1, *EP2), 2),
    "tp2 dp2 ep2": (GPT, ("--micro-batch-size", "1", *TP2, *EP2), 4),
    "cp2 ep2": (CAPACITY, ("--micro-batch-size", "1", *CP2, *EP2), 2),
    "tp2 cp2 etp1 ep4": (CAPACITY, ("--micro-batch-size", "2", *TP2SP, *CP2, *ETP1, *EP4), 4),
    "tp2 dp2 ep2 in halves": (SIGMOID, ("--micro-batch-size", "2", *TP2SP, *EP2, "--tp-comm-overlap"), 4),
    "dp2 ep2 zero1 in halves": (GPT, ("--micro-batch-size", "2", *EP2, "--zero-stage", "1", "--tp-comm-overlap"), 2),
    "pp2 zb-h1 recomputed": (
        GPT,
        ("--micro-batch-size", "1", *PP2, "--pipeline-schedule", "zb-h1", "--recompute-granularity", "full"),
        2,
    ),
    "pp2 dp2 ep2 2bw": (SIGMOID, ("--micro-batch-size", "1", *PP2, *EP2, "--pipeline-schedule", "2bw"), 4),
    "pp2 dp2 ep2 zb-v": (FOUR, ("--micro-batch-size", "1", *PP2, *EP2, "--pipeline-schedule", "zb-v"), 4),
}


# Others have what these have too.
LATER = ("two samples at once", "dp4 ep2 zero1", "tp2", "tp2 etp1", "tp2 dp2 ep2")


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in LATER else []) for name in CORNERS]
)
def test_corner(name: str) -> None:
    model, layout, size = CORNERS[name]
    compare(Layout(model, layout, size, delay=int("2bw" in layout)))


@pytest.mark.parametrize(
    "optimizer",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in ("sgd", "lion", "muon", "soap")),
        pytest.param("adafactor", marks=pytest.mark.landing),
    ],
)
def test_other_optimizers(optimizer: str) -> None:
    rng = random.Random(f"experts {optimizer}")
    compare(draw(rng, optimizer, lambda case: "--num-experts" in case.model and case.world_size in (2, 4)))


@pytest.mark.full
def test_many_random_layouts() -> None:
    rng = random.Random("experts")
    for _ in range(60):
        compare(draw(rng, want=lambda case: "--num-experts" in case.model))


def logged(world: World, argv: list[str]) -> list[str]:
    """Trains; the lines of the console."""
    with redirect_stdout(io.StringIO()) as console:
        run_training(parse(argv, world_size=world.size), world)
    return console.getvalue().splitlines()


@pytest.mark.parametrize("layout", [
    pytest.param(("--micro-batch-size", "2", *TP2SP, *EP2, "--tp-comm-overlap"), marks=pytest.mark.landing),
    pytest.param(("--micro-batch-size", "1", *CP2, *EP2), marks=pytest.mark.full),
])  # fmt: skip
def test_log_lines_hold_the_sums_over_all_ranks_and_layers(tmp_path: Path, layout: tuple[str, ...]) -> None:
    argv = [*TINY, *CAPACITY, "--log-interval", "1"]
    argv[argv.index("--train-iters") + 1] = "1"
    seen: list[tuple[Tensor, Tensor]] = []
    with patch.object(
        testing_experts, "layer_losses", lambda logits, taken, given: seen.append((logits.detach(), taken)) or 0.0
    ):
        pupil = Pupil((*argv, "--micro-batch-size", "1"))
        with pupil.data.train_loader(0) as loader:
            pupil.gradients(pupil.weights(), loader.next_batch(8))
    balance = [(taken.mean(0) * logits.softmax(-1).mean(0)).sum() * 4 / 2 for logits, taken in seen]
    z = [logits.logsumexp(-1).square().mean() for logits, _ in seen]
    counts = [sum(taken.sum((0, 1)) for _, taken in seen[layer::2]) for layer in (0, 1)]
    dropped = sum(float((taken * (taken.cumsum(0) > 8)).sum()) for _, taken in seen)
    expected = {
        "load_balancing_loss": float(torch.stack(balance).mean()),
        "z_loss": float(torch.stack(z).mean()),
        "fullest_expert": max(float(c.max() / c.mean()) for c in counts),
        "dropped_fraction": dropped / (8 * 16 * 2 * 2),
    }
    lines = run_ranks(logged, 4, [*argv, *layout, "--save", str(tmp_path)])[0]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (found,) = [record for record in records if "load_balancing_loss" in record]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    (line,) = [line for line in lines if "fullest expert" in line]
    assert f"load balancing loss: {expected['load_balancing_loss']:.6E}" in line
    assert f"fullest expert: {expected['fullest_expert']:.2f}" in line


def test_sums_for_the_log_travel_beside_the_next_batch() -> None:
    """Nothing that the device computes waits for them but the log's own numbers."""
    flags = "--num-layers 1 --micro-batch-size 2 --global-batch-size 4 --num-experts 4 --zero-stage 1"
    report = rehearse_run(rehearsed([*TINY, *flags.split()], 2), [0, 1])
    assert [str(fault) for fault in report.faults] == []
    lines = [call.line.name for call in report.records[0].calls if "train/expert_report.py" in call.place]
    assert lines and all(line.startswith("nccl's stream") for line in lines)


# ---- ways to be quietly wrong ----------------------------------------------------------------------------------------


def expert_gradients_doubled():
    """As many times as there are ranks that share the experts."""
    right = plan.Dispatched.back

    def start(self, y):
        return right(self, conjugates(y, self._plan, lambda y, _: y.view_as(y), lambda dy, its: dy * its.axis.size))

    return patch.object(plan.Dispatched, "back", start)


def norm_over_the_ranks_of_dense_parameters():
    """Experts of other ranks are not counted."""
    return patch.object(weights, "norm_axis", lambda mesh, *_, **__: mesh.over("tp", "pp"))


def shared_experts_counted_on_every_rank():
    return patch.object(FamilyAxes, "alike", lambda self, sharded, everywhere: [])


def losses_not_attached():
    return patch.object(router.Attach, "apply", lambda y, loss, share: y)


def losses_scaled_by_the_ranks():
    right = batch_reader.replace
    return patch.object(batch_reader, "replace", lambda batch, share: right(batch, share=share * 2))


def losses_of_local_tokens():
    """The tokens of an expert are those of this rank's part of a sequence."""
    return patch.object(router, "all_reduce_", lambda x, axis: x.mul_(axis.size))


def capacity_of_local_tokens():
    right = router.Router.first_in_line

    def first(self, chosen, capacity, batch):
        with patch.object(self, "parts", []):
            return right(self, chosen, -(-capacity // 2), replace(batch, order=None))

    return patch.object(router.Router, "first_in_line", first)


def weights_without_their_gradient_of_other_ranks():
    """What a rank computes a part of is taken for the whole."""
    return patch.object(experts, "enter_parallel", lambda x, *_, **__: x)


def experts_reduced_over_the_ranks_of_dense_parameters():
    right = build.ParallelMesh.family

    def family(self, name="dense"):
        own = right(self, name)
        return own if name == "dense" else FamilyAxes(name, own.cut, self["dp"], Axis.single("edp_replicate"))

    return patch.object(build.ParallelMesh, "family", family)


def results_in_the_order_of_arrival():
    right = plan.plan_dispatch
    return patch.object(experts, "plan_dispatch", lambda *args: replace(right(*args), arrangement=None))


def bias_in_the_weights():
    """What helps to choose an expert also weighs its result."""
    ranked = []

    def choose(ranking, given):
        ranked[:] = [ranking]
        return right(ranking, given)

    def weights_of(logits, probabilities, experts, given):
        weights = ranked[0].gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True) * given.moe_router_topk_scaling_factor

    right = router.choose
    return patch.multiple(router, choose=choose, weights_of=weights_of)


def bias_moved_by_the_loads_of_one_rank():
    return patch.object(versioned, "all_reduce_", lambda x, axis, **_: None)


def bias_moved_by_every_microbatch():
    right = expert_bias.ExpertBias.step

    def step(self, wanted, found_inf, version):
        noted = {number for stage in self.stages.values() for number in stage.loads._noted}
        for number in sorted(filter(wanted, noted)):
            right(self, number.__eq__, found_inf, version)

    return patch.object(expert_bias.ExpertBias, "step", step)


MUTATIONS: list[tuple[Callable, tuple[str, ...], tuple[str, ...]]] = [
    (expert_gradients_doubled, GPT, EP2),
    (norm_over_the_ranks_of_dense_parameters, GPT, EP2),
    (shared_experts_counted_on_every_rank, GPT, ()),
    (losses_not_attached, GPT, EP2),
    (losses_scaled_by_the_ranks, GPT, EP2),
    (losses_of_local_tokens, LLAMA, (*TP2SP, *ETP1)),
    (losses_of_local_tokens, LLAMA, (*CP2, *EP2)),
    (capacity_of_local_tokens, CAPACITY, CP2),
    (weights_without_their_gradient_of_other_ranks, GPT, TP2),
    (experts_reduced_over_the_ranks_of_dense_parameters, GPT, (*TP2SP, *ETP1)),
    (results_in_the_order_of_arrival, GPT, EP2),
    (bias_in_the_weights, SIGMOID, EP2),
    (bias_moved_by_the_loads_of_one_rank, SIGMOID, EP2),
    (bias_moved_by_every_microbatch, SIGMOID, EP2),
]


def losses_body(world: World, argv: list[str], name: str) -> tuple[list[float], list[float | None]]:
    mutation = next(m for m, *_ in MUTATIONS if m.__name__ == name)
    with mutation():
        return train_body(world, argv, 3)


@pytest.mark.landing
@pytest.mark.parametrize(
    ("mutation", "model", "layout"), MUTATIONS, ids=[f"{m.__name__} {' '.join(flags)}" for m, _, flags in MUTATIONS]
)
def test_mutation_is_seen(mutation: Callable, model: tuple[str, ...], layout: tuple[str, ...]) -> None:
    argv = [*TINY, *model, "--clip-grad", "0.5", "--micro-batch-size", "1"]
    expected = reference(tuple(argv), 3)
    found = run_ranks(losses_body, 2, [*argv, *layout], mutation.__name__)[0]
    pairs = [*zip(found[0], expected.losses, strict=True), *zip(found[1], expected.norms, strict=True)]
    assert max(abs(a - b) for a, b in pairs) > 1e-9, f"{mutation.__name__} went unseen"
