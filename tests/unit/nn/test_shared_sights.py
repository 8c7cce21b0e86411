"""Who sees whom is worked out once for all layers of a micro-batch that see the same, forward and in recomputation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from equivalence.layouts import TINY

from megalite.microbatch import Microbatch
from megalite.rehearsal import rank, rehearse_run, rehearsed
from megalite.visibility import Visibility

FLAGS = (
    "--no-fp64 --bf16 --micro-batch-size 1 --global-batch-size 2 --seq-length 512 --reset-attention-mask "
    "--window-size 300,0 --window-attn-skip-freq 2 --attn-logit-softcapping 30 --hidden-size 64 --num-layers 4"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
KINDS = 2
"""Layers with a window, and without."""


def made(flags: str, ranks: int) -> Counter[str]:
    """How often one is said, and a kernel's blocks are made of one, in a step of a rank."""
    found, of, blocks = Counter[str](), Visibility.of.__func__, rank.compiled_blocks  # type: ignore[attr-defined]

    def saying(cls: Any, *args: Any, **named: Any) -> Any:
        found["said"] += 1
        return of(cls, *args, **named)

    def making(*args: Any) -> Any:
        found["blocks"] += 1
        return blocks(*args)

    run = rehearsed([*TINY, *f"{FLAGS} {flags}".split()], ranks, steps=1)
    with patch.object(Visibility, "of", classmethod(saying)), patch.object(rank, "compiled_blocks", making):
        report = rehearse_run(run, [0])
    assert [str(fault) for fault in report.faults] == [] and report.records[0].problem is None
    found["batches"] = run.full.num_microbatches(ranks)
    return found


@pytest.mark.parametrize("recomputed", ["", RECOMPUTED], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("layout", "ranks", "said", "blocks"), [
    ("", 1, 1, 1),
    ("--context-parallel-size 2", 2, 2, 4),  # of each rank's keys; backward begins and ends with half of its own
    ("--context-parallel-size 2 --cp-comm-type all_gather", 2, 1, 1),
])  # fmt: skip
def test_a_micro_batch_says_it_once_for_layers_of_a_kind(
    layout: str, ranks: int, said: int, blocks: int, recomputed: str
) -> None:
    found = made(f"{layout} {recomputed}", ranks)
    batches = found.pop("batches")
    assert found == {"said": KINDS * said * batches, "blocks": KINDS * blocks * batches}


def test_a_changed_micro_batch_shares_nothing_with_the_first() -> None:
    at = torch.arange(8)[None]
    one = Microbatch(at, at, at, torch.ones(1, 8), at[:, 0])
    assert one.shared.once("x", lambda: 1) == one.shared.once("x", lambda: 2) == 1
    for other in (replace(one, tokens=at + 1), one.to("cpu"), one.in_pieces(2)):
        assert other.shared.once("x", lambda: 3) == 3


def test_a_part_of_the_queries_is_made_once_and_all_of_them_are_the_whole() -> None:
    at = torch.arange(8)
    sight = Visibility.of(at, at, window=3, document_starts=None)
    assert sight.of_queries(slice(0, 8)) is sight
    part = sight.of_queries(slice(2, 5))
    assert part is sight.of_queries(slice(2, 5)) and part is not sight.of_queries(slice(2, 6))
    assert torch.equal(part.dense(), sight.dense()[2:5])
