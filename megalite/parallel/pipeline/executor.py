"""The executor: one interpreter of actions for every schedule.

It runs the actions of one rank in order, whatever schedule they come from; a single process runs the same F, B, REDUCE
and STEP. What a batch leaves behind (activations of forwards that were begun early, receives that were posted early,
tensors not yet sent) stays in the executor, so asynchronous schedules such as PipeDream-2BW need nothing special.

Actions that concern weights (REDUCE, NORM, STEP, UNSHARD, RESHARD) are not carried out here: `run` yields each of them
to its caller when its turn comes. Micro-batches come from a `MicrobatchSource` by their global number; the executor
drops them after their last use.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from megalite.comm import Channel, Incoming, MessageLabel
from megalite.errors import RuntimeFailure
from megalite.faults import fault_point
from megalite.gradient import GradSink
from megalite.microbatch import StageInput
from megalite.parallel.pipeline.stage import Stage
from megalite.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FORWARD,
    NONE,
    PREFETCH,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    Action,
    StageKey,
    StagePlacement,
)

_BACKWARD_KINDS = frozenset({BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
DIRECTIONS = {RECV_F: FORWARD, RECV_B: BACKWARD}
_OF_STAGE = {BACKWARD_WEIGHT: "backward_weight", RECOMPUTE: "recompute", EVICT: "evict", PREFETCH: "prefetch"}
"""Kinds that move no tensor between stages -> the stage's method."""
# By name: an executor that held its own methods would stay, with all that it has run, until garbage is collected.
_HANDLERS = {
    FORWARD: "_forward",
    BACKWARD: "_backward",
    BACKWARD_INPUT: "_backward",
    **{kind: "_of_stage" for kind in _OF_STAGE},
    SEND_F: "_send",
    SEND_B: "_send",
    RECV_F: "_post",
    RECV_B: "_post",
}


class MicrobatchSource(Protocol):
    """Where micro-batches come from."""

    def get(self, microbatch: int) -> tuple[StageInput, Tensor]:
        """The micro-batch with this global number, and the factor of its summed loss (0-dim tensor)."""
        ...


class Events:
    """Callbacks to the owner of the weights. These defaults are for forward-only runs."""

    def newest_version(self) -> int:
        """The version that an action without one uses: that of the newest weights."""
        return 0

    def before_backward(self, stage: StageKey, microbatch: int, *, last: Mapping[GradSink, int] | bool) -> None:
        """The stage is about to add the micro-batch's gradient; `last`: it is the last contribution to its update, or
        how much of it each sink still gets, where a part has been added before."""


@dataclass(frozen=True)
class ActionTiming:
    """An executed action, in seconds of one clock. It starts when its input has arrived: time spent waiting is idle."""

    action: Action
    start: float
    end: float


