"""An executor that runs what has arrived (AxoNN; Singh and Bhatele 2022, arXiv:2110.13005).

It takes the same lists as `Executor`, and is free in one thing: how forwards and backwards take turns
(`schedule/arrival.py`). Each kind runs in the order of the micro-batches, which is that of the messages of a direction.
Ranks that compute a micro-batch together follow the first of them, for their collectives must meet.

Proof: `tests/equivalence/test_message_driven.py`: delays drawn anew never change a bit.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megalite.comm import Arrivals, Axis, Channel, Incoming, ParallelMesh, agree_max, device_of
from megalite.errors import ConfigError
from megalite.parallel.pipeline.executor import DIRECTIONS, Executor, MicrobatchSource
from megalite.schedule import BACKWARD, FORWARD, Action, Program, share_of


class MessageDriven(Executor):
    """limit: micro-batches in flight at most. together: the ranks that compute a micro-batch with this one.
    line: those of the pipeline.

    Other arguments: those of `Executor`. Raises ConfigError where messages are not those of a plain channel over gloo.
    """

    def __init__(self, *given: Any, limit: int, together: Axis, line: Axis, **more: Any) -> None:
        super().__init__(*given, **more)
        (self._stage,) = self.stages.values()
        self._limit, self._together = limit, together
        self._share = share_of(self.rank, self.placement.num_ranks, limit)
        if type(self.channel) is not Channel or device_of(line).type != "cpu":
            raise ConfigError(
                "`pipeline_schedule`=message-driven: is told by gloo what has arrived, on ranks of one host or with "
                "`sequence_parallel`; use `distributed_backend`=gloo, or `pipeline_schedule`=eager-1f1b"
            )

    def run(self, actions: Sequence[Action], source: MicrobatchSource) -> Iterator[Action]:
        """Runs the actions of one batch: what stands before the first computation, then the computations, each with
        what follows it, as their inputs arrive."""
        pieces: list[list[Action]] = [[]]
        posts: dict[str, list[partial[Incoming]]] = {FORWARD: [], BACKWARD: []}
        for action in actions:
            if (direction := DIRECTIONS.get(action.kind)) is not None:
                posts[direction].append(partial(self._posted_receive, action))
                continue
            if action.is_compute:
                pieces.append([])
            pieces[-1].append(action)
        yield from super().run(pieces[0], source)
        waiting = {kind: deque(piece for piece in pieces[1:] if piece[0].kind == kind) for kind in posts}
        total, arrivals = len(waiting[FORWARD]), Arrivals(posts, self._together.waits)
        for _ in pieces[1:]:
            kind = self._choose(arrivals, total - len(waiting[FORWARD]), total - len(waiting[BACKWARD]), total)
            piece = waiting[kind].popleft()
            if posts[kind]:
                self._ready[kind, *piece[0].stage_key, piece[0].microbatch] = arrivals.take(kind)
            yield from super().run(piece, source)

    def _choose(self, arrivals: Arrivals, begun: int, ended: int, total: int) -> str:
        """The kind of the next computation, whose input is here. begun, ended: forwards and backwards so far."""
        may = [BACKWARD] if ended < begun else []
        if begun < total and begun - ended < self._limit:
            may.insert(0 if begun - ended < self._share else 1, FORWARD)
        chosen = -1
        if len(may) > 1 and self._together.is_first:
            while (chosen := self._first_here(arrivals, may)) < 0:
                arrivals.wait()
        kind = may[int(agree_max(chosen, self._together)) if len(may) > 1 else 0]
        while self._first_here(arrivals, [kind]) < 0:
            arrivals.wait()
        return kind

    def _first_here(self, arrivals: Arrivals, kinds: Sequence[str]) -> int:
        """Place of the first of the kinds whose input is here, -1 where there is none."""
        needs_none = {FORWARD: self._stage.is_first, BACKWARD: self._stage.is_last}
        return next((place for place, kind in enumerate(kinds) if needs_none[kind] or arrivals.here(kind)), -1)


def executor_of(program: Program, mesh: ParallelMesh, *given: Any, **more: Any) -> Executor:
    """The executor of this rank that runs `program`. given, more: arguments of `Executor`."""
    if not program.max_in_flight or mesh.size("pp") == 1:
        return Executor(mesh.coordinate("pp"), *given, **more)
    more |= {"limit": program.max_in_flight, "together": mesh.over("tp", "cp"), "line": mesh["pp"]}
    return MessageDriven(mesh.coordinate("pp"), *given, **more)
