"""What can go wrong between an update rule and a layout, done on purpose: the oracle of every optimizer sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import OPTIMIZERS, RAMPS, TINY, Layout, compare, train, train_body
from megalite.comm.rectangles import Statistic, TensorShard
from megalite.comm.world import World
from megalite.config import OptimizerConfig
from megalite.optim import DynamicLossScaler, LearningRateSchedule
from megalite.optim.adafactor import Adafactor
from megalite.optim.one_moment import Lion
from megalite.parallel.zero.master_shards import MasterShard
from megalite.parallel.zero.sharded_optimizer import ShardedOptimizer
from megalite.parallel.zero.sub_optimizers import DeviceOptimizer
from megalite.testing import run_ranks
from megalite.testing.oracle import reference

TP2 = "--tensor-model-parallel-size 2"
PADDED = f"{TP2} --make-vocab-size-divisible-by 128"
DP2 = "--zero-stage 1"
TWO_BUFFERED = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"


def statistics_of_padding_only() -> Any:
    """Issue 14: a rank that holds padding alone begins beyond the end of the tensor."""

    def shard(self: Statistic, of: Any, replica: int) -> TensorShard:
        place, valid = of.placement, of.placement.valid_shape(of.shape)
        total, offset = (tuple(x[d] for d in self.kept) for x in (place.global_shape, place.offset))
        local = self.values[tuple(slice(0, valid[d]) for d in self.kept)]
        return TensorShard(f"optimizer/{self.label}/{of.name}", total, offset, local, replica)

    return patch.object(Statistic, "shard", shard)


def statistics_of_the_slice() -> Any:
    return patch.object(Adafactor, "_reduce", lambda self, sums, partial: None)


def statistics_not_summed_over_tp() -> Any:
    right = Adafactor._reduce
    return patch.object(Adafactor, "_reduce", lambda self, sums, partial: right(self, sums, 0))


def matrix_split_by_tp() -> Any:
    return patch("megalite.optim.muon.gather_matrix", lambda local, placement, axes: (local, 0, None))


def moment_of_the_neighbour() -> Any:
    """Two ranks save each other's part of a moment."""
    right = MasterShard.shards

    def shards(self: MasterShard, prefix: str, values: Tensor, replica: int) -> Any:
        moment = prefix.startswith("optimizer/")
        return right(self, prefix, values.flip(0) if moment and values.dim() == 1 else values, replica)

    return patch.object(MasterShard, "shards", shards)


def decay_of_norms_and_biases() -> Any:
    right = DeviceOptimizer.begin_step

    def begin_step(self: DeviceOptimizer, **numbers: Any) -> None:
        for group in self.rule.param_groups:
            group["decay"] = True
        right(self, **numbers)

    return patch.object(DeviceOptimizer, "begin_step", begin_step)


def decay_on_the_other_group() -> Any:
    right = DeviceOptimizer.begin_step

    def begin_step(self: DeviceOptimizer, **numbers: Any) -> None:
        for group in self.rule.param_groups:
            group.setdefault("decay before", group["decay"])
            group["decay"] = not group["decay before"]
        right(self, **numbers)

    return patch.object(DeviceOptimizer, "begin_step", begin_step)


def moment_with_the_other_beta() -> Any:
    right = Lion.__init__

    def init(self: Lion, groups: Any, settings: OptimizerConfig) -> None:
        args = replace(settings.args, lion_beta1=settings.args.lion_beta2, lion_beta2=settings.args.lion_beta1)
        right(self, groups, replace(settings, args=args))

    return patch.object(Lion, "__init__", init)


def numbers_of_the_step_before() -> Any:
    right = LearningRateSchedule.__call__
    return patch.object(LearningRateSchedule, "__call__", lambda self, samples: right(self, max(0, samples - 8)))


def steps_counted_twice() -> Any:
    right = ShardedOptimizer.count_step

    def count_step(self: ShardedOptimizer, **numbers: Any) -> None:
        right(self, **numbers)
        self._set_step_count(2 * float(self.step_count))

    return patch.object(ShardedOptimizer, "count_step", count_step)


