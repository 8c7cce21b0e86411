"""Two half-batches that take turns (`--tp-comm-overlap`) are two micro-batches of half the size, bit for bit, and what
one sends travels while the other computes."""

from __future__ import annotations

import random
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY, Layout, assert_close, compare, draw, train
from megalite.comm import Done
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.nn.attention.layer import Attention
from megalite.nn.halves import HalvedStack
from megalite.parallel.expert import grouped, plan
from megalite.parallel.tensor import late_messages
from megalite.parallel.tensor.late_messages import LateMessage
from megalite.parallel.tensor.products import Products
from megalite.testing import run_ranks
from megalite.train.run import open_run

TP2 = "--tensor-model-parallel-size 2"
APART = "--untie-embeddings-and-output-weights --clip-grad 0"  # else sums have another order
FULL = "--recompute-granularity full --recompute-method"
LLAMA = "--model-type llama --num-query-groups 2 --qk-layernorm"
EXPERTS = (
    "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.1"
)
SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 16"
DEALT = "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2"


def equals_two_micro_batches(
    flags: str, world_size: int, model: str = "", steps: int = 2, *, cut: str = TP2, layers: int = 4
) -> None:
    base = [*TINY, *f"--num-layers {layers} {APART} {model} {cut} {flags}".split()]
    two = train([*base, "--micro-batch-size", "1"], world_size, steps)
    halves = train([*base, "--micro-batch-size", "2", "--tp-comm-overlap"], world_size, steps)
    unlike = [name for name, value in two.tensors.items() if not torch.equal(value, halves.tensors[name])]
    assert two.tensors and not unlike, f"{flags}: {len(unlike)} of {len(two.tensors)} differ: {unlike[:4]}"
    assert halves.norms == two.norms
    assert_close(halves.losses, two.losses, 1e-15, "loss")


def test_halves_are_two_micro_batches() -> None:
    dropout = "--hidden-dropout 0.1 --attention-dropout 0.1"
    equals_two_micro_batches("--sequence-parallel --pipeline-model-parallel-size 2", 4, f"{LLAMA} {dropout}", 1)


def test_halves_whose_rows_alone_travel_are_two_micro_batches() -> None:
    """Without tensor parallelism; over ranks of one sequence, as others would have other samples."""
    cut = "--context-parallel-size 2 --cp-comm-type a2a --expert-model-parallel-size 2"
    equals_two_micro_batches("--hidden-dropout 0.1", 2, EXPERTS, 1, cut=cut, layers=2)


@pytest.mark.parametrize("kind", ["bottleneck", "prefix --max-position-embeddings 19"])
def test_halves_with_adapters_are_two_micro_batches(kind: str) -> None:
    """Those that are layers, whose gradients are autograd's."""
    equals_two_micro_batches("--sequence-parallel", 2, f"--lora rank=3 kind={kind}", 2, layers=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "world_size", "model"),
    [
        ("", 2, ""),
        ("--sequence-parallel", 2, "--use-parallel-residual"),
        (f"--sequence-parallel {FULL} uniform --recompute-num-layers 2", 2, LLAMA),
        (f"{FULL} block --recompute-num-layers 1", 2, "--hidden-dropout 0.1 --softmax-type learnable"),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 4, "--swiglu"),
        ("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --sequence-parallel", 4, ""),
        ("--context-parallel-size 2 --sequence-parallel", 4, LLAMA),
        ("--sequence-parallel", 2, "--lora rank=3 alpha=5"),
        ("--sequence-parallel", 2, "--reset-position-ids --reset-attention-mask --calculate-per-token-loss"),
        ("--sequence-parallel", 2, f"{EXPERTS} --hidden-dropout 0.1 --moe-expert-capacity-factor 1.0"),
        ("", 2, f"{SHARED} --moe-layer-freq 2"),
        (f"--sequence-parallel {DEALT} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 4, SHARED),
        (f"--sequence-parallel {DEALT} {FULL} uniform", 2, f"{EXPERTS} --use-parallel-residual"),
    ],
)
def test_halves_are_two_micro_batches_everywhere(flags: str, world_size: int, model: str) -> None:
    equals_two_micro_batches(flags, world_size, model, 3)


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("split", ["", "--sequence-parallel"])
def test_sharded_weights(zero: int, split: str) -> None:
    model = ("--num-layers", "4", "--hidden-dropout", "0.1")
    flags = f"{TP2} {split} --zero-stage {zero} --micro-batch-size 2 --tp-comm-overlap"
    compare(Layout(model, tuple(flags.split()), 4))


def takes_turns(case: Layout) -> bool:
    return "--tp-comm-overlap" in case.layout


@pytest.mark.full
def test_random_layouts_with_halves(fresh: int) -> None:
    rng = random.Random(f"halves {fresh}")
    for _ in range(12):
        compare(draw(rng, want=takes_turns))


