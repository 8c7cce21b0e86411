"""Forks the ranks of one host, watches them, and names the one that failed first.

    supervisor (never computes)
      fork -> rank 0 ---- beat, phase, error ---->  page of shared memory
      fork -> rank 1 ---- beat, phase, error ---->  page of shared memory
      polls the processes; after the first failure the others have `grace` seconds, then they are ended

A rank writes what it does into its page, so its last phase is known even after SIGKILL. A thread of the rank renews
the beat; it stands still when the process is stopped or something holds the interpreter lock, which waiting in a
collective does not. That distinguishes a frozen rank from the ranks that wait for it.

`megalite.launch.launcher` runs `--nprocs N` through this, and the rank harness of the tests runs every case through it.
Needs no torch. The proof is `tests/faults/test_launcher.py`.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from megalite.errors import ConfigError
from megalite.launch.rank_page import RankError, RankPage

STALE_SECONDS = 2.0
SAME_SECONDS = 0.5
"""Within these a second SIGINT is the same Ctrl-C: of a terminal, and of a program that passes it on."""
POLL_SECONDS = 0.25
PR_SET_PDEATHSIG = 1
INTERRUPTED = 128 + signal.SIGINT  # exit status of a run that Ctrl-C ended, as shells count


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. status: exit code, or minus the signal. hung: it had stopped running Python. ended: the
    supervisor ended it. seconds: when, on the monotonic clock."""

    rank: int
    status: int
    phase: str
    phase_age: float
    error: RankError | None
    hung: bool
    ended: bool
    seconds: float

    def describe(self) -> str:
        """One line: which rank, how it ended, in which phase."""
        where = f" in phase '{self.phase}'" if self.phase else ""
        if self.hung or self.ended:
            what = "stopped answering" if self.hung else "did not finish"
            return f"rank {self.rank} {what}{where} ({self.phase_age:.1f} s after its last report)"
        if self.error is not None:
            first_line = self.error.text.strip().split("\n")[0][:300]
            return f"rank {self.rank} failed{where}: {self.error.type}: {first_line}"
        if self.status < 0:
            names = {each.value: each.name for each in signal.Signals}
            by = names.get(-self.status, "an unknown signal")
            return f"rank {self.rank} was killed by {by} (signal {-self.status}){where}"
        return f"rank {self.rank} exited with status {self.status}{where}"


@dataclass(frozen=True)
class Outcome:
    """How all ranks ended. `culprit` is the one that failed first, None if all ended with status 0. signals: those that
    the supervisor has passed on to the ranks. at_once: a second Ctrl-C ended them all."""

    ends: tuple[RankEnd, ...]
    culprit: RankEnd | None
    timed_out: bool
    seconds: float
    signals: frozenset[int] = frozenset()
    at_once: bool = False

    @property
    def ended_by(self) -> int | None:
        """The signal that ended all ranks because the supervisor passed it on; Ctrl-C reaches them without it."""
        number = signal.SIGINT if self.at_once else 0 if self.culprit is None else -self.culprit.status
        return number if number in {*self.signals, signal.SIGINT} else None

    @property
    def exit_code(self) -> int:
        """0 (130 after Ctrl-C); the code that the culprit's exception or exit asks for; 1 for everything else."""
        if self.culprit is None:
            return INTERRUPTED if signal.SIGINT in self.signals else 0
        if self.ended_by is not None:  # a rank that lost another one first has an error of its own
            return 128 + self.ended_by
        return max(1, self.culprit.status) if self.culprit.error is None else self.culprit.error.exit_code

    def describe(self) -> str:
        """The culprit's line, then one line for every other rank that did not end well."""
        if self.culprit is None:
            return f"all {len(self.ends)} ranks finished"
        others = [end for end in self.ends if end.status and end is not self.culprit]
        return "\n  then ".join(end.describe() for end in [self.culprit, *others])


