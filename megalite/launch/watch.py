"""What `--nprocs` has from its supervisor, for ranks that torchrun, srun, mpirun or a hand has started.

    launcher -- starts --> rank -- forks --> guard (never computes)
                            |  beat, phase --> page of shared memory: a rank that stands still is named and ended
                            '-- store: who has failed, why, and who says nothing any more

A rank that breaks leaves word in the store where the ranks have met. A rank that loses a peer leaves its name there,
and who has not done so after a few seconds is the one that is missing: it is named with its host. Who breaks no
connection when he is lost is found by `pulse.py`. Ranks that hear of an end and do not come to one by themselves are
ended. A rank whose launcher has gone ends too: nothing else would end it. The proof is
`tests/faults/test_outer_launchers.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megalite.errors import rank_name
from megalite.launch import pulse
from megalite.launch.environment import LaunchEnvironment
from megalite.launch.output import print_lost
from megalite.launch.pulse import Patience, Pulse
from megalite.launch.rank_page import BEAT_SECONDS, RankPage
from megalite.launch.signals import ear, ends_at_once
from megalite.launch.supervisor import die_with_parent

if TYPE_CHECKING:
    import torch.distributed as dist


ROLL_CALL_SECONDS = 3.0
ANSWER_SECONDS = 8.0
LISTEN_SECONDS = 1.0
GRACE_SECONDS = 6.0
LAST_WORD_SECONDS = 2.0
MAX_NAMES = 16
OVER, CAUSE, TOLD = "end/over", "end/cause", "end/told"


class RankWatch:
    """Watches over one rank of an outer launcher, from the beginning of the process. page: what the rank does.
    hang_seconds: a rank that runs no Python for so long is ended, from its first phase on."""

    def __init__(self, place: LaunchEnvironment, page: RankPage, *, hang_seconds: float, host: str) -> None:
        self._place, self._page, self._host = place, page, host
        self._me = rank_name(place.rank, host)
        self._store: dist.Store | None = None
        self._answered: Patience | None = None
        self._leaving = threading.Event()
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        parent = os.getpid()
        self._launcher = place.started_by or os.getppid() if place.parent else None
        page.beat()
        if os.fork() == 0:
            _guard(page, parent, self._me, hang_seconds)
        self._listen_to_signals = ear() if ends_at_once() else None
        page.start_beating(self._on_beat)

    def meet(self, store: dist.Store) -> None:
        """The ranks meet in `store`: from now on it is asked whether one of them is lost or has failed. It is a
        connection of this watch's own: where the rank waits in the store, others that use it wait too."""
        self._store = store
        self._answered = Patience()
        watched = Pulse(store, self._place, self._host)
        threading.Thread(target=self._listen, args=(watched,), name="watch", daemon=True).start()

    def leave(self) -> None:
        self._leaving.set()

    def tells(self, text: str) -> bool | None:
        """Whether no other rank prints this error already (nor is the meeting point gone with the rank that did). None
        where the ranks have not met."""
        if self._store is None:
            return None
        store, key = self._store, "told/" + hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
        return _within(ANSWER_SECONDS, lambda: store.add(key, 1)) == 1

    def leave_word(self, cause: str) -> bool:
        """This rank has failed by itself: the others need not look for who is missing. Returns whether it is the first
        one of its host."""
        self._leaving.set()
        store = self._store
        if store is None:
            return self._place.local_rank == 0
        _within(ANSWER_SECONDS, lambda: self._roll_call(store, f"{self._me} failed{self._where()}: {cause}"))
        return _within(ANSWER_SECONDS, lambda: store.add(f"failed/{self._host}", 1)) in (1, None)

    def account(self, lost: str) -> str | None:
        """Who is to blame for a peer that was lost; None where another rank says so. lost: what this rank saw."""
        self._leaving.set()
        store = self._store
        if store is None:
            return f"{self._me} lost a peer{self._where()}: {lost}"
        answer = _within(ANSWER_SECONDS, lambda: self._roll_call(store, ""))
        if answer is not None:
            return answer[0] if answer else None
        if self._place.local_rank and self._place.rank != 1:
            return None
        return f"{self._meeting_point()} does not answer any more{self._where()}: {lost}"

    def _meeting_point(self) -> str:
        who = "the launcher's meeting point" if self._place.agent_store else "rank 0"
        return f"{who} ({self._place.master_addr}:{self._place.master_port})"

    def _roll_call(self, store: dist.Store, cause: str) -> list[str]:
        """Says that this rank ends, waits for the others to do so; what is to be told, if it is this rank's part."""
        store.set(f"end/{self._place.rank}", self._page.phase)
        if cause:
            store.set(CAUSE, cause)
        store.set(OVER, "")
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        missing = [rank for rank in range(self._place.size) if rank != self._place.rank]
        agent, first = self._place.agent_store, self._place.rank == 0
        if not agent and not first:
            return []  # rank 0 serves the store: it stays while others may ask, and it tells
        while missing and time.monotonic() < deadline and (first or not store.check([CAUSE])):
            if store.check([f"end/{missing[0]}"]):
                missing.pop(0)
            else:
                time.sleep(0.02)
        if store.check([CAUSE]) or store.add(TOLD, 1) > 1:
            return []
        missing = [rank for rank in missing if not store.check([f"end/{rank}"])]
        if not missing:
            return [f"the ranks lost each other{self._where()}, though all of them answer: is the network whole?"]
        return [f"{rank_names(store, missing)} did not answer any more; {self._me} waited{self._where()}"]

    def _where(self) -> str:
        return f" in phase '{self._page.phase}'" if self._page.phase else ""

    def _listen(self, watched: Pulse) -> None:
        """Looks for ranks that are lost; ends this rank some seconds after another one has ended, unless it does so by
        itself."""
        assert self._store is not None and self._answered is not None
        stacks = False
        try:
            while not self._leaving.wait(LISTEN_SECONDS):
                lost = watched.lost()
                self._answered.heard()
                if lost:
                    self._tell_lost(lost)
                if self._store.check([OVER]):
                    reason = " though another rank has ended"
                    stacks = not self._store.check([CAUSE])  # where the cause is told they would only bury it
                    break
        except (RuntimeError, OSError):
            # The connections break with the store's server, except those through shared memory.
            reason = f": {self._meeting_point()} does not answer any more"
        if not self._leaving.wait(GRACE_SECONDS):
            self._end(f"{self._me} did not finish{self._where()}{reason}", stacks=stacks)

    def _tell_lost(self, lost: str) -> None:
        """Names who is lost, unless somebody has, and has all ranks end."""
        assert self._store is not None
        # Asked first: who takes the word must speak, or nobody does. A rank that has told why it ended is not lost.
        if self._leaving.is_set() or self._store.check([CAUSE]):
            return
        if self._store.add(TOLD, 1) == 1:
            print_lost(f"{lost} did not answer any more; {self._me} waited{self._where()}")
        self._leave_cause(f"{lost} did not answer any more")

    def _leave_cause(self, cause: str) -> None:
        """Has all ranks end, for a reason that is known."""
        if self._store is not None:
            self._store.set(CAUSE, cause)
            self._store.set(OVER, "")

    def _on_beat(self) -> None:
        if self._listen_to_signals is not None:
            self._listen_to_signals()
        if self._launcher is not None and os.getppid() != self._launcher:
            line = f"{self._me} ends{self._where()}: its launcher ({self._place.launcher}) is gone"
            self._end(line, word=True)
        if self._answered is not None and not self._leaving.is_set() and self._answered.is_over():
            silent = f"for {pulse.SILENCE_SECONDS:g} s: is this host cut off?"
            self._end(f"{self._me} ends{self._where()}: {self._meeting_point()} has not answered {silent}")

    def _end(self, line: str, *, stacks: bool = False, word: bool = False) -> None:
        """word: leaves word for ranks that would not notice, since no connection breaks in shared memory."""
        with contextlib.suppress(Exception):
            print(f"error: {line}", file=sys.stderr, flush=True)
            if stacks:
                faulthandler.dump_traceback(file=2, all_threads=True)
        if word:
            _within(LAST_WORD_SECONDS, lambda: self._leave_cause(line))
        os._exit(1)


