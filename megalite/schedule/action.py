"""Actions: the instructions that a pipeline schedule consists of.

A schedule is data: one list of actions per rank. An action says *what* is done (kind), *where* (stage, and replica in
bidirectional schedules), *for which micro-batch*, and *with which weight version*. Micro-batch ids count over the whole
run (batch t starts where batch t-1 ended), so that schedules that never drain, such as PipeDream-2BW, can be written.

Text form, read back by `parse_action`:

    2F0            forward of micro-batch 0 on stage 2
    2F8v1          the same with weight version 1
    2.1F0          stage 2 of replica 1 (Chimera holds each stage more than once)
    2SEND_F0>3     send its output to rank 3;   3RECV_F0<2  receive it from rank 2
    2STEP4         optimizer update number 4 of stage 2
    [2F4+2B1]      two actions that may run at the same time

The set of kinds is open: a new kind is a new string that an executor understands.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from megalite.errors import ScheduleError

FORWARD = "F"
BACKWARD = "B"  # whole backward: gradient of the input and of the weights
BACKWARD_INPUT = "I"  # first half of a split backward: gradient of the input only (what the previous stage waits for)
BACKWARD_WEIGHT = "W"  # second half: gradient of the weights (nothing waits for it, so it fills bubbles)
RECOMPUTE = "R"  # the forward again, from the saved input of a stage that keeps nothing else (`Program.recomputed`)
SEND_F = "SEND_F"
RECV_F = "RECV_F"
SEND_B = "SEND_B"
RECV_B = "RECV_B"
REDUCE = "REDUCE"  # start the data-parallel reduction of one update's gradient; the STEP of that update waits for it
NORM = "NORM"
"""Send this stage's share of the global gradient norm of one update, so that STEP need not wait for it. Optional: in a
program without it, STEP does both."""
STEP = "STEP"  # optimizer update u of one stage: consumes gradient u, produces weight version u + 1
UNSHARD = "UNSHARD"  # gather the weights of one stage (ZeRO-3)
RESHARD = "RESHARD"  # free the part of them that other ranks own
EVICT = "EVICT"  # begin to move what a micro-batch's forward keeps in one stage to the host
PREFETCH = "PREFETCH"  # begin to bring it back
FETCH = "FETCH"  # in drawings, of weights that come from the host in a computation: `microbatch` is the stage's layer
OVERLAP = "OVERLAP"  # two computations that may run at the same time, as one action

_WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward of the input",
    BACKWARD_WEIGHT: "backward of the weights",
    SEND_F: "send forward",
    RECV_F: "receive forward",
    SEND_B: "send backward",
    RECV_B: "receive backward",
}

StageKey = tuple[int, int]  # (stage, replica)

COMPUTE_KINDS = frozenset({FORWARD, RECOMPUTE, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
GRADIENT_KINDS = frozenset({BACKWARD, BACKWARD_WEIGHT})  # kinds that add to the gradients of weights
INPUT_GRADIENT_KINDS = frozenset({BACKWARD, BACKWARD_INPUT})  # use what a forward keeps, for the input's gradient
AWAITING_WEIGHT = {BACKWARD_INPUT: 1, BACKWARD_WEIGHT: -1}  # what a kind adds to the micro-batches between I and W
SEND_KINDS = frozenset({SEND_F, SEND_B})
RECV_KINDS = frozenset({RECV_F, RECV_B})
COMMUNICATION_KINDS = SEND_KINDS | RECV_KINDS
UPDATE_KINDS = frozenset({REDUCE, NORM, STEP, UNSHARD, RESHARD})  # `microbatch`: number of an update or a batch
NONE = -1


class Action(NamedTuple):
    """One thing that one rank does."""

    kind: str  # one of the constants of this module, or a kind of your own
    stage: int  # 0 .. num_stages - 1. Of a SEND the stage that produced the tensor, of a RECV the one that uses it
    microbatch: int  # global id; of REDUCE, NORM and STEP the update; of UNSHARD and RESHARD the batch
    version: int = NONE  # weight version of a computation; NONE (-1) means the newest
    peer: int = NONE  # rank at the other end of a SEND or RECV
    replica: int = 0  # which copy of the stage, 0 except in bidirectional schedules
    parts: tuple[Action, ...] = ()  # the concurrent actions of an OVERLAP

    def __str__(self) -> str:
        if self.kind == OVERLAP:
            return "[" + "+".join(str(part) for part in self.parts) + "]"
        stage = f"{self.stage}.{self.replica}" if self.replica else f"{self.stage}"
        version = f"v{self.version}" if self.version != NONE else ""
        peer = "" if self.peer == NONE else (">" if self.kind in SEND_KINDS else "<") + str(self.peer)
        return f"{stage}{self.kind}{self.microbatch}{version}{peer}"

    @property
    def words(self) -> str:
        """What a profiler's trace calls it: `forward s1 mb3`, `send forward s0 mb3 to pp1`, `step s1 update 4`."""
        stage = f"s{self.stage}.{self.replica}" if self.replica else f"s{self.stage}"
        number = f"mb{self.microbatch}"
        if self.kind in UPDATE_KINDS:
            number = f"{'batch' if self.kind in (UNSHARD, RESHARD) else 'update'} {self.microbatch}"
        peer = "" if self.peer == NONE else f" {'to' if self.kind in SEND_KINDS else 'from'} pp{self.peer}"
        return f"{_WORDS.get(self.kind, self.kind.lower())} {stage} {number}{peer}"

    @property
    def stage_key(self) -> StageKey:
        """The stage, and which copy of it."""
        return self.stage, self.replica

    @property
    def is_compute(self) -> bool:
        """True for F, R, B, I, W and for an OVERLAP of them."""
        return self.kind in COMPUTE_KINDS or self.kind == OVERLAP

    def computations(self) -> tuple[Action, ...]:
        """The F, R, B, I, W inside: itself, its parts for an OVERLAP, nothing for any other kind."""
        if self.parts:
            return tuple(part for part in self.parts if part.kind in COMPUTE_KINDS)
        return (self,) if self.kind in COMPUTE_KINDS else ()


