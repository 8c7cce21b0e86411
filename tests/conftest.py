"""Options and markers of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the large matrices too (scripts/test.sh --full)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="a large matrix: runs with scripts/test.sh --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the large matrices were asked for: tests that sample draw more then."""
    return bool(request.config.getoption("--full"))
