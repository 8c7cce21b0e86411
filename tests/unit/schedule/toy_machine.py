"""A pipeline of numbers: runs lowered programs in one process and computes with them, exactly.

Stage s maps x to x * w_s + k + 1 (k: micro-batch), the loss gradient is the output itself; all modulo a prime. So each
weight after a run depends on every forward, backward, version, message and update that led to it, and equality with a
sequential loop is equality of the whole history.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from megalite.schedule import Action, BatchRange, Program
from megalite.schedule.passes import receives

PRIME = 2**61 - 1
LR = 3


def sequential(num_stages: int, batches: Sequence[BatchRange], *, delay: int) -> list[int]:
    """Weights after training without any pipeline; gradients are taken on weights `delay` updates old."""
    history = [[stage + 2 for stage in range(num_stages)]]
    for t, batch in enumerate(batches):
        weights = history[max(t - delay, 0)]
        gradients = [0] * num_stages
        for k in range(batch.start, batch.end):
            inputs = [k % PRIME]
            for weight in weights:
                inputs.append((inputs[-1] * weight + k + 1) % PRIME)
            dy = inputs.pop()
            for stage in reversed(range(num_stages)):
                gradients[stage] = (gradients[stage] + dy * inputs[stage]) % PRIME
                dy = dy * weights[stage] % PRIME
        history.append([(w - LR * g) % PRIME for w, g in zip(history[-1], gradients, strict=True)])
    return history[-1]


def sequential_pipedream(num_stages: int, total: int) -> list[int]:
    """PipeDream: stage s computes micro-batch k on its own weights of update max(k - (S-1-s), 0); one update each."""
    histories = [[stage + 2] for stage in range(num_stages)]
    for k in range(total):
        weights = [histories[s][max(k - (num_stages - 1 - s), 0)] for s in range(num_stages)]
        inputs = [k % PRIME]
        for weight in weights:
            inputs.append((inputs[-1] * weight + k + 1) % PRIME)
        dy = inputs.pop()
        for stage in reversed(range(num_stages)):
            histories[stage].append((histories[stage][-1] - LR * dy * inputs[stage]) % PRIME)
            dy = dy * weights[stage] % PRIME
    return [history[-1] for history in histories]


class Machine:
    """All ranks of a program; lists are interpreted turn by turn, wires are queues without names."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots: dict[tuple[int, int], dict[int, int]] = {}
        for rank in range(program.num_ranks):
            for stage, replica in program.placement.stages_of(rank):
                self.slots[stage, replica] = {0: stage + 2}
        self.gradients: dict[tuple[int, int, int], int] = defaultdict(int)
        self.inputs: dict[tuple[int, int, int], int] = {}
        self.kept: dict[tuple[int, int, int], int] = {}
        self.arrived: list[dict[Action, int | None]] = [{} for _ in range(program.num_ranks)]
        self.made: dict[tuple[str, int, int, int], int] = {}
        self.put_off: dict[tuple[int, int, int], int] = {}
        self.wires: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.reduced: set[tuple[int, int, int]] = set()

    def run(self, batches: Sequence[BatchRange]) -> list[int]:
        """Newest weights of all stages (of replica 0; all replicas must agree)."""
        for batch in batches:
            lists = [deque(self.program.actions_for_batch(rank, batch)) for rank in range(self.program.num_ranks)]
            while any(lists):
                moved = False
                for rank, actions in enumerate(lists):
                    while actions and self._do(rank, actions[0], batch):
                        actions.popleft()
                        moved = True
                assert moved, [actions[0] if actions else None for actions in lists]
        if batches[-1].next_size == 0:
            assert not any(self.wires.values()) and not self.inputs and not self.kept and not self.put_off
        return [self._newest(stage) for stage in range(self.program.num_stages)]

    def _newest(self, stage: int) -> int:
        copies = {slots[max(slots)] for (s, _), slots in self.slots.items() if s == stage}
        assert len(copies) == 1, f"replicas of stage {stage} have drifted apart"
        return copies.pop()

    def _do(self, rank: int, action: Action, batch: BatchRange) -> bool:
        if action.kind in ("SEND_F", "SEND_B"):
            self.wires[rank, action.peer].append(
                self.made.pop((action.kind, action.stage, action.replica, action.microbatch))
            )
        elif action.kind in ("RECV_F", "RECV_B"):
            self.arrived[rank][action] = None  # posted; filled in order below
        elif action.is_compute:
            return self._compute(rank, action, batch)
        elif action.kind == "REDUCE":
            self.reduced.add((action.stage, action.replica, action.microbatch))
        elif action.kind == "STEP":
            return self._step(action)
        return True

    def _deliver(self, rank: int) -> None:
        """Give what came over each wire to the posted receives, in the order of posting."""
        for recv, value in self.arrived[rank].items():
            wire = self.wires[recv.peer, rank]
            if value is None and wire:
                self.arrived[rank][recv] = wire.popleft()

    def _compute(self, rank: int, action: Action, batch: BatchRange) -> bool:
        self._deliver(rank)
        parts = list(action.computations())
        values = [self._input(rank, part) for part in parts]
        if any(value is None for value in values):
            return False
        for part, value in zip(parts, values, strict=True):
            assert value is not None
            self._apply(part, value, batch)
        for recv in receives(action, self.program.placement):
            del self.arrived[rank][recv]
        return True

    def _input(self, rank: int, part: Action) -> int | None:
        """The tensor that a computation takes from elsewhere, if it is there."""
        stage, replica, k = part.stage, part.replica, part.microbatch
        last = self.program.num_stages - 1
        if part.kind in "WR" or (part.kind == "F" and stage == 0):
            return k % PRIME
        if part.kind == "F":
            kind, neighbour = "F", stage - 1
        elif stage == last:
            return self.made.get(("SEND_F", stage, replica, k))
        else:
            kind, neighbour = "B", stage + 1
        peer = self.program.placement.rank_of(neighbour, replica)
        if peer == rank:
            return self.made.get((f"SEND_{kind}", neighbour, replica, k))
        return self.arrived[rank].get(Action(f"RECV_{kind}", stage, k, peer=peer, replica=replica))

    def _apply(self, part: Action, value: int, batch: BatchRange) -> None:
        stage, replica, k = part.stage, part.replica, part.microbatch
        here = (stage, replica, k)
        if part.kind == "F":
            weight = self.slots[stage, replica][part.version]
            (self.kept if stage in self.program.recomputed else self.inputs)[here] = value
            self.made["SEND_F", stage, replica, k] = (value * weight + k + 1) % PRIME
        elif part.kind == "R":
            self.inputs[here] = self.kept.pop(here)
        elif part.kind == "W":
            self._add(part, self.put_off.pop(here), batch)
        else:
            self.made["SEND_B", stage, replica, k] = value * self.slots[stage, replica][part.version] % PRIME
            gradient = value * self.inputs.pop(here) % PRIME
            if part.kind == "I":
                self.put_off[here] = gradient
            else:
                self._add(part, gradient, batch)

    def _add(self, part: Action, gradient: int, batch: BatchRange) -> None:
        update = self.program.update_of(part.microbatch, batch)
        self.gradients[part.stage, part.replica, update] += gradient

    def _step(self, action: Action) -> bool:
        """Sum over replicas, then update the newest weights; the slot of the oldest version is overwritten."""
        stage, update = action.stage, action.microbatch
        replicas = [replica for s, replica in self.slots if s == stage]
        if any((stage, replica, update) not in self.reduced for replica in replicas):
            return False  # the reduction over replicas waits for the others
        total = sum(self.gradients[stage, replica, update] for replica in replicas)
        slots = self.slots[stage, action.replica]
        slots[update + 1] = (slots[update] - LR * total) % PRIME
        rank = self.program.placement.rank_of(stage, action.replica)
        slots.pop(update + 1 - self.program.weight_versions[rank], None)
        return True
