"""What a launch ends with where several things end it."""

from __future__ import annotations

import signal

import pytest

from megalite.launch.rank_page import RankError
from megalite.launch.supervisor import Outcome, RankEnd, find_culprit


@pytest.mark.parametrize("communication", [True, False])
def test_a_second_ctrl_c_is_the_end_whatever_a_rank_said_meanwhile(communication: bool) -> None:
    """Of two ranks that it kills one may see the other go first."""
    said = RankError("ConnectionError", "closed", "", 1, False, communication, 2.0)
    ends = (
        RankEnd(0, -signal.SIGKILL, "iteration 5", 0.0, None, False, True, 1.0),
        RankEnd(1, 1, "iteration 5", 0.0, said, False, False, 2.0),
    )
    outcome = Outcome(ends, find_culprit(ends), False, 3.0, frozenset({signal.SIGINT}), at_once=True)
    assert outcome.exit_code == 130
    assert Outcome(ends, find_culprit(ends), False, 3.0).exit_code == 1
