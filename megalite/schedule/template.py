"""A rank's list of actions for one iteration, generated once and renumbered for every batch.

What a schedule does in an iteration depends only on the shape of the batch: its size, the size of the next one, and
whether anything is in flight. From one batch to the next only the numbers change: micro-batch ids by the first id of
the batch, updates and weight versions by the iteration (or by the micro-batch, if every micro-batch is an update).
Generators and passes take milliseconds for a long list. A template keeps their result as columns, with a table of the
distinct numbers in them, so that the list of another batch costs a few hundred additions and one pass over the columns.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from megalite.schedule.action import NONE, UPDATE_KINDS, Action

_new_action: Callable[[Iterable[object]], Action] = partial(tuple.__new__, Action)
"""A row of columns as an Action. `Action(...)` and `Action._make` are calls into Python: three times as slow."""


class Template:
    """`actions` of a batch that begins at micro-batch `start` in iteration `iteration`.

    together: micro-batches of an update, where updates and versions follow them (PipeDream); None: they are counted in
        iterations.
    The batch must lie late enough in a run that all its versions come from updates: the first batches of an
    asynchronous run compute on the initial weights (version 0) instead, which `at` accounts for.
    """

    def __init__(self, actions: Sequence[Action], start: int, iteration: int, *, together: int | None = None) -> None:
        self._together = together
        update = iteration if together is None else start // together
        numbers: dict[tuple[bool, int], int] = {}
        """(counted as an update, distance from the batch's first number) -> place in the table."""

        def place(number: int, counts_updates: bool) -> int:
            key = (counts_updates, number - (update if counts_updates else start))
            return numbers.setdefault(key, len(numbers) + 1)

        self._kinds = [action.kind for action in actions]
        self._stages = [action.stage for action in actions]
        self._microbatches = [place(action.microbatch, action.kind in UPDATE_KINDS) for action in actions]
        self._versions = [0 if action.version == NONE else place(action.version, True) for action in actions]
        self._peers = [action.peer for action in actions]
        self._replicas = [action.replica for action in actions]
        self._numbers = list(numbers)
        self._overlaps = [(position, len(action.parts)) for position, action in enumerate(actions) if action.parts]
        parts = [part for action in actions for part in action.parts]
        self._parts = Template(parts, start, iteration, together=together) if parts else None

    def at(self, start: int, iteration: int) -> list[Action]:
        """The list of the batch that begins at micro-batch `start` in iteration `iteration`."""
        update = iteration if self._together is None else start // self._together
        # What would be older than the initial weights is the initial weights.
        table = [NONE, *(max(distance + (update if counts else start), 0) for counts, distance in self._numbers)]
        microbatches = [table[index] for index in self._microbatches]
        versions = [table[index] for index in self._versions]
        parts: list[tuple[Action, ...]] = [()] * len(microbatches)
        if self._parts is not None:
            flat = iter(self._parts.at(start, iteration))
            for position, count in self._overlaps:
                parts[position] = tuple(islice(flat, count))
        rows = zip(self._kinds, self._stages, microbatches, versions, self._peers, self._replicas, parts, strict=True)
        return list(map(_new_action, rows))