# mutation -> optimizer, layout, ranks
MUTATIONS: dict[Callable[[], Any], tuple[str, str, int]] = {
    statistics_of_padding_only: ("adafactor", PADDED, 2),
    statistics_of_the_slice: ("adafactor", DP2, 2),
    statistics_not_summed_over_tp: ("adafactor by size", TP2, 2),
    matrix_split_by_tp: ("muon", TP2, 2),
    moment_of_the_neighbour: ("sgd", DP2, 2),
    decay_of_norms_and_biases: ("adam in 16 bits", "", 1),
    decay_on_the_other_group: ("lion", "", 1),
    moment_with_the_other_beta: ("lion in 16 bits", "", 1),
    numbers_of_the_step_before: ("sgd", TWO_BUFFERED, 2),
    steps_counted_twice: ("adam", TWO_BUFFERED, 2),
}


def mutated_body(world: World, argv: list[str], steps: int, name: str) -> Any:
    mutation = {m.__name__: m for m in (*MUTATIONS, scale_of_this_update, weights_cut_off, halves_to_even)}[name]
    with mutation():
        return train_body(world, argv, steps)


@pytest.mark.landing
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_the_oracle_sees(mutation: Callable[[], Any]) -> None:
    optimizer, layout, size = MUTATIONS[mutation]
    model = f"--num-layers 2 --position-embedding-type rope {RAMPS[0]} {OPTIMIZERS[optimizer]}".split()
    case = Layout(tuple(model), (*layout.split(), "--micro-batch-size", "1"), size, delay=int("2bw" in layout))
    compare(case)
    with pytest.raises(AssertionError, match="differs by|instead of|leaves the tensor"):
        compare(case, body=mutated_body, more=(mutation.__name__,))


def scale_of_this_update() -> Any:
    """Issue 14: what an update says of the loss scale counted at once, for the stages that had not begun the next."""
    return patch.object(
        DynamicLossScaler, "previous", property(lambda self: self.scale, lambda self, scale: None), create=True
    )


@pytest.mark.landing
def test_a_scale_that_depends_on_the_depth_is_seen() -> None:
    flags = "--fp16 --loss-scaling initial=4194304 hysteresis=1 --num-layers 4 --pipeline-schedule 2bw".split()
    argv = [*(flag for flag in TINY if flag != "--fp64"), *flags, "--micro-batch-size", "1"]
    deep = [*argv, "--pipeline-model-parallel-size", "2"]
    steps, name = 4, scale_of_this_update.__name__
    right = [run_ranks(train_body, p, case, steps)[0][1] for p, case in ((1, argv), (2, deep))]
    skipped = [[norm is None for norm in norms] for norms in right]
    assert skipped[0] == skipped[1] and any(skipped[0])
    wrong = [run_ranks(mutated_body, p, case, steps, name)[0][1] for p, case in ((1, argv), (2, deep))]
    assert len({tuple(norm is None for norm in norms) for norms in wrong}) == 2


def weights_cut_off() -> Any:
    def split(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
        bits = master.view(torch.int32)
        weights.view(torch.int16).copy_(bits >> 16)
        remainder.copy_((bits & 0xFFFF).to(torch.int16))

    def join(weights: Tensor, remainder: Tensor, master: Tensor) -> None:
        bits = master.view(torch.int32)
        bits.copy_(weights.view(torch.int16))
        bits.bitwise_left_shift_(16).add_(remainder.to(torch.int32) & 0xFFFF)

    return patch.multiple("megalite.parallel.zero.param_remainders", split_bits=split, join_bits=join)


def halves_to_even() -> Any:
    """Weights as a cast makes them; the master of a half that went down does not come back."""

    def split(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
        weights.copy_(master)
        difference = master.view(torch.int32) - (weights.view(torch.int16).to(torch.int32) << 16)
        remainder.copy_(difference.clamp(max=0x7FFF))

    return patch("megalite.parallel.zero.param_remainders.split_bits", split)


@pytest.mark.parametrize("mutation", [weights_cut_off, halves_to_even], ids=lambda m: m.__name__)
def test_weights_that_are_not_the_nearest_are_seen(mutation: Callable[[], Any]) -> None:
    model = (
        "--bf16 --num-layers 4 --untie-embeddings-and-output-weights --clip-grad 0 --optimizer-state param_remainders"
    )
    argv = [*(flag for flag in TINY if flag != "--fp64"), *model.split(), "--micro-batch-size", "1"]
    expected = reference(tuple(argv), 5).tensors
    bodies: list[tuple[Any, tuple]] = [(train_body, ()), (mutated_body, (mutation.__name__,))]
    right, wrong = (train(argv, 1, 5, body=body, more=more).tensors for body, more in bodies)
    assert all(torch.equal(right[name], value) for name, value in expected.items())
    assert not all(torch.equal(wrong[name], value) for name, value in expected.items())
