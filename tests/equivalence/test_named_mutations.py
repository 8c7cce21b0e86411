"""What can go wrong in the systems that few runs use, done on purpose: two mistakes at least in each, and the oracle of
each sees them. (Other mistakes: test_mutations.py, test_optimizer_mutations.py.)"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence import test_message_driven, test_partial_backprop, test_zero_plus_plus
from equivalence.layouts import TINY, VARIANTS, Layout, assert_close, assert_same_tensors, compare, train, train_body
from megalite.comm import Axis
from megalite.comm.arrivals import Arrivals
from megalite.comm.world import World
from megalite.nn.adapters import ExpertAdapters, Prefix
from megalite.optim import kfac, shampoo
from megalite.parallel.grid import layers
from megalite.parallel.pipeline.message_driven import MessageDriven
from megalite.parallel.tensor import int8
from megalite.parallel.zero import plus_plus
from megalite.parallel.zero.reducer import GradientReducer
from megalite.schedule import build_program, simulate
from megalite.schedule.schedules import chimera_doubling
from megalite.testing.harness import RanksFailed
from megalite.testing.oracle import Trajectory
from megalite.train import partial_backprop

Mutation = Callable[[], AbstractContextManager[Any]]


class _Done:
    def wait(self) -> None:
        return None


def shampoo_has_no_length_of_adams() -> Any:
    return patch.object(shampoo, "_norm", lambda x: x.new_ones(()))


def shampoo_forgets_what_was_before() -> Any:
    right = shampoo.Side.after
    return patch.object(shampoo.Side, "after", lambda self, gradient, beta: right(self, gradient, 0.5 * beta))


def kfac_averages_tokens_before_the_product() -> Any:
    right = kfac.Factors.add
    return patch.object(kfac.Factors, "add", lambda self, dy, x: right(self, dy.mean(0)[None], x.mean(0)[None]))


def kfac_of_all_is_of_the_own_tokens() -> Any:
    return patch.object(kfac, "all_reduce_", lambda x, axis: None)


def rows_of_a_grid_keep_their_own_sums() -> Any:
    """A weight's gradient is of the samples of one row of ranks."""
    right = layers._weight_gradient

    def alone(*given: Any) -> Tensor:
        with patch.object(layers, "summed", lambda x, axis, dim: x.chunk(axis.size, dim)[axis.rank]):
            return right(*given)

    return patch.object(layers, "_weight_gradient", alone)


def norms_of_a_grid_are_of_the_own_features() -> Any:
    from megalite.nn import grid

    right = grid.grid_norm

    def alone(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, epsilon: float) -> Tensor:
        return right(x, weight, bias, Axis.single("tp"), epsilon)

    return patch.object(grid, "grid_norm", alone)


def opposite_pipelines_keep_their_own_gradients() -> Any:
    return patch("megalite.parallel.zero.bucket.all_reduce_", lambda x, axis, **more: _Done())


def bottlenecks_keep_the_gradient_of_their_own_tokens() -> Any:
    return patch.object(GradientReducer, "_sum_partial_gradients", lambda self: None)


