"""Context parallelism equals one process: every kind of exchange, family, mask and axis beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY, Layout, compare, train_body
from megalite.comm.world import World
from megalite.nn.attention.flash import FlashKernel
from megalite.nn.attention.tiles import TileKernel
from megalite.parallel.context import SequenceCut, ring
from megalite.testing import run_ranks
from megalite.testing.oracle import reference
from megalite.train.batch_reader import BatchReader

KINDS = {
    "ring": ("--cp-comm-type", "p2p"),
    "all-gather": ("--cp-comm-type", "all_gather"),
    "all-to-all": ("--cp-comm-type", "a2a"),
    "two levels": ("--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "2"),
}
FAMILIES = {
    "gpt": ("--num-layers", "2"),
    "llama GQA": ("--num-layers", "2", "--model-type", "llama", "--num-query-groups", "2", "--qk-layernorm"),
}
WINDOWS = ("--window-size", "5", "--skip-freq", "window=2")
SINKS = ("--softmax-type", "learnable", "--skip-freq", "softmax_type=0,1")
SINKS += ("--attn-logit-softcapping", "0.5", "--skip-freq", "softcapping=2")
MASKS = {
    "one document": (),
    "documents": ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--calculate-per-token-loss"),
    "window": ("--window-size", "5"),
    "layers that differ": (*WINDOWS, "--skip-freq", "rope=[1,0]"),
    "sinks and caps that differ": (*WINDOWS, *SINKS),
    "sinks": ("--softmax-type", "learnable", "--attn-logit-softcapping", "0.5", "--window-size", "6"),
    "sinks alone": ("--softmax-type", "learnable"),  # which a kernel's log-sums are joined with
    "dropout": ("--attention-dropout", "0.2", "--hidden-dropout", "0.1"),
    "documents, window, dropout": ("--reset-attention-mask", "--window-size", "6", "--attention-dropout", "0.2"),
}
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
BESIDE = {
    "alone": ((), 1),
    "dp2 zero1": (("--zero-stage", "1"), 2),
    "dp2 zero3": (("--zero-stage", "3"), 2),
    "tp2": (TP2, 2),
    "tp2 sequence parallel": ((*TP2, "--sequence-parallel"), 2),
    "tp2 pp2 zero1": ((*TP2, *PP2, "--zero-stage", "1"), 4),
    "pp2 2bw": ((*PP2, "--pipeline-schedule", "2bw"), 2),
    "pp2 zero bubble": ((*PP2, "--pipeline-schedule", "zb-h1"), 2),
    "pp2 zero2 recomputed": ((*PP2, "--zero-stage", "2", "--recompute-granularity", "full"), 2),
}


def check(kind: str, family: str, mask: str, beside: str) -> None:
    size = 4 if kind == "two levels" else 2
    flags, others = BESIDE[beside]
    layout = ("--micro-batch-size", "2", "--context-parallel-size", str(size), *KINDS[kind], *flags)
    compare(Layout((*FAMILIES[family], *MASKS[mask]), layout, size * others, delay=int("2bw" in flags)))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("kind", "family", "mask", "beside"),
    [
        ("ring", "gpt", "one document", "alone"),
        ("ring", "llama GQA", "documents, window, dropout", "tp2 sequence parallel"),
        ("ring", "gpt", "documents", "pp2 2bw"),
        ("all-gather", "llama GQA", "documents", "dp2 zero1"),
        ("all-gather", "gpt", "dropout", "pp2 zero bubble"),
        ("all-to-all", "llama GQA", "window", "dp2 zero3"),
        ("all-to-all", "gpt", "documents, window, dropout", "pp2 zero2 recomputed"),
        ("two levels", "gpt", "documents, window, dropout", "alone"),
        ("ring", "llama GQA", "layers that differ", "pp2 2bw"),
        ("all-to-all", "llama GQA", "layers that differ", "alone"),
        ("ring", "llama GQA", "sinks and caps that differ", "tp2 pp2 zero1"),
        ("all-gather", "gpt", "sinks", "alone"),
        ("all-to-all", "gpt", "sinks", "pp2 zero bubble"),
        ("two levels", "gpt", "sinks", "alone"),
        ("ring", "llama GQA", "sinks alone", "alone"),
        ("all-gather", "gpt", "sinks alone", "tp2"),
    ],
)
def test_a_cut_sequence_is_a_whole_one(kind: str, family: str, mask: str, beside: str) -> None:
    check(kind, family, mask, beside)


@pytest.mark.full
def test_every_kind_beside_every_axis() -> None:
    rng = random.Random(0)
    for kind, family, mask, beside in itertools.product(KINDS, FAMILIES, MASKS, BESIDE):
        trades = kind in ("all-to-all", "two levels")
        if mask == "layers that differ" and family == "gpt":
            continue
        if not (trades and family == "llama GQA" and "tp2" in beside) and rng.random() < 0.5:
            check(kind, family, mask, beside)


@pytest.mark.landing
@pytest.mark.parametrize("kind", ["ring", "all-gather", "all-to-all"])
def test_four_ranks_a_sequence(kind: str) -> None:
    model = (*FAMILIES["llama GQA"], *MASKS["layers that differ"], "--softmax-type", "learnable")
    model = (*FAMILIES["gpt"], *MASKS["sinks"]) if kind == "all-to-all" else model
    compare(Layout(model, ("--micro-batch-size", "1", "--context-parallel-size", "4", *KINDS[kind]), 4))


# ---- ways to be quietly wrong ----------------------------------------------------------------------------------------


def stale_keys_in_backward():
    """Saved tensors of step 0 used again: what is here never moves on in backward."""
    right = ring._RingAttention.backward

    def backward(ctx, dy):
        with patch.object(ring, "start_shift", stays):
            return right(ctx, dy)

    def stays(x, axis, gradient=False):
        return shift(x, axis, gradient=True) if gradient else Stays(x)

    shift = ring.start_shift
    return patch.object(ring._RingAttention, "backward", staticmethod(backward))


class Stays:
    def __init__(self, x):
        self.x = x

    def wait(self):
        return self.x


def lse_of_the_part():
    """Of a part of the keys, where backward wants that of all of them."""
    right = {kind: kind.backward for kind in (TileKernel, FlashKernel)}

    def backward(self, grads, dy, delta, lse, operands, sight):
        out, part = ring.empty_result(operands[0])
        self.forward(out, part, operands, sight)
        seen = part.isfinite()
        right[type(self)](self, grads, dy, delta, part.where(seen, lse), operands, sight)

    return patch.multiple(TileKernel, backward=backward), patch.multiple(FlashKernel, backward=backward)


def mean_over_ranks_of_means():
    right = BatchReader._tokens

    def tokens(self, batches):
        return 2 * right(self, [self._cut(batch) for batch in batches])

    return patch.object(BatchReader, "_tokens", tokens)


def positions_of_the_contiguous_split():
    right = SequenceCut.__call__

    def cut(self, batch):
        done = right(self, batch)
        return replace(done, positions=batch.positions.chunk(self.size, 1)[self.rank])

    return patch.object(SequenceCut, "__call__", cut)


def dropout_by_local_places():
    right = SequenceCut.__call__
    return patch.object(
        SequenceCut, "__call__", lambda self, b: replace(right(self, b), places=torch.arange(b.shape[1] // self.size))
    )


MODEL = ("--num-layers", "2", "--eod-mask-loss", "--hidden-dropout", "0.1", "--clip-grad", "0.5")
MUTATIONS = [
    stale_keys_in_backward,
    lse_of_the_part,
    mean_over_ranks_of_means,
    positions_of_the_contiguous_split,
    dropout_by_local_places,
]


def losses_body(world: World, argv: list[str], name: str) -> list[float]:
    (mutation,) = [m for m in MUTATIONS if m.__name__ == name]
    made = mutation()
    with ExitStack() as stack:
        for each in made if isinstance(made, tuple) else (made,):
            stack.enter_context(each)
        return train_body(world, argv, 3)[0]


@pytest.mark.landing
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_mutation_is_seen(mutation: Callable) -> None:
    argv = [*TINY, *MODEL, "--micro-batch-size", "1"]
    expected = reference(tuple(argv), 3).losses
    losses = run_ranks(losses_body, 2, [*argv, "--context-parallel-size", "2"], mutation.__name__)[0]
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 1e-9, f"{mutation.__name__} went unseen"
