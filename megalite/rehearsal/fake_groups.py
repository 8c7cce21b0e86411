"""Process groups of a rank that is alone: a communicator is a list of ranks, and to make one costs nothing."""

import sys
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any

from torch import Tensor

from megalite.rehearsal.order import where
from megalite.rehearsal.record import Call, Communicator, Communicators

MOST_SAID = 1 << 20


class FakeGroups:
    """The groups that one rank of `size` makes. made: (place, how many lists of ranks, digest of them), in order."""

    def __init__(self, rank: int, size: int, known: Communicators | None = None) -> None:
        self.rank, self._known = rank, known or Communicators()
        self.world = self._known.of(range(size), 0)
        self.world.name = "world"
        self._counts: dict[tuple[int, ...], int] = {self.world.ranks: 1}
        self.made: list[tuple[str, int, int]] = []
        self._caller: FrameType | None = None
        self._gathered: dict[Communicator, int] = {}

    def new_group(self, ranks: Sequence[int] | None = None, **_kwargs: Any) -> Communicator | None:
        """A communicator of these ranks; None where this rank is not one of them."""
        members, caller = tuple(self.world.ranks if ranks is None else ranks), sys._getframe(2)
        place = where() if caller is not self._caller else self.made[-1][0]
        self._caller = caller
        count, digest = self.made.pop()[1:] if self.made and self.made[-1][0] == place else (0, 0)
        self.made.append((place, count + 1, hash((digest, members))))
        if self.rank not in members:
            return None
        number = self._counts.get(members, 0)
        self._counts[members] = number + 1
        return self._known.of(members, number)

    def gathered(self, call: Call, own: Tensor | None) -> dict[int, Tensor]:
        """Coordinate -> what ranks that were rehearsed before have given to a gathering; keeps what this one gives."""
        members, number = call.communicator, self._gathered.get(call.communicator, 0) + 1
        if call.kind != "all_gather":
            return {}
        self._gathered[members] = number
        here = {members.ranks.index(rank): x for (n, rank), x in members.said.items() if n == number}
        if own is not None and own.nbytes <= MOST_SAID:
            members.said[number, self.rank] = own.reshape(-1).clone()
        return here

    def names(self) -> dict[str, Any]:
        """Names of torch.distributed."""
        return {
            "new_group": self.new_group,
            "group": SimpleNamespace(WORLD=self.world),
            "is_initialized": lambda: True,
            "get_rank": lambda group=None: self.rank,
            "get_world_size": lambda group=None: len((group or self.world).ranks),
            "get_backend_config": lambda group=None: "cpu:gloo,cuda:nccl",
            "get_process_group_ranks": lambda group=None: list((group or self.world).ranks),
        }
