"""The allocator's arithmetic against worked examples, a composed batch against the same batch rehearsed whole, and the
peak of a rank against that of the tensors that are alive in a real run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.comm import World
from megalite.config import parse
from megalite.planner.activations import PRODUCT_WORKSPACE
from megalite.rehearsal import DEVICE, rehearse_run, rehearsed, short, watched_gpu
from megalite.rehearsal import memory as room
from megalite.rehearsal import rank as ranks
from megalite.rehearsal.allocator import Allocator
from megalite.rehearsal.order import Event, tensors_in
from megalite.testing import run_ranks
from megalite.train import open_run

MIB = 1 << 20
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --global-batch-size 24 --bf16 --lr 1e-2 "
    "--micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 0 --train-iters 2 "
    "--num-workers 0"
).split()


def test_sizes_and_segments() -> None:
    allocator = Allocator()
    allocator.alloc("a", 1, 0)  # 512 bytes of a small segment
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.alloc("b", MIB + 1, 0)  # a large one, split
    assert (allocator.allocated, allocator.reserved) == (512 + MIB + 512, 22 * MIB)
    allocator.alloc("c", 19 * MIB, 0)  # of its own size, in steps of 2 MiB
    assert allocator.reserved == 42 * MIB
    allocator.alloc("d", 1, 1)  # another stream has pools of its own
    assert allocator.reserved == 44 * MIB


def test_what_is_freed_is_joined_and_used_again() -> None:
    allocator = Allocator()
    for key in "abcd":
        allocator.alloc(key, 5 * MIB, 0)
    assert allocator.reserved == 20 * MIB
    allocator.free("b")
    allocator.free("c")
    allocator.alloc("e", 9 * MIB, 0)  # the two together; the rest, 1 MiB, stays with it
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 20 * MIB)


def test_holes_that_are_too_small_cost_a_segment() -> None:
    allocator = Allocator()
    for key in range(8):
        allocator.alloc(key, 5 * MIB, 0)
    for key in range(0, 8, 2):
        allocator.free(key)
    allocator.alloc("large", 8 * MIB, 0)
    assert allocator.reserved == 60 * MIB and allocator.allocated == 28 * MIB


def test_what_the_next_action_frees_is_freed_in_every_replay() -> None:
    """Each backward frees what the one before has left; the first has a buffer more, so that all others count anew."""

    def backward(number: int, own: int, before: int, more: Sequence[int]) -> tuple[tuple[str, int], list[Event]]:
        made: list[Event] = [("alloc", each, 512, 0, "a buffer") for each in more]
        made += [("free", each, 0, 0, "") for each in more]
        made += [("free", before, 0, 0, "")] if before else []
        return ("backward", number), [*made, ("alloc", own, 512, 0, "sent")]

    seen = [backward(0, 1, 0, [2]), backward(1, 3, 1, []), backward(3, 4, 3, [])]
    alive, most = 0, 0
    for kind, *_ in room._replayed(seen, [("backward", n) for n in range(100)]):
        alive += 1 if kind == "alloc" else -1
        most = max(most, alive)
    assert (alive, most) == (1, 1)


def test_what_only_the_last_forward_frees_every_one_frees() -> None:
    """Near the end of a pipeline the first two forwards come before all backwards."""
    received: list[Event] = [("alloc", n, 512, 0, "received") for n in (1, 2, 3)]
    seen = [(("forward", n), [event]) for n, event in zip((0, 1, 3), received, strict=True)]
    seen[2][1].append(("free", 1, 0, 0, ""))
    alive = 0
    for kind, *_ in room._replayed(seen, [("forward", n) for n in range(100)]):
        alive += 1 if kind == "alloc" else -1
    assert alive == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_keeps_its_ends_and_one_that_repeats(size: int) -> None:
    """Without a pipeline, too."""
    run = rehearsed(SMALL, size)
    assert (run.config.num_microbatches(size), run.full.num_microbatches(size)) == (3, 24 // size)


TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"


@pytest.mark.parametrize(
    "layout, size",
    [
        (TWO, 2),
        pytest.param(f"{TWO} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 2, marks=pytest.mark.full),
        pytest.param(f"{FOUR} --num-layers 4 --pipeline-schedule zb-h1", 4, marks=pytest.mark.full),
        pytest.param(f"{TWO} --zero-stage 1 --recompute-granularity full", 4, marks=pytest.mark.full),
    ],
)
def test_a_composed_batch_is_the_whole_one(layout: str, size: int) -> None:
    argv = [*SMALL, *layout.split()]
    composed = rehearse_run(rehearsed(argv, size))
    whole = 100
    with patch.object(short, "WHOLE", whole), patch.object(ranks, "WHOLE", whole), patch.object(room, "WHOLE", whole):
        executed = rehearse_run(rehearsed(argv, size))
    assert executed.faults == composed.faults == []
    for one, other in zip(composed.memory, executed.memory, strict=True):
        assert len(executed.records[one.rank].log) > len(composed.records[one.rank].log)
        # The whole batch waits on the device in place of a few micro-batches: five small tensors each, and its loss.
        tokens = 24 * 6 * 512
        assert one.allocated == pytest.approx(other.allocated, abs=tokens), one.rank
        assert one.states == pytest.approx(other.states, rel=1e-4)


class Alive(TorchDispatchMode):
    """The most bytes of tensors on the device that are alive at one time, in the allocator's units."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tensors_in(out):
            if x.is_cuda:
                self._storages[x.untyped_storage()._cdata] = weakref.ref(x.untyped_storage())
        alive = {key: there for key, of in self._storages.items() if (there := of()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        self.most = max(self.most, sum(-(-storage.nbytes() // 512) * 512 for storage in alive.values()))
        return out


def real_peak(world: World, argv: list[str]) -> int:
    with watched_gpu(), Alive() as alive:
        with open_run(parse(argv, world_size=world.size), replace(world, device=DEVICE)) as run:
            run.trainer.train()
        return alive.most


LARGER = "--hidden-size 128 --seq-length 128 --global-batch-size 4 --vocab-size 500".split()
LATER = pytest.mark.full
REAL = [
    ("--zero-stage 1", 2),
    pytest.param("--zero-stage 0", 1, marks=LATER),
    pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", 2, marks=LATER),
    pytest.param(TWO, 2, marks=LATER),
    pytest.param("--zero-stage 3", 2, marks=LATER),
    pytest.param("--zero-stage 0 --recompute-granularity full --recompute-method uniform", 1, marks=LATER),
]


@pytest.mark.parametrize("layout, size", REAL)
def test_a_peak_is_that_of_a_real_run(layout: str, size: int) -> None:
    argv = [*SMALL, *LARGER, *layout.split()]
    real = run_ranks(real_peak, size, argv)
    for one, peak in zip(rehearse_run(rehearsed(argv, size)).memory, real, strict=True):
        assert peak > 4 * MIB and one.allocated == pytest.approx(peak, rel=0.05), one.rank


@pytest.mark.landing
@pytest.mark.parametrize("layout", ["1f1b --zero-stage 1", "zb-h1 --zero-stage 2"])
def test_graphs_hold_what_is_planned(layout: str) -> None:
    """Pools of CUDA graphs, with what they have at most and nobody else gets; what the warm-up had stays reserved."""
    flags = (
        "--model-type llama --num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 "
        "--seq-length 2048 --micro-batch-size 1 --global-batch-size 16 --bf16 --train-iters 5 --lr 1e-3 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 4096 --untie-embeddings-and-output-weights --eval-iters 0 "
        f"--cuda-graph-impl local --pipeline-model-parallel-size 4 --pipeline-schedule {layout}"
    )
    report = rehearse_run(rehearsed(flags.split(), 8), [0, 6])
    assert all(fault.warns for fault in report.faults), str(report)
    for each in report.memory:
        assert each.planned is not None
        warm_up, planned = each.planned.warm_up, each.planned.total - PRODUCT_WORKSPACE  # which no rehearsal has
        assert each.allocated == pytest.approx(planned - warm_up, rel=0.08), each.rank
        assert warm_up > 100 * MIB and each.reserved == pytest.approx(planned, rel=0.12), each.rank


def test_graphs_that_are_captured_in_two_iterations_are_no_leak() -> None:
    flags = "--cuda-graph-impl local --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4"
    report = rehearse_run(rehearsed([*SMALL, *flags.split()], 2), [0, 1])
    assert [str(fault) for fault in report.faults] == []


@pytest.mark.parametrize("more", ["", "--softmax-type learnable", "--attention-dropout 0.1"])
def test_results_that_are_scaled_behind_a_kernel_are_planned(more: str) -> None:
    """Both are kept: 2 bytes of 16,384 x 512 numbers a block, a thirtieth of all."""
    flags = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 4 --seq-length 4096 --micro-batch-size 4 "
        f"--global-batch-size 4 --vocab-size 1024 {more}"
    )
    (each,) = rehearse_run(rehearsed([*SMALL, *flags.split()], 1, steps=1), [0]).memory
    assert each.planned is not None
    assert each.allocated == pytest.approx(each.planned.total - PRODUCT_WORKSPACE, rel=0.015)


@pytest.mark.parametrize(("blocks", "layout", "size"), [(3, "", 1), (8, "", 1), (2, TWO, 2)])
def test_activations_that_wait_on_the_host_are_planned(blocks: int, layout: str, size: int) -> None:
    """A block is on the device for its backward, and the one before it on its way."""
    flags = (
        f"--num-layers 8 --hidden-size 256 --seq-length 2048 --micro-batch-size 4 --vocab-size 200 {layout} "
        f"--offload activations={blocks}"
    )
    for each in rehearse_run(rehearsed([*SMALL, *flags.split()], size, steps=1), list(range(size))).memory:
        assert each.planned is not None and each.planned.host > 64 * MIB
        assert each.allocated == pytest.approx(each.planned.total - PRODUCT_WORKSPACE, rel=0.05), each.rank