forward = partial(Action, FORWARD)
backward = partial(Action, BACKWARD)
backward_input = partial(Action, BACKWARD_INPUT)
backward_weight = partial(Action, BACKWARD_WEIGHT)
recompute = partial(Action, RECOMPUTE)
norm = partial(Action, NORM)
step = partial(Action, STEP)


def overlap(*parts: Action) -> Action:
    """Actions of one rank that may run at the same time (DualPipe's fused forward and backward)."""
    return Action(OVERLAP, parts[0].stage, parts[0].microbatch, parts=parts)


_SIMPLE = re.compile(r"(\d+)(?:\.(\d+))?([A-Z](?:[A-Z_]*[A-Z])?)(\d+)(?:v(\d+))?(?:([<>])(\d+))?")


def parse_action(text: str) -> Action:
    """Reads the text form. Raises ScheduleError, with the text and an example of the form, if it is not one."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return overlap(*(parse_action(part) for part in text[1:-1].split("+")))
    match = _SIMPLE.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"cannot read the action {text!r}; the form is STAGE KIND MICROBATCH, as in 2F0, 2B0, 2SEND_F0>3"
        )
    stage, replica, kind, microbatch, version, arrow, peer = match.groups()
    if arrow != (">" if kind in SEND_KINDS else "<" if kind in RECV_KINDS else None):
        raise ScheduleError(
            f"action {text!r}: a SEND names its receiver as >RANK, a RECV its sender as <RANK, others neither"
        )
    return Action(
        kind,
        int(stage),
        int(microbatch),
        version=NONE if version is None else int(version),
        peer=NONE if peer is None else int(peer),
        replica=0 if replica is None else int(replica),
    )
