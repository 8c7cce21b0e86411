"""Whether all ranks give as many micro-batches, and the ranks of a replica the same samples: inputs of one rank's list
with the targets of another's, which the first and the last stage would take, train in silence."""

import math
from collections.abc import Callable, Sequence

import torch

from megalite.comm import Axis, all_gather, all_gather_json
from megalite.errors import ConfigError
from megalite.late_reading import LateReading
from megalite.library.cutting import Tensors

VALUES = 32
Seen = list[list[float] | None]
"""Of each tensor some values, or nothing where it is a placeholder."""


REFUSED = -1
"""In the place of a number of micro-batches."""


class Agreement:
    """That all ranks give as many micro-batches. All wait for the first answer. On a GPU the host waits for no later
    one, which is read when the next batch comes: ranks that have begun a batch by then say so there.

    replica: of this rank.
    """

    def __init__(self, world: Axis, replica: int, device: torch.device) -> None:
        self._world, self._replica, self._device = world, replica, device
        self._reached, self._asked = False, list[LateReading]()

    @property
    def late(self) -> bool:
        return self._reached and self._device.type != "cpu"

    def reach(self, problem: str | None, count: int, inputs: Callable[[], Seen]) -> None:
        """problem: why this rank refuses its batch. inputs: what is compared the first time. Collective. Raises
        ConfigError: on all ranks, or where it is late on this one now and on the others at their next batch."""
        if self.late:
            self.settle()
            mine = torch.full((1,), REFUSED if problem else count, dtype=torch.int64, device=self._device)
            self._asked.append(LateReading(all_gather(mine, self._world)))
            if problem:
                raise ConfigError(problem)
            return
        own = inputs() if problem is None and not self._reached else []
        told = all_gather_json([problem, count, self._replica, own], self._world)
        for theirs, *_ in told:
            if theirs is not None:
                raise ConfigError(theirs)
        _check_counts([theirs for _, theirs, *_ in told], "")
        if other := other_inputs([(replica, tensors) for _, _, replica, tensors in told]):
            raise ConfigError(other)
        self._reached = True

    def settle(self) -> None:
        """Reads the answers that have not been read. Raises ConfigError."""
        asked, self._asked = self._asked, []
        for answer in asked:
            _check_counts(answer.read(), " in the batch before")


def _check_counts(counts: Sequence[int], when: str) -> None:
    if REFUSED in counts:
        raise ConfigError(f"micro_batches: rank {counts.index(REFUSED)} has refused its own{when}; its line says why")
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise ConfigError(f"micro_batches: {count} on rank {rank}, {counts[0]} on rank 0{when}; all give as many")


@torch.no_grad()
def seen(inputs: Sequence[Tensors]) -> Seen:
    """Values spread over the inputs of the first and of the last micro-batch. What is constant or on `meta` may
    stand in where no stage reads it; complex, sparse and nested tensors are passed over."""
    found: Seen = []
    for tensor in (*inputs[0], *inputs[-1]):
        if tensor.is_meta or tensor.is_complex() or tensor.layout != torch.strided or tensor.is_nested:
            found.append(None)
            continue
        flat = tensor.reshape(-1)
        values = flat[:: max(1, flat.numel() // VALUES)][:VALUES].double().tolist()
        found.append(values if len(set(values)) > 1 else None)
    return found


def other_inputs(told: Sequence[tuple[int, Seen]]) -> str | None:
    """What is wrong, by (replica, what it has seen) of every rank: two ranks of one replica with different inputs.
    Values may differ by a hundredth of the largest: devices round."""
    first: dict[tuple[int, int], tuple[int, list[float]]] = {}
    for rank, (replica, tensors) in enumerate(told):
        for place, values in enumerate(tensors):
            if values is None:
                continue
            before, known = first.setdefault((replica, place), (rank, values))
            if not _close(known, values):
                return (
                    f"micro_batches: ranks {before} and {rank}, both of replica {replica}, give different inputs; all "
                    'ranks of a replica give the same list: seed data by mesh.coordinate("dp"), not by world.rank'
                )
    return None


def _close(one: list[float], other: list[float]) -> bool:
    slack = 0.01 * max((abs(x) for x in [*one, *other] if math.isfinite(x)), default=0.0)
    near = (a == b or not abs(a - b) > slack for a, b in zip(one, other, strict=False))  # nan is near everything
    return len(one) == len(other) and all(near)