def rank_names(store: dist.Store, ranks: list[int]) -> str:
    """`rank 3 (host b), rank 5 (never heard of)`: the host is known once the rank was heard of."""
    names = []
    for rank in ranks[:MAX_NAMES]:
        host = store.get(f"host/{rank}").decode() if store.check([f"host/{rank}"]) else ""
        names.append(rank_name(rank, host))
    return ", ".join(names) + (f" and {len(ranks) - MAX_NAMES} more" if len(ranks) > MAX_NAMES else "")


T = TypeVar("T")


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of `call`; None where it fails or does not come back: a store hangs with the rank that serves it."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _guard(page: RankPage, parent: int, name: str, hang_seconds: float) -> None:
    """The life of the guard; never returns. It ends with its rank."""
    with contextlib.suppress(BaseException):
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        die_with_parent(parent)
        while os.getppid() == parent:
            time.sleep(BEAT_SECONDS)
            # Before the first phase libraries are loaded, which runs no Python for as long as a slow disk takes.
            if page.phase and page.beat_age > hang_seconds:
                age = f"{page.phase_age:.1f} s after its last report"
                line = f"error: {name} stopped answering in phase '{page.phase}' ({age})"
                print(line, file=sys.stderr, flush=True)
                os.kill(parent, signal.SIGUSR2)  # its stacks, if it can still be asked
                time.sleep(0.3)
                os.kill(parent, signal.SIGKILL)
    os._exit(0)
