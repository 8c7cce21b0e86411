"""What moves between tiers moves beside computations: events in order, no clock; and within its room."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiers import KEPT, one_layer, optimizer_of, run_batch, slow_rules, train
from megalite.errors import ScheduleError
from megalite.parallel.tiers import Arrival, Mover, Pairs, SavedTensors
from megalite.schedule import EVICT, Action, ActivationRoom, BatchRange, Program, build_program, insert_transfers, lower

PATIENCE = 5.0


class Beside(Mover):
    """A copy ends only after the computation beside it has begun: whoever waits for it first waits in vain."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.begun, self.copies = 0, 0
        self.next = threading.Condition()
        self.at = deque[int](), deque[int]()  # to the host, to the device

    def compute(self, kind: str) -> None:
        with self.next:
            self.begun += 1
            self.next.notify_all()

    def copy(self, pairs: Pairs, **how: Any) -> Arrival:
        self.at[how["to_device"]].append(self.begun)
        return super().copy(pairs, **how)

    def move(self, pairs: Pairs) -> None:
        at = self.at["to-device" in threading.current_thread().name].popleft()
        with self.next:
            assert self.next.wait_for(lambda: self.begun > at, PATIENCE), "the computation beside a copy waits for it"
            self.copies += 1
        super().move(pairs)


def moving(program: Program, capacity: float) -> Program:
    return lower(insert_transfers(program, ActivationRoom((1.0,), (0.0,), (capacity,))))


def test_activations_move_beside_a_computation() -> None:
    mover = Beside()
    saved = SavedTensors(mover)
    run_batch(moving(build_program("gpipe", 1, 8), 4), one_layer(saved, mover.compute))
    assert mover.begun == 16 and mover.copies >= 2 * 4 and saved.now == 0


def any_order(rng: random.Random, microbatches: int) -> Program:
    """Forwards and backwards of one rank in any legal order."""
    program = build_program("gpipe", 1, microbatches)
    keys = {number: sorted(rng.random() for _ in "FB") for number in range(microbatches)}

    def order(rank: int, batch: BatchRange) -> list[Action]:
        actions = program.order(rank, batch)
        return sorted(actions, key=lambda action: keys[action.microbatch - batch.start][action.kind == "B"])

    return program.with_order(order)


def test_twenty_random_programs_hold_no_more_than_their_room() -> None:
    """Counted while they run. Beside what the layer keeps, autograd keeps the loss and its factor."""
    rng, tight = random.Random(11), 0
    while tight < 20:
        microbatches, capacity = rng.randint(4, 9), rng.randint(3, 6)
        try:
            program = moving(any_order(rng, microbatches), capacity)
        except ScheduleError:
            continue
        saved = SavedTensors(Mover(torch.device("cpu")))
        run_batch(program, one_layer(saved, lambda kind: None))
        assert saved.now == 0 and saved.peak <= capacity * (KEPT + 8), " ".join(map(str, program.unroll(1)[0]))
        tight += any(action.kind == EVICT for action in program.unroll(1)[0])


def test_the_next_bucket_is_on_its_way_while_one_is_stepped(tmp_path: Path) -> None:
    optimizer, told = optimizer_of("plain", 8, tmp_path), []
    number_of = {id(region): k for k, sub in enumerate(optimizer.sub_optimizers) for region in sub.regions}

    def note(what: str) -> Callable[[Any], None]:
        return lambda regions: told.append((what, {number_of[id(region)] for region in regions}))

    optimizer.file.announce, optimizer.file.let_go = note("read"), note("write")
    slow_rules(optimizer, lambda sub: told.append(("step", {number_of[id(region)] for region in sub.regions})))
    train(optimizer, 1, 0.0)
    at = {(what, *numbers): place for place, (what, numbers) in reversed(list(enumerate(told)))}
    for k in range(1, 8):
        assert at["step", k - 1] < at["write", k - 1] < at["step", k]
        assert at["read", k] < at["step", k - 1]
