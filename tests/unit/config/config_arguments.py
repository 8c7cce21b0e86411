"""A smallest legal command line, for tests that change one thing of it."""

from __future__ import annotations

import pytest

from megalite.config import parse
from megalite.errors import ConfigError

BASE: dict[str, str] = {
    "num-layers": "8",
    "hidden-size": "96",
    "num-attention-heads": "8",
    "seq-length": "64",
    "micro-batch-size": "1",
    "lr": "1e-3",
    "train-iters": "100",
    "vocab-size": "100",
}


def argv(changes: str = "", without: str = "") -> list[str]:
    """The base flags and `--mock-data`, with flags replaced or added by `changes` and those named in `without` gone."""
    flags = changes.split()
    given = {flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")}
    base = {name: value for name, value in BASE.items() if name not in given and name not in without.split()}
    mock = [] if "mock-data" in without.split() else ["--mock-data"]
    return [*mock, *(token for name, value in base.items() for token in (f"--{name}", value)), *flags]


def problems_of(arguments: list[str], world_size: int | None = None) -> list[str]:
    """The lines that the parser refuses the arguments with."""
    with pytest.raises(ConfigError) as caught:
        parse(arguments, world_size=world_size)
    assert caught.value.exit_code == 2
    return caught.value.problems
