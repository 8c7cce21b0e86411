"""What a rollback needs: one line each, which names the flag and the fix."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import parse

ROWS = [
    (
        "--spikes action=rollback",
        "--spikes action=rollback: goes back to a checkpoint of this run; add --save and --save-interval",
    ),
    (
        "--spikes action=rollback --save runs/a",
        "--spikes action=rollback: goes back to a checkpoint of this run; add --save and --save-interval",
    ),
    (
        "--spikes action=rollback,back=30,pass_over=20 --save runs/a --save-interval 5",
        "--spikes pass_over=20: below --spikes back=30, so that the spike itself would come again; use 30 or more",
    ),
    (
        "--spikes action=rollback,back=12 --save runs/a --save-interval 5 --keep-last-n 3",
        "--keep-last-n=3: --spikes action=rollback goes back 12 iterations, and with --save-interval=5 the oldest "
        "checkpoint that is kept may be newer; keep 4, or go back less",
    ),
]


@pytest.mark.parametrize(("flags", "line"), ROWS, ids=[row[0] for row in ROWS])
def test_one_line_says_what_a_rollback_lacks(flags: str, line: str) -> None:
    assert problems_of(argv(flags), 1) == [line]


def test_enough_checkpoints_are_kept() -> None:
    flags = "--spikes action=rollback,back=12 --save runs/a --save-interval 5 --keep-last-n 4"
    assert parse(argv(flags)).checkpoint.keep_last_n == 4


def test_megatrons_check_is_ours_that_logs() -> None:
    assert parse(argv("--check-for-spiky-loss")).training.spikes.on_spike == "log"
