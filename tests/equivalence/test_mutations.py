"""Gate the gate: each way in which a parallel run can go quietly wrong must turn the equality tests red."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from torch import Tensor

from equivalence.layouts import TINY, train_body
from megalite.comm.mesh import Axis
from megalite.comm.world import World
from megalite.parallel.pipeline.stage import Stage
from megalite.parallel.zero.reducer import GradientReducer
from megalite.parallel.zero.sharded_optimizer import PendingNorm, ShardedOptimizer
from megalite.testing import run_ranks
from megalite.testing.oracle import reference
from megalite.train.batch_reader import BatchReader

MODEL = ("--num-layers", "4", "--clip-grad", "0.5")
PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")


def loss_not_divided_by_m():
    right = BatchReader._factors
    return patch.object(
        BatchReader, "_factors", lambda self, tokens, scale: [f * len(tokens) for f in right(self, tokens, scale)]
    )


def gradient_not_reduced():
    return patch("megalite.parallel.zero.bucket.all_reduce_", lambda x, axis, **more: _Done())


def tied_embeddings_not_synchronised():
    return patch("megalite.engine.weights.start_shared_sum", lambda axis, copies: _Done())


def clipped_by_the_local_norm():
    def only_mine(out: Tensor, x: Tensor, axis: Axis, **more: bool) -> _Done:
        out.zero_()[axis.rank] = x[0]
        return _Done()

    def local(self: ShardedOptimizer) -> PendingNorm:
        with patch("megalite.parallel.zero.sharded_optimizer.all_gather_into", only_mine):
            return right(self)

    right = ShardedOptimizer.start_grad_norm
    return patch.object(ShardedOptimizer, "start_grad_norm", local)


def norm_gradients_not_summed_over_tp():
    return patch.object(GradientReducer, "_sum_partial_gradients", lambda self: None)


def newest_version_in_2bw():
    right = Stage.module
    return patch.object(Stage, "module", lambda self, version: right(self, version + 1))


def stale_microbatch():
    right = BatchReader.get
    return patch.object(BatchReader, "get", lambda self, k: right(self, k - 1 if k % 8 == 5 else k))


class _Done:
    def wait(self) -> None:
        return None


MUTATIONS: dict[Callable, tuple[tuple[str, ...], int, int]] = {
    loss_not_divided_by_m: ((), 1, 0),
    gradient_not_reduced: ((), 2, 0),
    tied_embeddings_not_synchronised: (PP2, 2, 0),
    clipped_by_the_local_norm: (PP2, 2, 0),
    norm_gradients_not_summed_over_tp: ((*TP2, "--sequence-parallel"), 2, 0),
    newest_version_in_2bw: ((*PP2, "--pipeline-schedule", "2bw"), 2, 1),
    stale_microbatch: ((), 1, 0),
}


def mutated_body(world: World, argv: list[str], steps: int, name: str) -> list[float]:
    (mutation,) = [m for m in MUTATIONS if m.__name__ == name]
    with mutation():
        return train_body(world, argv, steps)[0]


def plain_body(world: World, argv: list[str], steps: int) -> list[float]:
    return train_body(world, argv, steps)[0]


@pytest.mark.in_turn
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_mutation_is_seen(mutation: Callable) -> None:
    layout, world_size, delay = MUTATIONS[mutation]
    steps = 4
    argv = [*TINY, *MODEL, "--micro-batch-size", "1", *layout]
    expected = reference((*TINY, *MODEL, "--micro-batch-size", "1"), steps, delay).losses

    def error(losses: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(losses, expected, strict=True))

    assert error(run_ranks(plain_body, world_size, argv, steps)[0]) < 1e-12
    try:
        losses = run_ranks(mutated_body, world_size, argv, steps, mutation.__name__)[0]
    except AssertionError:
        return  # autograd's version counter or a rank's own check saw it first
    assert error(losses) > 1e-9, f"{mutation.__name__} went unseen"