def keys_of_a_prefix_are_its_values() -> Any:
    right = Prefix.forward

    def forward(self: Prefix, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        with patch.object(self, "prefix", torch.nn.Parameter(self.prefix.flip(0))):
            return right(self, k, v, cache)

    return patch.object(Prefix, "forward", forward)


def adapters_of_experts_forget_their_scale() -> Any:
    right = ExpertAdapters.__init__

    def init(self: ExpertAdapters, *given: Any) -> None:
        right(self, *given)
        self.scale = 1.0

    return patch.object(ExpertAdapters, "__init__", init)


def scales_of_8_bits_are_of_the_own_part_of_a_row() -> Any:
    right = int8.in_8_bits
    return patch.object(int8, "in_8_bits", lambda weight, shared=None: right(weight))


def a_partition_keeps_weights_beyond_their_update() -> Any:
    right = plus_plus.BucketWeights.updated
    return patch.object(plus_plus.PartitionedWeights, "updated", right)


TP2 = "--tensor-model-parallel-size 2"
GRID = "--tensor-model-parallel-size 4 --tensor-parallel-mode 2d --micro-batch-size 2"
ZERO = "--zero-stage 3 --zero-plus-plus"
EXPERTS = "--num-experts 4 --swiglu --moe-ffn-hidden-size 24 --lora rank=3 alpha=5"

# mutation -> model, layout, ranks
IN_A_LAYOUT: dict[Mutation, tuple[str, str, int]] = {
    shampoo_has_no_length_of_adams: (VARIANTS["shampoo"], "", 1),
    shampoo_forgets_what_was_before: (VARIANTS["shampoo"], "", 1),
    kfac_averages_tokens_before_the_product: (VARIANTS["kfac"], "", 1),
    kfac_of_all_is_of_the_own_tokens: (VARIANTS["kfac"], "", 2),
    rows_of_a_grid_keep_their_own_sums: ("", GRID, 4),
    norms_of_a_grid_are_of_the_own_features: ("", GRID, 4),
    opposite_pipelines_keep_their_own_gradients: (
        "",
        "--pipeline-model-parallel-size 2 --pipeline-schedule chimera-doubling",
        2,
    ),
    bottlenecks_keep_the_gradient_of_their_own_tokens: (
        "--lora rank=3 kind=bottleneck",
        f"{TP2} --sequence-parallel",
        2,
    ),
    keys_of_a_prefix_are_its_values: ("--lora rank=3 kind=prefix --max-position-embeddings 19", "", 1),
    adapters_of_experts_forget_their_scale: (EXPERTS, "", 1),
    scales_of_8_bits_are_of_the_own_part_of_a_row: ("--lora rank=3 int8", TP2, 2),
    a_partition_keeps_weights_beyond_their_update: ("", f"{ZERO} partition=2", 4),
}


def mutated_body(world: World, argv: list[str], steps: int, name: str) -> Any:
    mutation = next(m for m in IN_A_LAYOUT if m.__name__ == name)
    with mutation():
        return train_body(world, argv, steps)


@pytest.mark.landing
@pytest.mark.parametrize("mutation", IN_A_LAYOUT, ids=lambda m: m.__name__)
def test_the_oracle_sees(mutation: Mutation) -> None:
    model, layout, size = IN_A_LAYOUT[mutation]
    case = Layout(("--num-layers", "2", *model.split()), ("--micro-batch-size", "1", *layout.split()), size)
    compare(case)
    with pytest.raises(AssertionError, match="differs by|instead of"):
        compare(case, body=mutated_body, more=(mutation.__name__,))


def a_part_of_the_backward_counts_as_the_whole() -> Any:
    return patch.object(partial_backprop, "counts", lambda groups, replicas, size, step: [replicas * size] * groups)


def depths_do_not_turn() -> Any:
    right = partial_backprop.depth_of
    return patch.object(
        partial_backprop, "depth_of", lambda groups, replica, place, step: right(groups, replica, place, 0)
    )


def halves_of_a_code_go_away_from_zero() -> Any:
    return patch.object(plus_plus, "TIE", -plus_plus.TIE)


def the_message_before_is_taken() -> Any:
    right = Arrivals.take

    def take(self: Arrivals, name: str) -> Tensor:
        x = right(self, name)
        kept: dict[str, Tensor] = vars(self).setdefault("before", {})
        before = kept.get(name, x)
        kept[name] = x
        return before

    return patch.object(Arrivals, "take", take)


def one_more_is_in_flight_than_may_be() -> Any:
    right = MessageDriven.__init__

    def init(self: MessageDriven, *given: Any, limit: int, **more: Any) -> None:
        right(self, *given, limit=limit + 1, **more)

    return patch.object(MessageDriven, "__init__", init)


Train = Callable[..., Trajectory]


def partial_backpropagation(run: Train, folder: Path) -> None:
    argv = [*test_partial_backprop.WHOLE, "--micro-batch-size", "1"]
    expected = test_partial_backprop.masked(argv, 2, 3, 1)  # eight micro-batches are no multiple of three
    found = run([*argv, "--partial-backprop-groups", "3"], 1, 2)
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    assert_same_tensors(found.tensors, expected, 1e-11)


def gradients_in_4_bits(run: Train, folder: Path) -> None:
    argv = [*TINY, "--num-layers", "2", "--untie-embeddings-and-output-weights", "--micro-batch-size", "1"]
    expected = test_zero_plus_plus.emulated(argv, 2, 4, 2, weights=False, gradients=True)
    found = run([*argv, *f"{ZERO} gradients partition=2".split()], 4, 2)
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    assert_same_tensors(found.tensors, expected, 1e-11 * expected.magnified)


def whatever_has_arrived(run: Train, folder: Path) -> None:
    flags = [*test_message_driven.ARRIVES.split(), "--pipeline-max-in-flight", "1"]
    argv = [*test_message_driven.MODEL, "--pipeline-model-parallel-size", "2"]
    found = run([*argv, *flags], 2, 2, 3, str(folder))
    expected = train(argv, 2, 2)
    assert_close(found.losses, expected.losses, 0.0, "loss")
    test_message_driven.check_order(folder, 3, 2, 1)


OF_ITS_OWN: dict[Mutation, Callable[[Train, Path], None]] = {
    a_part_of_the_backward_counts_as_the_whole: partial_backpropagation,
    depths_do_not_turn: partial_backpropagation,
    halves_of_a_code_go_away_from_zero: gradients_in_4_bits,
    the_message_before_is_taken: whatever_has_arrived,
    one_more_is_in_flight_than_may_be: whatever_has_arrived,
}
"""A mutation -> what sees it, with an oracle of its own."""


def own_body(world: World, argv: list[str], steps: int, name: str, *more: Any) -> Any:
    """As `train_body`, or with delays that are drawn by `more`; name: of a mutation, or none."""
    mutation = {m.__name__: m for m in OF_ITS_OWN}.get(name, nullcontext)
    with mutation():
        return test_message_driven.delayed_body(world, argv, steps, *more) if more else train_body(world, argv, steps)


@pytest.mark.landing
@pytest.mark.parametrize("mutation", OF_ITS_OWN, ids=lambda m: m.__name__)
def test_its_own_oracle_sees(mutation: Mutation, tmp_path: Path) -> None:
    def run_as(name: str) -> Train:
        return lambda argv, world, steps, *more: train(argv, world, steps, body=own_body, more=(name, *more))

    check = OF_ITS_OWN[mutation]
    check(run_as("none"), tmp_path)
    with pytest.raises(AssertionError) as seen:
        check(run_as(mutation.__name__), tmp_path)
    assert not isinstance(seen.value, RanksFailed)


def test_a_pipeline_of_chimera_that_runs_further_ahead_is_seen() -> None:
    """It waits no longer; the paper's 2p micro-batches are what it breaks, and what the validator proves."""
    right = chimera_doubling.slots_of_work
    with patch.object(chimera_doubling, "slots_of_work", lambda pairs, ahead: right(pairs, ahead + 1)):
        program = build_program("chimera-doubling", 8, 32)
        assert max(simulate(program).peak_activations_per_rank) > 16
    assert max(simulate(build_program("chimera-doubling", 8, 32)).peak_activations_per_rank) == 16
