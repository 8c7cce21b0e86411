"""Actions and their text form; placements."""

from __future__ import annotations

import pytest
from schedule_shapes import build_shape, random_shapes

from megalite.errors import ScheduleError
from megalite.schedule import Action, lower, parse_action
from megalite.schedule.action import backward, forward, overlap
from megalite.schedule.stage_placement import bidirectional, loop, vee


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action("F", 2, 0)),
        ("2B17v3", Action("B", 2, 17, version=3)),
        ("0.1I4", Action("I", 0, 4, replica=1)),
        ("2SEND_F8>3", Action("SEND_F", 2, 8, peer=3)),
        ("3RECV_B8<4", Action("RECV_B", 3, 8, peer=4)),
        ("2STEP4", Action("STEP", 2, 4)),
        ("1RECOMPUTE4", Action("RECOMPUTE", 1, 4)),
        ("[2F4+5B1]", overlap(forward(2, 4), backward(5, 1))),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


def test_every_action_of_every_schedule_survives_the_round_trip() -> None:
    for name, shape in random_shapes(24, seed=1):
        for actions in lower(build_shape(name, shape)).unroll(2):
            assert [parse_action(str(action)) for action in actions] == list(actions), (name, shape)


@pytest.mark.parametrize(
    "text", ["F0", "2F", "2f0", "2F0>1", "2SEND_F0", "2SEND_F0<1", "2RECV_F0>1", "[2F0+]", "2 F 0"]
)
def test_wrong_text_is_refused_with_itself(text: str) -> None:
    with pytest.raises(ScheduleError, match="action"):
        parse_action(text)


def test_placements() -> None:
    assert loop(2, 2).ranks == ((0, 1, 0, 1),)
    assert loop(2, 2).stages_of(1) == ((1, 0), (3, 0))
    assert vee(3).ranks == ((0, 1, 2, 2, 1, 0),)
    assert bidirectional(4).ranks == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert bidirectional(4, 2).ranks == ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 0, 3, 2))
    assert bidirectional(4, 2).num_replicas == 4
