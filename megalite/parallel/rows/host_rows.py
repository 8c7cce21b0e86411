"""The rows of an embedding in host memory, each as many steps old as it is, and the rule that updates a few of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from megalite.comm import Axis
from megalite.config import Rates
from megalite.inventory import ALIGNMENT, align

Rows = NDArray[np.int64]
"""Numbers of rows, sorted, each once."""

BLOCK_ELEMENTS = 1 << 18
"""Elements that are stepped at a time: with their moments they stay in the processor's cache while all their steps are
replayed, and a call of the rule's kernel is worth its while."""


class Step(NamedTuple):
    """Numbers of one step of the optimizer. weight_decay: where the parameter decays."""

    lr: float
    weight_decay: float


class RowRule:
    """The run's update rule, for a parameter of which any part may be updated by itself.

    make_optimizer: builds the rule from parameter groups (`parallel.zero`).
    decays: whether weight decay applies. rates: its factor of epsilon.
    width: elements of a row in scratch memory: rows begin at whole vector registers there, as in flat buffers, so that
        every element is rounded alike.
    only_decays: a step whose gradient and moments are 0 does what `decay` does.
    kept: name -> dtype of what the rule keeps for each element.
    """

    def __init__(
        self,
        make_optimizer: Callable[[list[dict[str, Any]]], Any],
        *,
        columns: int,
        decays: bool,
        only_decays: bool,
        dtype: torch.dtype,
        rates: Rates | None = None,
    ) -> None:
        self.width, self.dtype, self.only_decays = align(columns), dtype, only_decays
        probe = torch.zeros(ALIGNMENT, dtype=dtype)
        group = {"params": [probe], "decay": decays, "whole": False, "placements": [], "parameters": [], "pieces": [[]]}
        group["rates"] = rates or Rates()
        self._rule = make_optimizer([{**group, "shard_axis": Axis.single("shard"), "cut_axes": ()}])
        self._rule.steps = -1
        probe.grad = torch.zeros_like(probe)
        self._rule.step()
        made = self._rule.state[probe] if probe in self._rule.state else {}
        self.kept: dict[str, torch.dtype] = {
            name: value.dtype
            for name, value in made.items()
            if isinstance(value, Tensor) and name != "step" and value.numel() == probe.numel()
        }
        self._decays = decays

    def step(self, rows: Tensor, gradient: Tensor, kept: Mapping[str, Tensor], numbers: Step, taken: int) -> None:
        """Updates `rows` and what is kept of them, in place; `[n, width]` each. taken: steps before this one."""
        rule = self._rule
        (group,) = rule.param_groups
        group["params"], group["lr"] = [rows], numbers.lr
        group["weight_decay"] = numbers.weight_decay if self._decays else 0.0
        rule.state.clear()
        if kept:
            rule.state[rows] = {"step": torch.full((), float(taken)), **kept}
        rule.steps = taken
        rows.grad = gradient
        rule.step()
        rows.grad = None
        rule.state.clear()

    def decay(self, rows: Tensor, numbers: Step) -> None:
        """Weight decay alone."""
        if self._decays and numbers.weight_decay:
            rows.mul_(1 - numbers.lr * numbers.weight_decay)


