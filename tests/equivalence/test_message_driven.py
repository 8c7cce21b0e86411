"""`--pipeline-schedule message-driven`: whatever arrives when, the bits are those of 1F1B."""

from __future__ import annotations

import ast
import random
import time
from functools import cache
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from equivalence.layouts import TINY, train, train_body
from megalite.comm.p2p import IncomingMessage
from megalite.comm.world import World
from megalite.parallel.pipeline.stage import Stage
from megalite.testing.oracle import Trajectory

MODEL = [*TINY, "--num-layers", "4", "--micro-batch-size", "1", "--untie-embeddings-and-output-weights"]
ARRIVES = "--pipeline-schedule message-driven"


def delayed_body(world: World, argv: list[str], steps: int, seed: int, orders: str) -> object:
    """Trains with forwards and backwards that take a random time; notes in which order this rank ran them."""
    rng, order = random.Random(f"{seed} {world.rank}"), []
    slow = rng.choice([0, 0, 0.002])

    def slowed(name: str):
        right = getattr(Stage, name)

        def method(self: Stage, number: int, *args: object, **more: object) -> object:
            time.sleep(slow + rng.random() * 0.003 * rng.choice([0, 1]))
            order.append((name[0], number))
            return right(self, number, *args, **more)

        return patch.object(Stage, name, method)

    def late(self: IncomingMessage) -> Tensor:
        time.sleep(rng.random() * 0.006)  # so that tensor-parallel ranks hear of messages in another order
        return waited(self)

    waited = IncomingMessage.wait
    with slowed("forward"), slowed("backward"), patch.object(IncomingMessage, "wait", late):
        found = train_body(world, argv, steps)
    Path(orders, f"{seed}-{world.rank}").write_text(repr(order))
    return found


def check_order(folder: Path, seed: int, ranks: int, limit: int) -> None:
    """Each kind by micro-batch; a backward where one is here keeps to the limit."""
    for rank in range(ranks):
        order = ast.literal_eval((folder / f"{seed}-{rank}").read_text())
        for kind in "fb":
            numbers = [number for name, number in order if name == kind]
            assert numbers == list(range(len(numbers))) and numbers
        assert max(accumulate(1 if name == "f" else -1 for name, _ in order)) <= limit


@cache
def in_1f1b(flags: str, world: int) -> list[object]:
    return bits(train([*MODEL, *flags.split()], world, 2))


def bits(found: Trajectory) -> list[object]:
    return [found.losses, found.norms, {name: value.tolist() for name, value in found.tensors.items()}]


CASES = [
    ("--pipeline-model-parallel-size 2", 2),
    ("--pipeline-model-parallel-size 3 --pipeline-max-in-flight 1", 3),
    ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 0", 4),
    ("--pipeline-model-parallel-size 2 --zero-stage 3", 4),
    ("--pipeline-model-parallel-size 2 --zero-stage 2 --check-pipeline-messages", 4),
    ("--pipeline-model-parallel-size 2 --context-parallel-size 2 --pipeline-max-in-flight 4", 4),
    ("--pipeline-model-parallel-size 3 --delayed-parameter-update", 3),
]
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 50))]


@pytest.mark.parametrize(
    "case", [case if number < 3 else pytest.param(case, marks=pytest.mark.full) for number, case in enumerate(CASES)]
)
def test_bits_are_those_of_1f1b(case: tuple[str, int], tmp_path: Path) -> None:
    layout, world = case
    plain, _, limit = layout.partition(" --pipeline-max-in-flight ")
    argv = [*MODEL, *layout.split(), *ARRIVES.split()]
    found = train(argv, world, 2, body=delayed_body, more=(7, str(tmp_path)))
    check_order(tmp_path, 7, world, int(limit or 2 * int(layout.split()[1]) - 1))
    assert bits(found) == in_1f1b(plain, world)


@pytest.mark.parametrize("seed", SEEDS)
def test_delays_change_the_order_and_no_bit(seed: int, tmp_path: Path) -> None:
    argv = [*MODEL, "--pipeline-model-parallel-size", "4", *ARRIVES.split()]
    found = train(argv, 4, 2, body=delayed_body, more=(seed, str(tmp_path)))
    check_order(tmp_path, seed, 4, 7)
    assert bits(found) == in_1f1b("--pipeline-model-parallel-size 4", 4)
