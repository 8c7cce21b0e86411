"""Options and markers of the whole suite."""

from __future__ import annotations

import datetime
import gc
import logging
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from cpu_seconds import dear

SEED = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the large matrices too (scripts/test.sh --full)")
    parser.addoption("--seed", type=int, help=f"what random tests draw from, in place of {SEED} (--full: of the clock)")
    parser.addoption("--landing", action="store_true", help="run more: all that .ci/run asks of a change")
    parser.addoption(
        "--turn",
        type=int,
        choices=range(4),
        help="which quarter of the cases `in_turn` runs; unless given 0, with --landing the day says which",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Random tests draw the same at every commit, so that a test fails for what was changed; a seed that has failed
    becomes a test of its own. The large matrices draw anew every time. Neither seed nor turn knows the commit.

    Under nohup a hang-up is ignored, and every process would inherit that: tests that send one wait in vain. A
    handler keeps these tests running as nohup asks, and what they start hears the signal.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if config.option.seed is None:
        config.option.seed = int(time.time()) % 1_000_000 if config.option.full else SEED
    if config.option.turn is None:  # what CI runs takes turns from day to day, so that in two days each case has run
        config.option.turn = datetime.datetime.now(datetime.UTC).toordinal() % 2 if config.option.landing else 0


def pytest_collection_finish() -> None:
    """What all tests import is some million objects, which every run in this process would look through for garbage."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    turns = f"tests in turn take --turn={config.option.turn}" if not config.option.full else "all cases run"
    return f"random tests draw from --seed {config.option.seed}; {turns}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes long: `full` unless asked for, `landing` and what is dear too, and of `in_turn` three cases
    of four.

    With --landing two cases of four run: those of --turn and of the next turn but one.
    """
    landing = config.option.landing
    turns = {config.option.turn, (config.option.turn + 2) % 4} if landing else {config.option.turn}
    cases: Counter[str] = Counter()
    left = set() if landing else set(dear())
    for item in items:
        if item.get_closest_marker("gpu") and torch.cuda.device_count() == 0:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
        if config.option.full:
            continue
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="a large matrix: runs with scripts/test.sh --full"))
        elif item.get_closest_marker("landing") and not landing:
            item.add_marker(pytest.mark.skip(reason="takes long: runs with scripts/test.sh --landing or --full"))
        elif item.get_closest_marker("in_turn"):
            test = item.nodeid.partition("[")[0]
            turn = cases[test] % 4
            cases[test] += 1
            if turn not in turns:
                item.add_marker(pytest.mark.skip(reason=f"runs with scripts/test.sh --turn={turn} or --full"))
        if item.nodeid.removeprefix("tests/") in left and not item.get_closest_marker("skip"):
            item.add_marker(pytest.mark.skip(reason="dear (tests/dear.txt): runs with scripts/test.sh --landing"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Says in the last line of all how much was left out, and what runs it."""
    yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if terminal is None else terminal.stats.get("skipped", [])
    reasons = [report.longrepr[2] for report in skipped if report.longrepr]
    ways = Counter(way for reason in reasons for way in re.findall(r"--(?:full|landing|turn=\d)", reason)[:1])
    if ways:
        counts = ", ".join(f"{count} with {way}" for way, count in sorted(ways.items()))
        terminal.write_line(f"left out of this run: {counts}")


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """What a file of tests has imported (transformers: a million objects) is set aside too: every run in this process
    and some tests collect garbage, half a second each time among that many."""
    yield
    if len(gc.get_objects()) > 200_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_handler_survives() -> Iterator[None]:
    """A handler that the entry script sets up in a test writes to captured output, which is closed after the test."""
    yield
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the large matrices were asked for: tests that sample draw more then."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def landing(request: pytest.FixtureRequest) -> bool:
    """Whether more was asked for than by default: tests that sample draw more then."""
    return bool(request.config.getoption("--landing") or request.config.getoption("--full"))


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> int:
    """The seed of random tests."""
    return int(request.config.getoption("--seed"))
