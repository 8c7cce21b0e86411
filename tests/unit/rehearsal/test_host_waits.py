"""Where the host may wait is written in one place: the docs, the rehearsal and the tests read it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from equivalence.layouts import TINY

from megalite import host_waits
from megalite.host_waits import HOST_WAITS, allowed_wait
from megalite.rehearsal import rehearse_run, rehearsed
from megalite.rehearsal.values import Shapes

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"
SMALL = [*TINY, "--num-layers", "1", "--micro-batch-size", "2", "--global-batch-size", "4"]
RUNS = {
    "late": (1, ""),
    "experts": (2, "--num-experts 4 --expert-model-parallel-size 2"),
    "tiles": (1, "--reset-attention-mask --attention-dropout 0.1"),
    "offload": (2, "--offload params --zero-stage 3"),
    "embedding": (2, "--offload embedding --untie-embeddings-and-output-weights"),
    "eigenvectors": (1, "--optimizer soap"),
}
LONG = {"offload", "embedding", "eigenvectors"}
NOT_REHEARSED = {"apex", "headers"}
"""A rehearsal has no such package, and no message has values to compare."""


def test_the_page_has_these_rows() -> None:
    section = PAGE.read_text().split("## When the host waits")[1].split("\n## ")[0]
    table = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert [row[0].removeprefix("| ") for row in table] == list(HOST_WAITS) and {len(row) for row in table} == {3}
    assert set(HOST_WAITS) == {*RUNS, *NOT_REHEARSED}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.landing if n in LONG else ()) for n in RUNS])
def test_each_row_is_a_wait_of_its_run(name: str) -> None:
    """Nothing stays allowed that no longer waits."""
    ranks, flags = RUNS[name]
    found = rehearse_run(rehearsed([*SMALL, *flags.split()], ranks), [0])
    waits = {text for kind, _, _, _, text in found.records[0].log if kind == "sync"}
    assert any(allowed_wait(text) == name for text in waits)
    assert [str(fault) for fault in found.faults if fault.check == "sync"] == []


def test_what_has_no_row_is_a_fault() -> None:
    others = {name: places for name, places in HOST_WAITS.items() if name != "experts"}
    with patch.object(host_waits, "HOST_WAITS", others):
        report = rehearse_run(rehearsed([*SMALL, *RUNS["experts"][1].split()], 2), [0])
    faults = [str(fault) for fault in report.faults]
    assert faults and all("the host waits for the device" in each and "expert/" in each for each in faults)


@pytest.mark.parametrize("more", ["", "--window-size 3,0"])
def test_tiles_of_whole_sequences_need_nothing_of_the_device(more: str) -> None:
    report = rehearse_run(rehearsed([*SMALL, "--attention-dropout", "0.1", *more.split()], 1, steps=1))
    assert not any("tiles.py" in text for kind, _, _, _, text in report.records[0].log if kind == "sync")


@pytest.mark.parametrize("more", ["", "--tensor-model-parallel-size 2 --tp-comm-overlap"])
def test_the_host_knows_where_documents_begin(more: str) -> None:
    """The kernel takes one bound for each document, in host memory; of halves, too."""
    flags = f"--reset-attention-mask --no-fp64 --bf16 {more}".split()
    report = rehearse_run(rehearsed([*SMALL, *flags], 2 if more else 1), [0])
    assert not any("masked.py" in text for kind, _, _, _, text in report.records[0].log if kind == "sync")


def test_the_host_copies_indices_of_any_size() -> None:
    """What says where documents begin is page-locked by a copy, and kernels' shapes are made of it."""
    shapes, indices = Shapes(cast(Any, None)), torch.arange(1 << 18)
    for values, copied in ((indices, True), (indices.float(), False)):
        into = torch.zeros_like(values)
        shapes(torch.ops.aten.copy_.default, "copy_", [into, values], {}, there=False)
        assert torch.equal(into, values) is copied
