"""The ranks that compute a micro-batch together run the same action, whatever has arrived first at each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megalite.parallel.pipeline import message_driven
from megalite.parallel.pipeline.message_driven import MessageDriven
from megalite.schedule import BACKWARD, FORWARD


class Late:
    """Messages that have arrived; each `wait` brings the next."""

    def __init__(self, *order: str) -> None:
        self.coming, self.arrived = [*order], set[str]()

    def here(self, name: str) -> bool:
        return name in self.arrived

    def wait(self) -> None:
        self.arrived.add(self.coming.pop(0))


@pytest.mark.parametrize("said", [0, 1])
def test_a_peer_runs_what_the_first_has_chosen(said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = object.__new__(MessageDriven)
    rank._limit, rank._share = 4, 4  # a forward goes first where both are there
    rank._together = SimpleNamespace(is_first=False)
    rank._stage = SimpleNamespace(is_first=False, is_last=False)
    monkeypatch.setattr(message_driven, "agree_max", lambda mine, axis: said)
    chosen = (FORWARD, BACKWARD)[said]
    other = (BACKWARD, FORWARD)[said]
    arrivals: Any = Late(other, chosen)
    arrivals.wait()
    assert rank._choose(arrivals, begun=1, ended=0, total=4) == chosen
    assert arrivals.here(chosen), "it waits for the input of that one"
