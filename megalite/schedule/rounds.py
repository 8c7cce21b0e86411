"""What a program of forwards alone says of itself."""

from __future__ import annotations

from typing import NamedTuple


class Rounds(NamedTuple):
    """A program of forwards alone (`decode.py`): in round t stage s stands as stage t * S + s. The first `groups`
    micro-batches go through all rounds, the others through the first."""

    number: int
    groups: int
