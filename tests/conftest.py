"""Options and markers of the whole suite."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the large matrices too (scripts/test.sh --full)")


def pytest_configure() -> None:
    """Under nohup a hang-up is ignored, and every process would inherit that: tests that send one wait in vain. A
    handler keeps these tests running as nohup asks, and what they start hears the signal.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    large = pytest.mark.skip(reason="a large matrix: runs with scripts/test.sh --full")
    no_gpu = pytest.mark.skip(reason="torch sees no GPU")
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(large)
        if item.get_closest_marker("gpu") and torch.cuda.device_count() == 0:
            item.add_marker(no_gpu)


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