class _Rank:
    """A forked rank, seen from the supervisor."""

    def __init__(self, rank: int, pid: int, page: RankPage) -> None:
        self.rank, self.pid, self.page = rank, pid, page
        # Linux tells at once when a process is over; elsewhere the poll interval decides.
        self.fd = os.pidfd_open(pid) if sys.platform == "linux" else -1
        self.end: RankEnd | None = None
        self.hung = False
        self.ended = False

    def reap(self) -> bool:
        """Takes the exit status if the process is over; returns whether it is."""
        if self.end is not None:
            return True
        pid, wait_status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        if self.fd >= 0:
            os.close(self.fd)
        error = self.page.error
        self.end = RankEnd(
            rank=self.rank,
            status=os.waitstatus_to_exitcode(wait_status),
            phase=self.page.phase,
            phase_age=self.page.phase_age,
            error=error,
            hung=self.hung,
            ended=self.ended,
            seconds=error.seconds if error else time.monotonic(),
        )
        return True

    def send(self, signum: int) -> None:
        """Sends a signal, unless the process is already over."""
        if self.end is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Ends the rank and all that it started; SIGKILL, because a stopped process takes no other signal."""
        self.ended = True
        self.send(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def supervise(
    size: int,
    body: Callable[[int, RankPage], int | None],
    *,
    hang_seconds: float,
    deadline_seconds: float = float("inf"),
    grace_seconds: float = 2.0,
    forward: Sequence[int] = (),
) -> Outcome:
    """Runs `body(rank, page)` in `size` forked processes and waits for all of them.

    The caller must be single-threaded and must never have computed with more than one thread. After the first
    failure the others get `grace_seconds` to fail by themselves. A rank that does not run Python for `hang_seconds`
    has failed; so have all that still run after `deadline_seconds`. Both print their stacks to standard error first.

    body: its return value, or the `exit_code` of the exception that leaves it, is the rank's exit status.
    forward: signals that this process passes on to the ranks while it waits.
    """
    start = time.monotonic()
    # What was started under `nohup` continues without the terminal.
    forward = [n for n in forward if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    ranks: list[_Rank] = []
    timed_out = False
    with _forwarding(forward, ranks) as (passed_on, again):
        signal.pthread_sigmask(signal.SIG_BLOCK, forward)  # what comes while ranks are made reaches all of them
        try:
            _fork_ranks(size, body, parent, forward, ranks)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, forward)
        failed_at = float("inf")
        while not all([rank.reap() for rank in ranks]):
            now = time.monotonic()
            if failed_at == float("inf") and any(rank.end and rank.end.status for rank in ranks):
                failed_at = now
            hung = [rank for rank in ranks if rank.end is None and rank.page.beat_age > hang_seconds]
            timed_out = timed_out or now - start > deadline_seconds
            if hung or timed_out or now - failed_at > grace_seconds:
                _end(ranks, show_stacks=timed_out or bool(hung))
            else:
                _wait(ranks, min(POLL_SECONDS, start + deadline_seconds - now, failed_at + grace_seconds - now))
    for rank in ranks:  # What a dead rank had started must not outlive the run.
        rank.kill()
    ends = tuple(rank.end for rank in ranks if rank.end is not None)
    return Outcome(ends, find_culprit(ends), timed_out, time.monotonic() - start, frozenset(passed_on), bool(again))


def _fork_ranks(
    size: int, body: Callable[[int, RankPage], int | None], parent: int, forward: Sequence[int], ranks: list[_Rank]
) -> None:
    """Starts the ranks, which it appends. Raises ConfigError where the system has no room for one; none is left."""
    for number in range(size):
        try:
            page = RankPage()
            pid = os.fork()
        except OSError as error:
            _end(ranks, show_stacks=False)
            raise ConfigError(
                f"`nprocs`={size}: rank {number} could not be started ({error.strerror}); start fewer ranks, or raise "
                "the limits of processes and memory (ulimit -u, ulimit -v)"
            ) from None
        if pid == 0:
            _be_rank(number, page, body, parent, forward)
        ranks.append(_Rank(number, pid, page))


def find_culprit(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The first rank that failed on its own; else one that stopped answering, one that never came back to the others,
    the first that lost a peer."""

    def first(candidates: list[RankEnd]) -> RankEnd | None:
        return min(candidates, key=lambda end: end.seconds, default=None)

    failed = [end for end in ends if end.status]
    own = [end for end in failed if not end.ended and not (end.error and end.error.communication)]
    hung = max((end for end in failed if end.hung), key=lambda end: end.phase_age, default=None)
    missing = max((end for end in failed if end.ended), key=lambda end: end.phase_age, default=None)
    return first(own) or hung or missing or first(failed)


def _wait(ranks: Sequence[_Rank], seconds: float) -> None:
    """Sleeps until a rank is over, for at most `seconds`."""
    fds = [rank.fd for rank in ranks if rank.end is None and rank.fd >= 0]
    if not fds:
        time.sleep(max(0.0, min(seconds, 0.02)))
        return
    wait(fds, max(0.0, seconds))


def _end(ranks: Sequence[_Rank], *, show_stacks: bool) -> None:
    """Ends every rank that still runs; notes which of them were frozen."""
    alive = [rank for rank in ranks if rank.end is None]
    for rank in alive:
        rank.hung = rank.page.beat_age > STALE_SECONDS  # it has not run Python for a while
        if show_stacks:
            rank.send(signal.SIGUSR2)
    if show_stacks:
        time.sleep(0.3)  # Time for the C-level handler to write; it needs no interpreter lock.
    for rank in alive:
        rank.kill()
    for rank in alive:
        while not rank.reap():
            time.sleep(0.002)


@contextlib.contextmanager
def _forwarding(signals: Sequence[int], ranks: Sequence[_Rank]) -> Iterator[tuple[dict[int, float], list[float]]]:
    """While active, the given signals of this process go to every rank instead; a second Ctrl-C ends them, wherever
    they are. Yields those that did, and when each first came; and when a second Ctrl-C came."""
    passed_on: dict[int, float] = {}
    again: list[float] = []

    def forward(signum: int, _frame: object) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT and now - passed_on.get(signum, now) > SAME_SECONDS:
            again.append(now)
        passed_on.setdefault(signum, now)
        for rank in ranks:
            if again:
                rank.kill()
            else:
                rank.send(signum)

    previous = {signum: signal.signal(signum, forward) for signum in signals}
    try:
        yield passed_on, again
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _be_rank(
    rank: int, page: RankPage, body: Callable[[int, RankPage], int | None], parent: int, forwarded: Sequence[int]
) -> None:
    """The life of a forked rank; never returns."""
    status = 1
    try:
        os.setsid()  # Its own group, so that all it starts can be ended with it.
        die_with_parent(parent)
        for signum in forwarded:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        page.start_beating()
        status = body(rank, page) or 0
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException as error:
        description = RankError.of(error)
        page.set_error(description)
        status = description.exit_code
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # Not sys.exit: what the supervisor registered for its own exit is not ours to run.


def die_with_parent(parent: int) -> None:
    """Asks Linux to end this process when its supervisor is gone, however that happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
