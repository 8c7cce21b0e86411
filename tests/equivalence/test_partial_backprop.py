"""`--partial-backprop-groups`: a training equals sums of masked gradients in one process; k steps make up the whole."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from equivalence.layouts import TINY, Layout, assert_close, assert_same_tensors, draw, is_legal, train
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.gradient import GradSink
from megalite.testing import run_ranks
from megalite.testing.oracle import Pupil, Trajectory
from megalite.train.run import open_run

WHOLE = [*TINY, "--num-layers", "4", "--untie-embeddings-and-output-weights"]


def masked(argv: list[str], steps: int, groups: int, replicas: int) -> Trajectory:
    """Whole gradients of single samples; each layer adds up those of the samples that reach it, and divides by how many
    these are."""
    pupil = Pupil((*argv, "--micro-batch-size", "1"))
    layers = pupil.config.model.num_layers
    losses, norms = [], []

    def group_of(name: str) -> int:
        """0: the top."""
        if not name.startswith("layers."):
            return groups - 1 if name.startswith("embedding") else 0
        index = int(name.split(".")[1])
        return groups - 1 - max(g for g in range(groups) if index >= layers * g // groups)

    with pupil.data.train_loader(0) as loader:
        for step in range(steps):
            weights, batch = pupil.weights(), loader.next_batch(pupil.samples)
            total = {name: torch.zeros_like(master) for name, master in pupil.masters.items()}
            reached = dict.fromkeys(total, 0)
            loss = 0.0
            for number, sample in enumerate(batch):
                depth = (number % replicas + number // replicas + step) % groups + 1
                one, gradient = pupil.gradients(weights, [sample])
                loss += one / len(batch)
                for name in total:
                    if group_of(name) < depth:
                        total[name] += gradient[name]
                        reached[name] += 1
            losses.append(loss)
            norms.append(pupil.update({name: total[name] / max(reached[name], 1) for name in total}, step * len(batch)))
    return Trajectory(losses, norms, pupil.tensors(), pupil.rule.unsettled, pupil.rule.magnified)


CASES = [
    ("", 4, "--micro-batch-size 1 --zero-stage 3 --pipeline-model-parallel-size 2", 4, 2),
    ("", 4, "--micro-batch-size 1 --recompute-activations", 1, 1),
    ("", 2, "--micro-batch-size 1 --zero-stage 1", 2, 2),
    ("", 4, "--micro-batch-size 1 --zero-stage 2", 2, 2),
    ("", 3, "--micro-batch-size 1 --zero-stage 3", 2, 2),
    ("", 2, "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 4, 2),
    (
        "",
        4,
        "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved "
        "--num-layers-per-virtual-pipeline-stage 1 --zero-stage 2",
        4,
        2,
    ),
    ("", 2, "--micro-batch-size 1 --pipeline-model-parallel-size 4 --pipeline-schedule gpipe", 4, 1),
    ("--optimizer muon --lr 1e-3", 3, "--micro-batch-size 1 --zero-stage 1 --overlap-grad-reduce", 4, 4),
    ("--model-type llama", 2, "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel", 4, 2),
    ("", 4, "--micro-batch-size 1 --context-parallel-size 2 --no-overlap-grad-reduce", 4, 2),
]


@pytest.mark.parametrize(
    "case", [case if number < 2 else pytest.param(case, marks=pytest.mark.full) for number, case in enumerate(CASES)]
)
def test_a_training_equals_masked_sums_of_one_process(case: tuple[str, int, str, int, int]) -> None:
    model, groups, layout, world, replicas = case
    expected = masked([*WHOLE, *model.split()], 3, groups, replicas)
    found = train([*WHOLE, *model.split(), *layout.split(), "--partial-backprop-groups", str(groups)], world, 3)
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    assert_close(found.norms, expected.norms, 1e-12, "gradient norm")
    assert_same_tensors(found.tensors, expected, 1e-11 * expected.magnified)


UNLIKE_SAMPLES = {"--calculate-per-token-loss", "--eod-mask-loss", "--mtp", "--reset-position-ids"}
"""Of models: samples whose gradients `masked` does not add up as they are."""


@pytest.mark.full
@pytest.mark.parametrize("number", range(12))
def test_random_layouts(number: int, fresh: int) -> None:
    rng = random.Random(f"partial {fresh} {number}")
    groups, flag = rng.choice([2, 3, 4]), "--partial-backprop-groups"

    def want(case: Layout) -> bool:
        plain = case.delay == 0 and not {*case.model} & UNLIKE_SAMPLES and "--micro-batch-size 1" in case.command
        return plain and is_legal(replace(case, layout=(*case.layout, flag, str(groups))))

    case = draw(rng, "adam", want, ["--untie-embeddings-and-output-weights"])
    sizes = dict(zip(case.layout, case.layout[1:], strict=False))
    together = [int(sizes.get(f"--{name}-parallel-size", 1)) for name in ("tensor-model", "pipeline-model", "context")]
    replicas = case.world_size // math.prod(together)
    expected = masked([*TINY, *case.model], 3, groups, replicas)
    found = train([*TINY, *case.model, *case.layout, flag, str(groups)], case.world_size, 3)
    assert_close(found.losses, expected.losses, 1e-12 * expected.magnified, f"{case.command}: loss")
    assert_close(found.norms, expected.norms, 1e-12 * expected.magnified, f"{case.command}: gradient norm")
    assert_same_tensors(found.tensors, expected, 1e-11 * expected.magnified)


@pytest.mark.parametrize(("groups", "replicas", "size"), [(2, 1, 4), (3, 2, 3), (4, 4, 3), (4, 1, 8)])
def test_over_k_steps_every_micro_batch_counts_alike(groups: int, replicas: int, size: int) -> None:
    """At the same weights the average of k steps is the whole mean; (k + 1) / 2k of the backwards are left, on every
    rank where k divides its micro-batches."""
    from megalite.train.partial_backprop import counts, depth_of

    places = [(d, j) for d in range(replicas) for j in range(size)]
    for group in range(groups):
        weight = dict.fromkeys(places, Fraction(0))
        for step in range(groups):
            number = counts(groups, replicas, size, step)[group]
            for d, j in places:
                if depth_of(groups, d, j, step) > group:
                    weight[d, j] += Fraction(1, number * groups)
        assert set(weight.values()) == {Fraction(1, len(places))}
    for d in range(replicas):
        done = sum(depth_of(groups, d, j, 0) for j in range(size))
        if size % groups == 0:
            assert Fraction(done, size * groups) == Fraction(groups + 1, 2 * groups)


def counted_body(world: World, argv: list[str]) -> int:
    """Products that add up weight gradients in a step of this rank."""
    count = 0
    plain = GradSink.addmm

    def counted(self: GradSink, a: torch.Tensor, b: torch.Tensor) -> None:
        nonlocal count
        count += 1
        plain(self, a, b)

    with pytest.MonkeyPatch.context() as patch, open_run(parse(argv, world_size=world.size), world) as run:
        patch.setattr(GradSink, "addmm", counted)
        run.trainer.train_step(drain=True)
    return count


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_that_are_not_reached_compute_no_gradient(stages: int) -> None:
    """Two groups: of two micro-batches one stops half-way, so a quarter of the products of blocks is not there: half of
    the first of two stages'."""
    argv = [*WHOLE, "--micro-batch-size", "4", "--pipeline-model-parallel-size", str(stages)]
    whole, half = (run_ranks(counted_body, stages, [*argv, *more]) for more in ([], ["--partial-backprop-groups", "2"]))
    head = whole[-1] % (4 * 4 * 2 // stages)  # of each micro-batch once
    if stages == 2:
        assert half == [whole[0] // 2, whole[1]]
    else:
        assert half[0] - head == (whole[0] - head) * 3 // 4
