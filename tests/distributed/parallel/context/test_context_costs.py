"""What context parallelism sends and keeps: bytes on the wire and live activations against their closed forms."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch

from megalite.comm import autograd
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.inventory import context_bytes, model_layers
from megalite.nn.attention.tiles import tiles
from megalite.parallel.context import ring, sequence, sequence_order
from megalite.planner.activations import stage_activations
from megalite.testing import run_ranks, run_single
from megalite.train.run import open_run
from megalite.visibility import Visibility

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 50 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 61 "
    "--eval-iters 0 --make-vocab-size-divisible-by 8 --num-workers 0 --no-exit-signal-handler"
).split()

DELTA = "--linear-attention variant=gdn key_head_dim=4 value_head_dim=6 num_key_heads=1 num_value_heads=2"


def sent_body(world: World, argv: list[str]) -> tuple[float, float]:
    """(bytes that this rank sent to the others of its sequence in one step, the closed form)."""
    config = parse(argv, world_size=world.size)
    sent = 0.0

    def counted(function, share):
        def call(x, axis, **more):
            nonlocal sent
            sent += x.numel() * x.element_size() * share(axis.size)
            return function(x, axis, **more)

        return call

    shares = {
        (ring, "start_shift"): lambda n: 1,
        (sequence, "all_to_all"): lambda n: (n - 1) / n,
        (ring, "all_gather"): lambda n: n - 1,
        (ring, "reduce_scatter"): lambda n: (n - 1) / n,
        (autograd, "all_gather"): lambda n: n - 1,
        (autograd, "reduce_scatter"): lambda n: (n - 1) / n,
    }
    with open_run(config, world) as run:
        patches = [patch.object(m, name, counted(getattr(m, name), share)) for (m, name), share in shares.items()]
        for each in patches:
            each.start()
        run.trainer.train_step(drain=True)
        for each in patches:
            each.stop()
    blocks = [context_bytes(config, layer) for layer in model_layers(config.model) if layer.is_block]
    return sent, sum(2 * block.traded + block.forward + block.backward for block in blocks)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("p2p", 2), ("p2p", 4), ("all_gather", 4), ("a2a", 2), ("a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
        (f"p2p {DELTA}", 2), (f"a2a+p2p --hierarchical-context-parallel-sizes 2 2 {DELTA}", 4),
    ],
)  # fmt: skip
def test_bytes_on_the_wire(kind: str, size: int) -> None:
    argv = [
        *BASE,
        "--model-type",
        "llama",
        "--num-query-groups",
        "2",
        "--context-parallel-size",
        str(size),
        "--cp-comm-type",
        *kind.split(),
    ]
    for sent, predicted in run_ranks(sent_body, size, argv):
        assert sent == predicted


def kept_body(world: World, argv: list[str]) -> tuple[float, float]:
    """(bytes that autograd keeps of a micro-batch, weights apart; the prediction)."""
    config = parse(argv, world_size=world.size)
    with open_run(config, world) as run:
        stage = run.trainer.executor.stages[0, 0]
        reader = run.trainer.batch_reader
        reader.plan(0, first=0, samples=config.global_batch_size(world.size))
        batch, _ = reader.get(0)
        module = stage.modules[0]
        given = [x for x in vars(batch).values() if isinstance(x, torch.Tensor)]
        outside = {x.untyped_storage()._cdata for x in [*module.parameters(), *given]}
        kept: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage()._cdata not in outside and x.numel() > 1:
                kept[x.untyped_storage()._cdata] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = module(None, batch)
        assert loss.requires_grad
        found = sum(x.untyped_storage().nbytes() for x in kept.values())
        items = range(config.model.num_layers + 2)
        return float(found), stage_activations(config, items, on_cpu=True).total


@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
def test_four_ranks_keep_a_quarter(kind: str) -> None:
    """Live activations at s = 4,096: at most 0.3 of one rank's."""
    argv = [*BASE, "--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "1"]
    argv += ["--model-type", "llama", "--num-query-groups", "2"]
    whole, _ = run_single(kept_body, argv)
    cut = ["--context-parallel-size", "4", "--cp-comm-type", kind]
    for found, predicted in run_ranks(kept_body, 4, [*argv, *cut]):
        assert found <= 0.3 * whole
        assert predicted == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_zig_zag_is_even(size: int) -> None:
    """Scores of causal attention that each rank computes, in tiles: the same for all; contiguous parts are not."""
    length = 64 * 8 * size
    everywhere = torch.arange(length)

    def areas(order: torch.Tensor) -> list[int]:
        sights = [Visibility(own, everywhere) for own in order.chunk(size)]
        return [
            sum((t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in tiles(s, 1, 1)) for s in sights
        ]

    assert len(set(areas(sequence_order(length, size)))) == 1
    contiguous = areas(everywhere)
    assert max(contiguous) * size / sum(contiguous) == pytest.approx(2 - 1 / size, rel=0.03)
    assert sorted(itertools.chain(*sequence_order(length, size).chunk(size))) == list(range(length))
