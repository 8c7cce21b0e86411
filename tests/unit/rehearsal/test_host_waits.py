"""Where the host may wait is written in one place: the docs, the rehearsal and the tests read it there."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from equivalence.layouts import TINY

from megalite import host_waits
from megalite.host_waits import HOST_WAITS, HostWait, allowed_wait
from megalite.rehearsal import rehearse, rehearsed

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"
SMALL = [*TINY, "--num-layers", "1", "--micro-batch-size", "2", "--global-batch-size", "4"]
RANKS = {"rows of each expert": 2, "the gradients": 2}


def run(row: HostWait) -> list[str]:
    return [word for word in SMALL if word != "--fp64" or "--bf16" not in row.flags] + row.flags.split()


def test_the_page_has_these_rows() -> None:
    section = PAGE.read_text().split("## When the host waits")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert table == [f"| {row.reads} | {row.why} |" for row in HOST_WAITS]


@pytest.mark.parametrize("row", [row for row in HOST_WAITS if row.flags], ids=lambda row: row.flags.replace(" ", "_"))
def test_each_row_is_a_wait_of_its_run(row: HostWait) -> None:
    """Nothing stays allowed that no longer waits."""
    ranks = next((number for what, number in RANKS.items() if row.reads.startswith(what)), 1)
    found = rehearse(rehearsed(run(row), ranks), [0])
    waits = {text for kind, _, _, _, text in found.records[0].log if kind == "sync"}
    assert any(allowed_wait(text) is row for text in waits)
    assert [str(fault) for fault in found.faults if fault.check == "sync"] == []


def test_what_has_no_row_is_a_fault() -> None:
    row = next(row for row in HOST_WAITS if "_varlen" in row.places)
    with patch.object(host_waits, "HOST_WAITS", tuple(other for other in HOST_WAITS if other is not row)):
        faults = [str(fault) for fault in rehearse(rehearsed(run(row), 1)).faults]
    assert len(faults) == 3 and all("the host waits for the device" in each and "_varlen" in each for each in faults)
