"""FlashAttention 3 is used where it is installed and right; sinks over a ring need no tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.comm import Axis
from megalite.config import parse
from megalite.nn.attention import context, trials
from megalite.nn.attention.core import AttentionCore
from megalite.nn.attention.flash import FlashKernel
from megalite.nn.attention.tiles import TileKernel, sinks_by_query
from megalite.parallel.context import ring_attention
from megalite.train.announcement import device_advice
from megalite.visibility import Shared, Visibility


class Library:
    """What torch has for other packages' kernels."""

    def __init__(self, names: tuple[str, ...] = ("FA3", "FA4"), breaks: bool = False) -> None:
        self.names, self.breaks, self.active = names, breaks, ""

    def list_flash_attention_impls(self) -> tuple[str, ...]:
        return self.names

    def activate_flash_attention_impl(self, name: str) -> None:
        if self.breaks:
            raise RuntimeError("undefined symbol")
        self.active = name

    def restore_flash_attention_impl(self) -> None:
        self.active = ""


@pytest.mark.parametrize(
    ("library", "installed", "capability", "right", "words"),
    [
        (Library(), True, 9, True, "attention by FlashAttention 3"),
        (Library(), True, 9, False, "whose results differ"),
        (Library(breaks=True), True, 9, True, "undefined symbol"),
        (Library(), False, 9, True, ""),
        (Library(), True, 8, True, ""),
        (Library(("FA4",)), True, 9, True, ""),
    ],
)
def test_the_newer_kernel_is_used_where_it_is_right(
    library: Library, installed: bool, capability: int, right: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        patch.object(torch.nn, "attention", library),
        patch.object(trials, "find_spec", lambda name: name if installed else None),
        patch.object(torch.cuda, "get_device_capability", lambda device: (capability, 0)),
        patch.object(trials, "flash_works", type("Tried", (), {
            "__call__": lambda self, *place: right and library.active == "FA3", "cache_clear": lambda self: None})()),
        caplog.at_level("INFO"),
    ):  # fmt: skip
        used = trials.use_newer_kernel(torch.device("cuda"), torch.bfloat16)
    assert used == (words.startswith("attention by")) == (library.active == "FA3")
    assert (words in caplog.text) if words else not caplog.text


def test_a_start_says_what_dropout_of_attention_costs() -> None:
    flags = "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 4096 --micro-batch-size 1 --lr 1e-3"
    given = f"{flags} --train-iters 1 --mock-data --vocab-size 64"
    (line,) = device_advice(parse([*given.split(), "--attention-dropout", "0.1"]), torch.device("cuda"))
    assert "`attention_dropout`=0.1" in line and "twice" in line
    (line,) = device_advice(parse([*given.split(), "--attention-dropout", "0.1", "--fp64"]), torch.device("cuda"))
    assert "up to 64 tiles" in line
    assert device_advice(parse(given.split()), torch.device("cuda")) == []


@pytest.mark.parametrize("groups", [2, 4])
def test_sinks_of_a_ring_are_those_of_tiles(groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    s, b, r, d = 64, 2, 4 // groups, 16
    shapes = ((s, b, groups, r, d), (s, b, groups, d), (s, b, groups, d), (s, b, groups * r * d))
    q, k, v, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    sinks = torch.linspace(-1, 3, groups * r, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    at = torch.arange(s)
    sight = Visibility.of(at, at, window=None, document_starts=None)
    found = []
    for kernel in (TileKernel(groups), FlashKernel(groups)):
        y = ring_attention(q, k, v, lambda rank: sight, Axis.single("cp"), kernel, sinks_by_query(sinks, q))
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    for tiles, flash in zip(*found, strict=True):
        torch.testing.assert_close(flash, tiles, rtol=1e-10, atol=1e-12)
    microbatch: Any = SimpleNamespace(order=at, document_starts=None, documents=None, sample_ids=None, shared=Shared())
    with patch.object(context, "FlashKernel", side_effect=FlashKernel) as chosen:
        y = context._over_ring(AttentionCore(), q, k, v, microbatch, sinks, True)
        assert chosen.called and torch.equal(y, found[1][0])
        context._over_ring(AttentionCore(softcap=2.0), q, k, v, microbatch, sinks, True)
        assert chosen.call_count == 1  # a cap is for tiles
