"""What each test costs: CPU seconds, those of its processes included. What is dear is left out of a plain run.

    PYTHONPATH=tests python -m pytest -p cpu_seconds                (Linux; writes `dear.txt` anew for all that ran)

A test that takes more than `BAR` is in that list, but for those that README's promises and the table of planted faults
in docs/proving.md name, with or without a case: a plain run turns red for a fault in any room.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

BAR = 1.5
LIST = Path(__file__).with_name("dear.txt")
ROOT = LIST.parents[1]


def dear() -> dict[str, float]:
    """CPU seconds of each case that is left out, by its name below tests/."""
    rows = (line.split(" ", 1) for line in LIST.read_text().splitlines())
    return {name: float(seconds) for seconds, name in rows}


def always_run() -> set[str]:
    """The tests that two tables name: `unit/data/test_mix.py::test_a_mix`, or one case: `test_a_mix[two]`."""
    promised = (ROOT / "README.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    planted = (ROOT / "docs" / "proving.md").read_text().partition("## Faults that turn it red")[2]
    found, path = set(), ""
    for file, name in re.findall(r"`([\w/.]*)::(\w+(?:\[[^`]*\])?)`", promised + planted):
        path = file or path
        found.add(f"{path}::{name}")
    return found


def used() -> float:
    """CPU seconds of this process and of all below it, and of those that they have waited for."""
    parents, ticks = {}, {}
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", each, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(each)], ticks[int(each)] = int(fields[1]), sum(map(int, fields[11:15]))
    below = {os.getpid()}
    for process in sorted(parents):
        line = [process]
        while line[-1] in parents and line[-1] not in below:
            line.append(parents[line[-1]])
        if line[-1] in below:
            below.update(line)
    return sum(ticks.get(process, 0) for process in below) / os.sysconf("SC_CLK_TCK")


costs = pytest.StashKey[dict[str, float]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = used()
    yield
    if not item.get_closest_marker("skip"):  # else it costs what collecting garbage costs, if anything
        name = item.nodeid.removeprefix("tests/")
        item.config.stash.setdefault(costs, {})[name] = used() - before


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What was left out keeps its row."""
    kept = always_run()
    rows = dear() | session.config.stash.get(costs, {})
    lines = [f"{v:.1f} {k}" for k, v in sorted(rows.items()) if v > BAR and not {k, k.partition("[")[0]} & kept]
    LIST.write_text("".join(line + "\n" for line in lines))
