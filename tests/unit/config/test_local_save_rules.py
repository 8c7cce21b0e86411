"""Saves on the hosts themselves: what is refused before a rank starts, and what is warned of."""

from __future__ import annotations

import pytest
from config_arguments import argv

from megalite.config import parse
from megalite.config.cli import parse_with_origins
from megalite.errors import ConfigError

ON_HOSTS = "--save x --non-persistent-save-interval 5 --non-persistent-ckpt-type"


@pytest.mark.parametrize(
    ("flags", "world_size", "line"),
    [
        (
            f"{ON_HOSTS} local",
            1,
            "--non-persistent-ckpt-type=local: needs --non-persistent-local-ckpt-dir DIR, a folder of each host",
        ),
        (
            "--save x --non-persistent-save-interval 5",
            1,
            "--non-persistent-save-interval=5: needs --non-persistent-ckpt-type",
        ),
        (
            f"{ON_HOSTS} in_memory --replication --nprocs 2",
            None,
            "--replication: the 2 ranks of --nprocs are on one host, which keeps their files anyway; drop it",
        ),
        (
            f"{ON_HOSTS} in_memory --replication --replication-factor 3",
            2,
            "--replication-factor=3: there are 2 ranks, and each copy is on another host; give at most 2, or drop "
            "--replication",
        ),
        (
            f"{ON_HOSTS} in_memory --replication --replication-jump 4",
            4,
            "--replication-jump=4: of 4 ranks, 4 further on is the same one again before 2 hosts have the file; give "
            "the number of ranks of a host",
        ),
    ],
)
def test_what_is_refused(flags: str, world_size: int | None, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv(flags), world_size=world_size)
    assert caught.value.problems == [line]


def test_copies_that_nobody_keeps_are_warned_of() -> None:
    (line,) = parse_with_origins(argv(f"{ON_HOSTS} in_memory --replication-jump 2"), world_size=4).warnings
    assert line.startswith("--replication-jump=2: has no effect without --replication")