class Watched:
    """A handle that notes whether this rank has multiplied matrices since the message was started. (A half cannot go on
    before its message has arrived, so what is multiplied is the other half's.)"""

    products, phase = 0, "backward"
    counts: dict[str, list[int]] = {}

    def __init__(self, handle) -> None:
        self.handle, self.began = handle, Watched.products

    def wait(self) -> None:
        if self.handle is not None:
            count = Watched.counts.setdefault(Watched.phase, [0, 0])
            count[0] += 1
            count[1] += Watched.products > self.began
            self.handle.wait()
            self.handle = None


def covered_body(world: World, argv: list[str]) -> dict[str, list[int]]:
    """Of the messages of blocks in one step, forward and backward: how many there were, and during how many this rank
    multiplied matrices between starting and awaiting them. (With experts, attention's own products count.)"""
    hold, gather, forward = LateMessage.hold, late_messages.all_gather_into, HalvedStack.forward
    grouped_products, send_rows, attend = grouped._products, plan.start_all_to_all_rows, Attention.attend

    def counting(right):
        def multiplied(*args):
            Watched.products += 1
            return right(*args)

        return multiplied

    def in_forward(*args):
        Watched.phase = "forward"
        out = forward(*args)
        Watched.phase = "backward"
        return out

    def rows_sent(*args):
        rows, handle = send_rows(*args)
        return rows, Watched(handle)

    def held(message, handle):
        hold(message, handle if isinstance(handle, Done) else Watched(handle))

    def attended(*args):
        y = counting(attend)(*args)
        y.register_hook(counting(lambda gradient: None))
        return y

    with ExitStack() as stack:
        if "--num-experts" in argv:
            stack.enter_context(patch.object(Attention, "attend", attended))
            stack.enter_context(patch.object(grouped, "_products", counting(grouped_products)))
            stack.enter_context(patch.object(plan, "start_all_to_all_rows", rows_sent))
        for name in ("forward", "input_gradient", "weight_gradient", "add_weight_gradient"):
            stack.enter_context(patch.object(Products, name, counting(getattr(Products, name))))
        stack.enter_context(patch.object(LateMessage, "hold", held))
        watched = patch.object(late_messages, "all_gather_into", lambda *args, **more: Watched(gather(*args, **more)))
        stack.enter_context(watched)
        stack.enter_context(patch.object(HalvedStack, "forward", in_forward))
        with open_run(parse(argv, world_size=world.size), world) as run:
            run.trainer.train_step(drain=True)
    return Watched.counts


@pytest.mark.parametrize(
    ("flags", "forward", "backward"),
    [
        # 3 blocks, 2 sums in a block, 2 halves: only the last of a pass has nothing beside it
        ("", [12, 11], [12, 11]),
        # with as many gathers, of which the first has nothing beside it
        ("--sequence-parallel", [24, 22], [24, 22]),
        # experts on both ranks: as many
        pytest.param(f"--sequence-parallel {EXPERTS}", [24, 22], [24, 22], marks=pytest.mark.full),
        # rows travel to experts and back
        (f"--sequence-parallel {DEALT} {EXPERTS}", [24, 22], [24, 22]),
        (f"--sequence-parallel {DEALT} {SHARED}", [36, 34], [36, 34]),
        # rows alone: 2 journeys in a block and half, of which the last has nothing beside it
        (f"--tensor-model-parallel-size 1 {DEALT} {EXPERTS} --global-batch-size 4", [12, 11], [12, 11]),
    ],
)
def test_messages_travel_while_the_other_half_computes(flags: str, forward: list[int], backward: list[int]) -> None:
    argv = [
        *TINY,
        *f"--num-layers 3 {TP2} --micro-batch-size 2 --global-batch-size 2 --tp-comm-overlap {flags}".split(),
    ]
    for counts in run_ranks(covered_body, 2, argv):
        assert counts == {"forward": forward, "backward": backward}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--micro-batch-size 2", "--tp-comm-overlap: --tensor-model-parallel-size=1 sends no messages"),
        (f"{TP2} --micro-batch-size 1", "--micro-batch-size=1 has no two halves of whole samples; use 2"),
        (
            f"{TP2} --micro-batch-size 2 --fp8 format=hybrid recipe=delayed --bf16",
            "--tp-comm-overlap: not with --fp8 recipe=delayed",
        ),
    ],
)
def test_what_has_no_halves_is_refused_in_one_line(flags: str, message: str) -> None:
    base = [flag for flag in TINY if flag != "--fp64" or "--bf16" not in flags]
    with pytest.raises(ConfigError) as refused:
        parse([*base, "--num-layers", "4", *flags.split(), "--tp-comm-overlap"], world_size=2)
    (line,) = str(refused.value).splitlines()
    assert message in line
