"""The cache: what it computes is what a table in memory would, what leaves is Belady's choice, no use is stale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megalite.config import OptimizerConfig
from megalite.errors import RuntimeFailure
from megalite.inventory import ParameterPlacement
from megalite.optim import OPTIMIZERS
from megalite.parallel.rows import Access, CachedRows, HostRows, RowRule, cached_rows
from megalite.parallel.rows.slots import NEVER, Future, Slots
from megalite.parallel.rows.staleness import StalenessCheck
from megalite.parallel.tiers import Mover

ROWS, COLUMNS, TOKENS, SLOTS = 40, 8, 12, 13
SETTINGS = OptimizerConfig(lr=1.0)
ORDER = [Access(0, True), Access(1, True), Access(0, False), Access(2, True), Access(1, False), Access(2, False)]
"""1F1B on the first of two ranks."""


def adam(groups: list[dict[str, Any]]) -> Any:
    return OPTIMIZERS["adam"](groups, SETTINGS)


def make_rows(lookahead: int) -> CachedRows:
    initial = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rule = RowRule(adam, columns=COLUMNS, decays=True, only_decays=True, dtype=torch.float64)
    return CachedRows(
        HostRows(initial, rule, trained=ROWS),
        name="words",
        placement=ParameterPlacement((ROWS, COLUMNS), (0, 0)),
        slots=SLOTS,
        dtype=torch.float64,
        gradient_dtype=torch.float64,
        mover=Mover(torch.device("cpu")),
        lookahead=lookahead,
    )


def train(rows: CachedRows, seed: int, batches: int = 6) -> list[float]:
    """Some batches in the order of 1F1B, beside a table with the same optimizer. Returns the hit rate of each batch."""
    rng = np.random.default_rng(seed)
    table = rows.host.weights.clone()
    dense = adam([{"params": [table], "decay": True, "whole": False}])
    batch = [[(rng.zipf(1.3, TOKENS) - 1) % ROWS for _ in range(3)] for _ in range(batches + 1)]
    hits = []
    for number in range(batches):
        before = rows.traffic.uses, rows.traffic.hits
        rows.announce(ORDER, 3, 3 * number, [*batch[number], *batch[number + 1]])
        gradient = torch.zeros_like(table)
        for access in ORDER:
            ids = batch[number][access.microbatch]
            if access.forward:
                assert torch.equal(rows.forward(ids), F.embedding(torch.from_numpy(ids), table))
            else:
                dy = torch.from_numpy(rng.standard_normal((TOKENS, COLUMNS)))
                rows.backward(ids, dy)
                gradient.index_add_(0, torch.from_numpy(ids), dy)
        torch.testing.assert_close(rows.reduce(), gradient.square().sum().view(1), rtol=1e-12, atol=0)
        skips = number == 2
        found, scale = torch.tensor(float(skips)), torch.tensor(0.5, dtype=torch.float64)
        rows.step(lr=0.01 * number, weight_decay=0.1, grad_scale=scale, found_inf=found)
        if not skips:
            table.grad = gradient * 0.5
            dense.param_groups[0]["lr"], dense.param_groups[0]["weight_decay"] = 0.01 * number, 0.1
            dense.step()
        uses, hit = (now - then for now, then in zip((rows.traffic.uses, rows.traffic.hits), before, strict=True))
        hits.append(hit / uses)
    ids = rng.integers(-1, ROWS, (3, 4))
    expected = F.embedding(torch.from_numpy(ids).clamp(min=0), table) * torch.from_numpy(ids >= 0)[..., None]
    assert torch.equal(rows.read(ids), expected)
    weights, *moments = rows.shards()
    assert torch.equal(weights.local, table)
    assert [torch.equal(each.local, dense.state[table][each.name.split("/")[1]]) for each in moments] == [True, True]
    return hits


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_small_cache_computes_what_a_table_does(lookahead: int) -> None:
    rates = [rate for seed in range(4) for rate in train(make_rows(lookahead), seed)]
    if lookahead == 0:
        assert 0 < sum(rates) / len(rates) < 0.7
    else:
        assert sum(rates) / len(rates) > 0.75


def test_no_row_is_later_than_a_round_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_rows, "MOST_LATE", 4)
    rows = make_rows(1)
    train(rows, 0, batches=20)
    rows.host.restart(0)
    for number in range(20):
        rows.announce(ORDER, 3, 3 * number, [np.array([0])] * 4)
        for access in ORDER:
            if access.forward:
                rows.forward(np.array([0]))
            else:
                rows.backward(np.array([0]), torch.zeros(1, COLUMNS))
        rows.reduce()
        rows.step(lr=0.1, weight_decay=0.1, grad_scale=1.0, found_inf=None)
        assert rows.host.taken - rows.host._steps_of.min() <= 5 and len(rows.host._history) <= 9


def wrong(name: str) -> Any:
    """A mutation of the cache."""
    move, cached = CachedRows._move, CachedRows._cached
    if name == "kept over an update":

        def nothing(self: CachedRows, among: NDArray[np.bool_]) -> NDArray[np.int64]:
            return cached(self, among & (not among.all()))

        return [patch.object(Slots, "clear", lambda self: None), patch.object(CachedRows, "_cached", nothing)]
    if name == "gradient left behind":

        def forgets(self: CachedRows, moves: Any) -> None:
            self._used[moves.leaving] = False
            move(self, moves)

        return [patch.object(CachedRows, "_move", forgets)]
    if name == "never fetched":
        return [patch.object(CachedRows, "_move", lambda self, moves: None)]
    admit = Slots.admit
    return [patch.object(Slots, "admit", lambda self, rows, uses, before=None: admit(self, rows[1:], uses, before=-1))]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kept over an update", "lacks an update"),
        ("gradient left behind", "gradient with it that is lost"),
        ("never fetched", "is not in the cache"),
        ("one row short", "is not in the cache"),
    ],
)
def test_a_mutation_is_seen_when_it_happens(name: str, message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        patches = wrong(name)
        for each in patches:
            each.start()
        try:
            train(make_rows(1), 0)
        finally:
            for each in patches:
                each.stop()


def test_more_rows_than_slots_and_a_gradient_that_no_update_takes_are_seen() -> None:
    check = StalenessCheck(2, 5)
    check.see("came", np.array([0, 1]))
    with pytest.raises(RuntimeFailure, match="3 rows in 2 slots"):
        check.see("came", np.array([2]))
    check.see("left", np.array([2]))
    check.see("added", np.array([0, 1]))
    with pytest.raises(RuntimeFailure, match="row 1 has a gradient that is lost"):
        check.see("updated", np.array([0]))


def fetches(sequence: Sequence[int], slots: int) -> int:
    """Rows that come into the cache where one row is used at a time and all uses are known."""
    table, future, count = Slots(slots, 8), Future(8), 0
    order = [Access(number, True) for number in range(len(sequence))]
    future.announce(order, len(order), 0, [np.array([row]) for row in sequence])
    for row in sequence:
        count += len(table.admit(np.array([row]), future.next_uses).entering)
        future.advance()
    return count


def fewest(sequence: tuple[int, ...], slots: int) -> int:
    """By brute force."""

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(sequence):
            return 0
        row = sequence[place]
        if row in held:
            return best(place + 1, held)
        if len(held) < slots:
            return 1 + best(place + 1, held | {row})
        return 1 + min(best(place + 1, (held - {gone}) | {row}) for gone in held)

    return best(0, frozenset())


def test_no_choice_needs_fewer_fetches() -> None:
    rng = np.random.default_rng(5)
    for _ in range(12):
        sequence = tuple(int(row) for row in rng.integers(0, 6, 14))
        assert fetches(sequence, 3) == fewest(sequence, 3)


def test_the_future_is_what_has_been_announced() -> None:
    future = Future(5)
    rows = [np.array(each) for each in ([0, 1], [1, 2], [3], [0])]
    future.announce(ORDER, 3, 30, rows)  # the fourth is of the batch that follows
    assert future.next_uses().tolist() == [0, 0, 1, 3, NEVER]
    assert [(place, now) for place, _, now in future.ahead(9)] == [(0, True), (1, True), (3, True), (6, False)]
    assert [place for place, *_ in future.ahead(1)] == [0]
    assert future.forward_follows
    for _ in range(3):
        future.advance()
    assert future.next_uses().tolist() == [6, 4, 4, 3, NEVER]
    future.advance()
    assert not future.forward_follows
    assert [(rows.tolist(), now) for _, rows, now in future.ahead(1)] == [([0], False)]
    future.update()
    assert [now for *_, now in future.ahead(1)] == [True]
    future.announce([Access(0, True), Access(0, False)], 2, 8, rows)  # of two micro-batches another rank has one
    assert [(place, rows.tolist()) for place, rows, _ in future.ahead(9)] == [(0, [0, 1]), (2, [3])]
