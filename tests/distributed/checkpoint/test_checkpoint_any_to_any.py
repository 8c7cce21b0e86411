"""Any layout to any other, with the whole product: state bit for bit, and training continues undisturbed.

Pairs of (tp, pp, virtual stages, dp, ZeRO stage, schedule, micro-batch size) are drawn through the product's own
validator. 40 pairs with --full, a sample otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equivalence.layouts import OPTIMIZERS, TINY, Layout, assert_close, assert_same_tensors, draw, train_body
from equivalence.test_rounding import bounds_of
from torch import Tensor

from megalite.checkpoint import CheckpointReader, latest
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.testing import run_ranks
from megalite.train.run import open_run

BEFORE, AFTER = 2, 5


def go_on(world: World, argv: list[str]) -> tuple[list[float], list[float | None]]:
    """Loads, saves at once what was loaded, trains on; returns the losses and norms."""
    losses: list[float] = []
    norms: list[float | None] = []
    with open_run(parse(argv, world_size=world.size), world) as run:
        assert run.trainer.iteration == BEFORE
        run.state.save(run.trainer.progress)
        for step in range(AFTER):
            stats = run.trainer.train_step(drain=step == AFTER - 1)
            losses.append(float(stats.lm_loss))
            norms.append(None if stats.grad_norm is None else float(stats.grad_norm))
        run.state.save(run.trainer.progress)
    return losses, norms


def stored(path: Path | None) -> dict[str, Tensor]:
    assert path is not None
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in reader.names}


def move(source: Layout, target: Layout, folder: Path, number: Sequence[str] = ("--fp64",)) -> None:
    """Asserts that what `source` saved is what `target` holds, and that training continues: exactly in fp64, within the
    bounds of the rounding model (`megalite/testing/rounding.py`) in fp32 and bf16. number: flags of the format."""
    first, second, cache = folder / "source", folder / "target", str(folder.parent / "cache")
    tiny = [*(flag for flag in TINY if flag != "--fp64"), *number]
    common = [*tiny, *source.model, "--data-cache-path", cache]
    run_ranks(train_body, source.world_size, [*common, *source.layout, "--save", str(first)], BEFORE, timeout=180)
    argv = [*common, *target.layout, "--load", str(first), "--save", str(second)]
    losses, norms = run_ranks(go_on, target.world_size, argv, timeout=180)[0]
    before, moved = stored(latest(first)), stored(second / f"iter_{BEFORE:07d}")
    if (source.delay, source.stages) != (target.delay, target.stages):  # older weights exist on one side only
        before, moved = ({n: t for n, t in d.items() if not n.startswith("previous/")} for d in (before, moved))
    assert before.keys() == moved.keys()
    for name, values in before.items():
        assert torch.equal(moved[name], values), f"{name} differs after the move"
    if (source.delay, source.stages, source.together) != (target.delay, target.stages, target.together):
        return
    if "--fp64" not in number:
        if "--num-experts" not in source.model:  # a token takes another expert for a rounding
            bounds = bounds_of(source, number, BEFORE + AFTER)
            problems = bounds.problems(losses, [] if source.stages else norms, begin=BEFORE)
            assert not problems, problems
    else:
        expected = source.expected(BEFORE + AFTER)
        assert_close(losses, expected.losses[BEFORE:], 1e-12 * expected.magnified, "loss")
        after = {name: values for name, values in stored(latest(second)).items() if name != "optimizer/step"}
        assert_same_tensors(after, expected, (1e-9 if source.stages else 1e-11) * expected.magnified)


def pair(rng: random.Random) -> tuple[Layout, Layout]:
    """A source, and another layout for the same model."""
    source = draw(rng)
    while True:
        other = draw(rng)
        target = replace(other, model=source.model)
        try:
            parse([*TINY, *target.model, *target.layout], world_size=target.world_size)
        except ConfigError:
            continue
        if target.layout != source.layout:
            return source, target


@pytest.mark.landing
def test_a_rank_that_holds_padding_only_moves_too(tmp_path: Path) -> None:
    """61 ids padded to 256 over two ranks, to 512 over four: with statistics of whole rows and columns too."""
    model = ("--num-layers", "2", "--optimizer", "adafactor")
    layouts = [("--tensor-model-parallel-size", n, "--make-vocab-size-divisible-by", "128") for n in ("2", "1", "4")]
    two, one, four = (Layout(model, (*flags, "--micro-batch-size", "1"), int(flags[1])) for flags in layouts)
    move(two, one, tmp_path / "a")
    move(one, four, tmp_path / "b")


@pytest.mark.landing
@pytest.mark.parametrize(
    "optimizer",
    ["soap", *(pytest.param(o, marks=pytest.mark.full) for o in ("shampoo", "adam", "adafactor"))],
)
def test_experts_and_their_biases_move(optimizer: str, tmp_path: Path) -> None:
    """From ranks with two whole experts each, ZeRO over their copies, to parts of all experts."""
    model = "--num-layers 2 --num-experts 4 --moe-router score_function=sigmoid expert_bias".split()
    model += ["--position-embedding-type", "rope", *OPTIMIZERS[optimizer].split()]
    dealt = "--expert-model-parallel-size 2 --zero-stage 2 --micro-batch-size 1".split()
    cut = "--tensor-model-parallel-size 2 --micro-batch-size 1".split()
    move(Layout(tuple(model), tuple(dealt), 4), Layout(tuple(model), tuple(cut), 2), tmp_path)


FORMATS: dict[str, tuple[str, ...]] = {"fp64": ("--fp64",), "fp32": (), "bf16": ("--bf16",)}


def test_random_pairs(tmp_path: Path, full: bool, fresh: int) -> None:
    names = list(FORMATS)
    for seed, count in ((7, 40 if full else 0), (fresh, 10 if full else 1)):
        rng = random.Random(seed)
        for number in range(count):
            source, target = pair(rng)
            name = names[(seed + number) % 3]
            if "--fp8-format" in source.command:  # a last digit decides which number of float8 is the next one
                name = "fp64"
            try:
                move(source, target, tmp_path / f"{seed}-{number}", FORMATS[name])
            except BaseException as error:
                lines = (f"seed {seed}, pair {number}, in {name}", f"save: {source.command}", f"load: {target.command}")
                raise AssertionError("\n".join([str(error), *lines])) from error
