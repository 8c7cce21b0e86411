"""Sequences of different lengths side by side, and how much of its text each of them sees.

    group of 3      . . T h e            padding in front, so that all of them end in the same column and the next
                    . a   c a            tokens are one column; nobody attends to padding
                    O n c e   u

A sequence sees its text from `start` on. When that would be more than the model's positions, it continues from the
newer half of them: a new prompt for its whole group. Neither depends on what is beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megalite.generation.sampling import NO_NUMBER


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    number: of the prompt, keys the draws. ids: at least one. sample: added to the seed (further continuations).
    """

    number: int
    ids: tuple[int, ...]
    sample: int = 0


@dataclass
class Row:
    """A sequence that is being continued. limit: of what it sees; budget: new tokens at most."""

    request: Request
    limit: int
    budget: int
    text: list[int] = field(init=False)
    start: int = field(init=False)
    ended: bool = False
    broken: bool = False

    def __post_init__(self) -> None:
        self.text = list(self.request.ids)
        self.start = max(0, len(self.text) - self.limit)

    @property
    def new(self) -> list[int]:
        """The ids that follow the prompt."""
        return self.text[len(self.request.ids) :]

    @property
    def seen(self) -> int:
        """Tokens from `start` on."""
        return len(self.text) - self.start

    @property
    def remaining(self) -> int:
        """New tokens that may still come."""
        return 0 if self.ended else self.budget - len(self.new)

    def add(self, token: int, stops: Collection[int]) -> None:
        """Takes a token; one of `stops` ends the sequence and is not part of it."""
        if self.remaining:
            self.broken = token == NO_NUMBER
            self.ended = self.broken or token in stops
            if not self.ended:
                self.text.append(token)

    def slide(self) -> bool:
        """Makes room for the newest token, if there is none; whether there was none."""
        if self.seen <= self.limit or not self.remaining:
            return False
        self.start = len(self.text) - max(1, self.limit // 2)
        return True


@dataclass
class Group:
    """Rows that go through the stages together.

    columns: of their caches that are filled. pads: columns of padding in front of each row.
    """

    rows: list[Row]
    columns: int = 0
    pads: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens that the row with the most to come may still get."""
        return max((row.remaining for row in self.rows), default=0)

    @property
    def room(self) -> int:
        """Tokens that can be added before a row must slide."""
        return min((row.limit - row.seen + 1 for row in self.rows if row.remaining), default=1)

    def pending(self, unit: int, longest: int) -> list[list[int]]:
        """The tokens that are not in the caches, `[rows][n]` with padding in front if there is nothing in them yet.

        unit: n of a prompt is a multiple of it. longest: what the row with the most sees, in any group.
        """
        if self.columns:
            return [row.text[-1:] for row in self.rows]
        texts = [row.text[row.start :] for row in self.rows]
        length = -(-longest // unit) * unit
        self.pads = [length - len(text) for text in texts]
        return [[0] * pad + text for pad, text in zip(self.pads, texts, strict=True)]

    def take(self, tokens: Sequence[Sequence[int]], stops: Collection[int]) -> None:
        """Adds what rounds have chosen, `[rounds][rows]`."""
        for chosen in tokens:
            for row, token in zip(self.rows, chosen, strict=True):
                row.add(token, stops)


def group_size(num_requests: int, largest: int, num_stages: int) -> int:
    """Sequences of a group: at most `largest`, and few enough that there is a group for each stage."""
    return max(1, min(largest, -(-num_requests // num_stages)))