class HostRows:
    """Weights and moments of this rank's rows, `[n, h]`.

    initial: in the compute dtype; they are kept in the rule's.
    trained: rows from here on are padding of the vocabulary, which nothing uses or updates.
    taken: steps of the optimizer so far. A row may lack the last of them.
    """

    def __init__(self, initial: Tensor, rule: RowRule, *, trained: int) -> None:
        self.rule, self.trained = rule, trained
        self.weights = initial.to(rule.dtype)
        self.kept = {name: torch.zeros_like(self.weights, dtype=dtype) for name, dtype in rule.kept.items()}
        self.taken = 0
        self._steps_of = np.zeros(len(initial), np.int64)
        self._moves = np.zeros(len(initial), bool)  # rows whose moments are not all 0
        self._history: list[Step] = []
        self._first = 0  # number of the first step in the history
        self._turn = 0  # the row that `keep_up` comes to next

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weights, *self.kept.values())) + self._steps_of.nbytes

    def current(self, rows: Rows) -> Tensor:
        """`[n, h]`: rows that have taken every step."""
        self.catch_up(rows)
        return self.weights.index_select(0, torch.from_numpy(rows))

    def catch_up(self, rows: Rows) -> None:
        """Replays the steps that rows have missed: those of batches that did not use them, whose gradient was 0."""
        late = rows[self._steps_of[rows] < self.taken]
        late = late[np.argsort(self._steps_of[late], kind="stable")]
        moves = self._moves[late] | (not self.rule.only_decays)
        for block in self._blocks(late[moves]):
            index = torch.from_numpy(block)
            weights, kept = self._take(index)
            zeros = torch.zeros_like(weights)
            for number, behind, numbers in self._missed(block):
                state = {name: value[:behind] for name, value in kept.items()}
                self.rule.step(weights[:behind], zeros[:behind], state, numbers, number)
            self._put(index, weights, kept)
        for block in self._blocks(late[~moves]):
            index = torch.from_numpy(block)
            weights = self.weights.index_select(0, index)
            for _, behind, numbers in self._missed(block):
                self.rule.decay(weights[:behind], numbers)
            self.weights.index_copy_(0, index, weights)
        self._steps_of[late] = self.taken

    def _missed(self, rows: Rows) -> Iterator[tuple[int, int, Step]]:
        """(Number of a step, how many of `rows` take it, its numbers); a row joins at the first step that it lacks."""
        had = self._steps_of[rows]
        for number in range(had[0], self.taken):
            yield number, int(np.searchsorted(had, number, side="right")), self._history[number - self._first]

    def step(self, rows: Rows, gradient: Tensor, numbers: Step) -> None:
        """One step of the optimizer, in which `rows` have this gradient, `[n, h]` of any float dtype, all others 0."""
        self.catch_up(rows)
        first = 0
        for block in self._blocks(rows):
            index = torch.from_numpy(block)
            weights, kept = self._take(index)
            own = self._widened(gradient[first : first + len(block)].to(self.rule.dtype))
            self.rule.step(weights, own, kept, numbers, self.taken)
            self._put(index, weights, kept)
            first += len(block)
        self._history.append(numbers)
        self.taken += 1
        self._steps_of[rows], self._moves[rows] = self.taken, True

    def restart(self, taken: int) -> None:
        """All rows have taken so many steps: they are new, or have been loaded."""
        self.taken = self._first = taken
        self._steps_of[:] = taken
        self._history.clear()
        self._moves[:] = False
        for kept in self.kept.values():
            self._moves |= kept.ne(0).any(1).numpy()

    def keep_up(self, rows: int) -> None:
        """Brings the next so many rows up to date, all in turn: what nothing uses must not pile up."""
        stop = min(self.trained, self._turn + rows)
        self.catch_up(np.arange(self._turn, stop))
        self._turn = stop if stop < self.trained else 0
        if self._turn == 0 and self.trained:
            oldest = int(self._steps_of[: self.trained].min())
            del self._history[: oldest - self._first]
            self._first = oldest

    def settle(self) -> None:
        """Brings every row up to date."""
        self.catch_up(np.arange(self.trained))
        self.restart(self.taken)

    def _blocks(self, rows: Rows) -> Iterator[Rows]:
        height = max(1, BLOCK_ELEMENTS // self.rule.width)
        return (rows[start : start + height] for start in range(0, len(rows), height))

    def _widened(self, values: Tensor) -> Tensor:
        missing = self.rule.width - values.shape[1]
        return pad(values, (0, missing)) if missing else values

    def _take(self, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        kept = {name: self._widened(value.index_select(0, index)) for name, value in self.kept.items()}
        return self._widened(self.weights.index_select(0, index)), kept

    def _put(self, index: Tensor, weights: Tensor, kept: dict[str, Tensor]) -> None:
        columns = self.weights.shape[1]
        self.weights.index_copy_(0, index, weights[:, :columns])
        for name, value in kept.items():
            self.kept[name].index_copy_(0, index, value[:, :columns])
