"""Work of some ranks that may take longer than any collective waits: tokenising, indexing, a slow disk.

    working rank   main thread:  vote ---- vote ---- vote ---- done      (its work runs in a second thread)
    waiting rank   main thread:  vote ---- vote ---- vote ---- done

A vote is a small collective, so a rank that dies or stops is noticed as anywhere else, and the work itself has all the
time it needs.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from megalite.comm.axis import Axis
from megalite.comm.collectives import agree_max
from megalite.comm.gathered_json import all_gather_json
from megalite.errors import DataError, MegaliteError

VOTE_SECONDS = 0.5
IDLE, REFUSED, WORKING = 0, 1, 2  # the largest vote counts

T = TypeVar("T")


def patiently(work: Callable[[], T] | None, axis: Axis) -> T | None:
    """Runs `work` (None: this rank has nothing to do) and returns its result when all ranks are done. Collective.

    Raises what `work` raises; where that is a MegaliteError the other ranks raise DataError with its text.
    """
    if axis.size == 1:
        return work() if work is not None else None
    job = _Job(work)
    while (vote := int(agree_max(job.state(), axis))) == WORKING:
        pass
    if vote == REFUSED:
        refusals = [text for text in all_gather_json(str(job.problem or ""), axis) if text]
        raise job.problem or DataError(refusals[0])
    return job.result


class _Job(Generic[T]):
    """Work in a thread of its own. result, problem: how it ended."""

    def __init__(self, work: Callable[[], T] | None) -> None:
        self.result: T | None = None
        self.problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="patient work", daemon=True)
        if work is not None:
            self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.result = work()
        except Exception as problem:  # raised again by the main thread
            self.problem = problem

    def state(self) -> int:
        """This rank's vote, after a while if it works. Raises what is no refusal of the work but a failure."""
        if self._thread.ident is not None:
            self._thread.join(VOTE_SECONDS)
        if self._thread.is_alive():
            return WORKING
        if self.problem is not None and not isinstance(self.problem, MegaliteError):
            raise self.problem
        return REFUSED if self.problem is not None else IDLE
