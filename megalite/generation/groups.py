"""Sequences of different lengths side by side, and how much of its text each of them sees.

    group of 3      . . T h e            padding in front, so that all of them end in the same column and the next
                    . a   c a            tokens are one column; nobody attends to padding
                    O n c e   u

A sequence sees its text from `start` on. When that would be more than the model's positions, it continues from the
newer half of them: a new prompt for its whole group. Neither depends on what is beside it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.generation.sampling import NO_NUMBER
from megalite.nn import LayerCache


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    number: int  # of the prompt, keys the draws
    ids: tuple[int, ...]  # at least one
    sample: int = 0  # added to the seed (further continuations)


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
class Slot:
    """Groups of rows that take their steps together: one, or one of each replica."""

    groups: list[list[Row]]
    place: int  # of this rank's group
    columns: int = 0  # of all their caches that are filled
    pads: list[int] = field(default_factory=list)  # columns of padding in front of each row of this rank's group
    caches: dict[int, list[LayerCache]] = field(default_factory=dict)  # of that group, by stage

    @property
    def mine(self) -> list[Row]:
        """The rows of this rank's group."""
        return self.groups[self.place]

    @property
    def rows(self) -> list[Row]:
        """Those of all groups."""
        return [row for group in self.groups for row in group]

    @property
    def remaining(self) -> int:
        """Tokens that the row with the most to come may still get."""
        return max(row.remaining for row in self.rows)

    @property
    def room(self) -> int:
        """Tokens that can be added before a row must slide; 1 where a group has come to its end."""
        rooms = [[row.limit - row.seen + 1 for row in group if row.remaining] for group in self.groups]
        return min(min(room, default=1) for room in rooms)

    def pending(self, unit: int) -> Tensor:
        """This rank's tokens that are not in the caches, int64 `[b, n]`; n is the same for all groups, and of a prompt,
        which has padding in front, a multiple of `unit`. The caches are void where a row must continue from the newer
        half of what it sees."""
        if any([row.slide() for row in self.rows]):
            self.columns = 0
        if self.columns:
            return torch.tensor([row.text[-1:] for row in self.mine])
        self.caches = {}
        length = -(-max(row.seen for row in self.rows) // unit) * unit
        self.pads = [length - row.seen for row in self.mine]
        return torch.tensor([[0] * pad + row.text[row.start :] for pad, row in zip(self.pads, self.mine, strict=True)])

    def take(self, tokens: Sequence[Sequence[Sequence[int]]], stops: Collection[int]) -> None:
        """Adds what rounds have chosen, `[groups][rounds][rows]`, of the widest group."""
        for group, rounds in zip(self.groups, tokens, strict=True):
            for chosen in rounds:
                for row, token in zip(group, chosen, strict=False):
                    row.add(token, stops)


def nothing() -> Row:
    """Takes a place where a replica has no request, and the others have."""
    return Row(Request(0, (0,)), 1, 0)


def group_size(num_requests: int, largest: int, num_stages: int) -> int:
    """Sequences of a group: at most `largest`, and few enough that there is a group for each stage."""
    return max(1, min(largest, -(-num_requests // num_stages)))