class Executor:
    """Runs one rank's actions.

    rank: pipeline rank.
    stages: this rank's stages by (stage, replica).
    synchronize: called before clocks are read while tracing, so that a GPU's stream has caught up; None on the CPU.

    A profiler may set `mark`: each action then runs inside `mark(action.words)`. `events` may change between batches.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[StageKey, Stage],
        placement: StagePlacement,
        channel: Channel,
        events: Events,
        *,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.stages = dict(stages)
        self.placement = placement
        self.trace: list[ActionTiming] | None = None
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        self._no_mark = nullcontext()
        self.channel = channel
        self.events = events
        self._synchronize = synchronize
        self._arrival = 0.0
        # Kept between actions and batches: messages and tensors by (F or B, stage, replica, micro-batch).
        self._posted: dict[tuple[str, int, int, int], Incoming] = {}
        self._ready: dict[tuple[str, int, int, int], Tensor] = {}
        self._outgoing: dict[tuple[str, int, int, int], Tensor] = {}
        self._microbatches: dict[int, tuple[StageInput, Tensor]] = {}
        self._forwards: Counter[int] = Counter()
        self._losses: dict[int, Tensor] = {}

    def run(self, actions: Sequence[Action], source: MicrobatchSource) -> Iterator[Action]:
        """Runs the actions in order. Yields those that concern weights, for the caller to carry out."""
        for index, action in enumerate(actions):
            for part in action.parts or (action,):
                fault_point("action", kind=part.kind, stage=part.stage, microbatch=part.microbatch)
                if part.kind in _BACKWARD_KINDS:
                    last: Mapping[GradSink, int] | bool = part is action and _reduces_next(actions, index)
                    if last and part.kind == BACKWARD_WEIGHT:
                        last = self.stages[part.stage_key].postponed(part.microbatch)
                    self.events.before_backward(part.stage_key, part.microbatch, last=last)
                start = self._clock()
                with self._no_mark if self.mark is None else self.mark(part.words):
                    if (handler := _HANDLERS.get(part.kind)) is not None:
                        getattr(self, handler)(part, source)
                    else:
                        yield part
                if self.trace is not None:
                    self.trace.append(ActionTiming(part, max(start, self._arrival), self._clock()))

    def take_losses(self) -> dict[int, Tensor]:
        """The summed losses of the micro-batches whose last stage has run here since the last call, by number."""
        losses, self._losses = self._losses, {}
        return losses

    def _clock(self) -> float:
        if self.trace is not None and self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def finish(self) -> None:
        """Waits until all messages are sent. Raises RuntimeFailure if the pipeline did not drain."""
        self.channel.flush()
        waiting = [*self._posted, *self._ready, *self._outgoing]
        in_flight = sum(stage.num_in_flight for stage in self.stages.values())
        if waiting or in_flight:
            raise RuntimeFailure(
                f"pipeline rank {self.rank}: the pipeline did not drain: {len(waiting)} tensors never consumed, "
                f"{in_flight} micro-batches without their backward"
            )

    # one handler per kind of action

    def _forward(self, action: Action, source: MicrobatchSource) -> None:
        stage = self.stages[action.stage_key]
        microbatch, factor = self._microbatch(action, source)
        version = action.version if action.version != NONE else self.events.newest_version()
        x = None if stage.is_first else self._take("F", action)
        out = stage.forward(action.microbatch, x, microbatch, factor, version=version)
        if stage.is_last:
            self._losses[action.microbatch] = out
        else:
            self._pass_on("F", out, action, to=action.stage + 1)

    def _backward(self, action: Action, source: MicrobatchSource) -> None:
        stage = self.stages[action.stage_key]
        dy = None if stage.is_last else self._take("B", action)
        whole = action.kind == BACKWARD
        dx = (stage.backward if whole else stage.backward_input)(action.microbatch, dy)
        if dx is not None:
            self._pass_on("B", dx, action, to=action.stage - 1)

    def _of_stage(self, action: Action, source: MicrobatchSource) -> None:
        getattr(self.stages[action.stage_key], _OF_STAGE[action.kind])(action.microbatch)

    def _send(self, action: Action, source: MicrobatchSource) -> None:
        kind, step = ("F", 1) if action.kind == SEND_F else ("B", -1)
        target = action.stage + step
        x = self._outgoing.pop((kind, target, action.replica, action.microbatch))
        stage = self.stages[action.stage_key]
        spec = (stage.leaving if kind == "F" else stage.arriving)(action.microbatch)
        x = x.reshape(spec.shape)  # as the peer expects it, however samples are cut
        self.channel.send(x, peer=action.peer, label=MessageLabel(kind, target, action.microbatch))

    def _post(self, action: Action, source: MicrobatchSource) -> None:
        key = (DIRECTIONS[action.kind], action.stage, action.replica, action.microbatch)
        self._posted[key] = self._posted_receive(action)

    def _posted_receive(self, action: Action) -> Incoming:
        stage, kind = self.stages[action.stage_key], DIRECTIONS[action.kind]
        spec = (stage.arriving if kind == FORWARD else stage.leaving)(action.microbatch)
        return self.channel.post_recv(spec, peer=action.peer, label=MessageLabel(kind, action.stage, action.microbatch))

    # tensors between stages

    def _take(self, kind: str, action: Action) -> Tensor:
        key = (kind, action.stage, action.replica, action.microbatch)
        if key in self._ready:
            return self._ready.pop(key)
        if key not in self._posted:
            raise RuntimeFailure(f"pipeline rank {self.rank}: {action} has no input: the schedule never received it")
        x = self._posted.pop(key).wait()
        if self.trace is not None:
            self._arrival = self._clock()
        return x

    def _pass_on(self, kind: str, x: Tensor, action: Action, *, to: int) -> None:
        here = self.placement.rank_of(to, action.replica, action.microbatch) == self.rank
        table = self._ready if here else self._outgoing
        table[kind, to, action.replica, action.microbatch] = x

    def _microbatch(self, action: Action, source: MicrobatchSource) -> tuple[StageInput, Tensor]:
        """The action's micro-batch, kept until every stage of its replica on this rank has run its forward."""
        number = action.microbatch
        if number not in self._microbatches:
            self._microbatches[number] = source.get(number)
        self._forwards[number] += 1
        if self._forwards[number] < sum(replica == action.replica for _, replica in self.stages):
            return self._microbatches[number]
        del self._forwards[number]
        return self._microbatches.pop(number)


def _reduces_next(actions: Sequence[Action], index: int) -> bool:
    """Whether REDUCE of the stage follows the backward at `index` before anything else is computed."""
    key = actions[index].stage_key
    later = islice(actions, index + 1, None)
    return next((a.kind == REDUCE for a in later if a.is_compute or (a.kind, a.stage_key) == (REDUCE, key)), False)
