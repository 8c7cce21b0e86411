"""`run_ranks` and its kin: the pytest side of the rank harness."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from megalite.launch import Outcome
from megalite.testing import wire
from megalite.testing.case import Case
from megalite.testing.fault import Fault
from megalite.testing.zygote import zygote_environment

Faults = Sequence[Fault | str]

# A case takes a tenth of a second to two seconds; a busy shared machine has been seen to take twenty times as long.
PATIENCE_SECONDS = 120.0


class RanksFailed(AssertionError):
    """A case failed. The text names the rank that failed first and shows its traceback and the end of its output."""


@dataclass(frozen=True)
class CaseResult:
    """What a case left: how each rank ended, results of the ranks that returned (None elsewhere), their output."""

    outcome: Outcome
    results: list[Any]
    output: list[str]

    def describe(self) -> str:
        """Readable account of a failure."""
        culprit = self.outcome.culprit
        if culprit is None:
            return self.outcome.describe()
        lines = [self.outcome.describe()]
        if self.outcome.timed_out:
            lines.insert(0, f"the case was ended after {self.outcome.seconds:.1f} s")
        shown = range(len(self.output)) if self.outcome.timed_out else [culprit.rank]
        if culprit.error is not None:
            lines.append(culprit.error.traceback.rstrip())
        for rank in shown:
            if self.output[rank]:
                lines.append(f"--- output of rank {rank} (its end) ---\n{self.output[rank][-4000:].rstrip()}")
        return "\n".join(lines)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, expect: str | None = None, **options: Any
) -> list[Any]:
    """Runs `function(world, *args, **kwargs)` on `world_size` fresh ranks with a process group; results by rank.

    Args:
        function: defined at the top of an importable module; it gets a `World` first. What it returns may hold plain
            values, dataclasses of them, and tensors in lists, tuples and dicts.
        expect: regular expression; the case must fail and the account of the failure must match.
        options: those of `try_ranks`, and `kwargs`.

    Raises:
        RanksFailed: a rank failed, or none did although `expect` says so.
    """
    __tracebackhide__ = True
    case = try_ranks(function, world_size, *args, **options)
    account = case.describe()
    if expect is None and case.outcome.culprit is not None:
        raise RanksFailed(account)
    if expect is not None and (case.outcome.culprit is None or not re.search(expect, account)):
        raise RanksFailed(f"expected a failure that matches {expect!r}, got: {account}")
    return case.results


def run_single(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs `function(World(), *args, **kwargs)` in one fresh process with one thread and no process group.

    This is how the reference is computed: pytest's own process must not be what the ranks are compared with, its
    number of threads and its random state depend on the tests before. Raises RanksFailed.
    """
    __tracebackhide__ = True
    return run_ranks(function, 1, *args, **options)[0]


def try_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = PATIENCE_SECONDS,
    peer_timeout: float | None = None,
    env: dict[str, str | None] | None = None,
    faults: Faults = (),
    device: str = "cpu",
    **kwargs: Any,
) -> CaseResult:
    """As `run_ranks`, but never raises for a failed rank: the result says how each one ended.

    Args:
        timeout: seconds for the whole case. peer_timeout: seconds that a collective waits (0.6 of timeout).
        env: environment variables of the ranks; None removes one.
        faults: what shall happen at fault points.
        device: "cuda": rank r takes GPU r (shared where there are too few; then gloo carries the messages).
    """
    with tempfile.TemporaryDirectory(prefix="megalite-ranks-") as name:
        folder = Path(name)
        case = Case(
            module=function.__module__,
            qualname=function.__qualname__,
            path=tuple(sys.path),
            arguments=wire.encode({"args": args, "kwargs": kwargs}),
            size=world_size,
            device=device,
            folder=folder,
            env=env or {},
            faults=tuple(fault if isinstance(fault, str) else fault.text for fault in faults),
            timeout=timeout,
            peer_timeout=0.6 * timeout if peer_timeout is None else peer_timeout,
        )
        outcome = _ask_zygote(case)
        output = [_read(folder / f"rank{rank}.log").decode(errors="replace") for rank in range(world_size)]
        results = [_read(folder / f"rank{rank}.result") for rank in range(world_size)]
    for rank, text in enumerate(output):
        if text:
            print(f"--- output of rank {rank} ---\n{text}", end="")
    return CaseResult(outcome, [wire.decode(result) if result else None for result in results], output)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _ask_zygote(case: Case) -> Outcome:
    """Has the case run; a zygote that died is replaced for the next case."""
    zygote = _zygote()
    try:
        zygote.send(case)
        outcome: Outcome = zygote.recv()
    except (EOFError, OSError) as error:
        _zygote.cache_clear()
        raise RuntimeError("the process that forks the ranks has died: its standard error says why") from error
    return outcome


@functools.cache
def _zygote() -> Connection:
    """Starts the zygote of this process; it ends when this process does."""
    ours, theirs = Pipe()
    root = Path(__file__).resolve().parents[2]
    environment = zygote_environment(dict(os.environ))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", "megalite.testing.zygote"]
    subprocess.Popen(
        [*command, str(theirs.fileno()), *{"pytest"}.intersection(sys.modules)],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return ours
