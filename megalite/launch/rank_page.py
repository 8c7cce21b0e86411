"""The page of shared memory through which a rank tells its supervisor how it is, even after it was killed."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megalite.errors import MegaliteError, PeerLost

CALLERS = ("_run_rank", "_run_alone", "begin")
"""Functions of the launcher and of `library/ranks.py` that call what every rank runs."""
BEAT_SECONDS = 0.25
PAGE_BYTES = 256 * 1024  # 28,000 characters of an error, escaped; what is not written to takes no memory
PHASE_START = 64  # after the header
PHASE_BYTES = 256
ERROR_START = 512


class _Header(ctypes.Structure):
    """The start of a page. The processor writes each aligned field whole; `struct.pack_into` would write zeros first,
    and a supervisor that looked just then would end a healthy run."""

    beat: float
    phase_since: float
    phase_bytes: int
    error_bytes: int
    _fields_ = (
        ("beat", ctypes.c_double),
        ("phase_since", ctypes.c_double),
        ("phase_bytes", ctypes.c_uint32),
        ("error_bytes", ctypes.c_uint32),
    )


COMMUNICATION = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|tcpstore|filestore", re.IGNORECASE
)
"""Text of an error that a rank raises because *another* rank is gone."""
ASIDES = re.compile(r"\[\S+\.(?:cc|cpp|h):\d+\] ?|\. This is typically caused by .*")
"""What gloo adds to each of its errors: where in its source, and advice to read the logs of the others."""


@dataclass(frozen=True)
class RankError:
    """An exception as it left a rank. exit_code: the status that it asks for. for_user: `text` is written for the user,
    the traceback is not wanted. communication: a peer was missing, so the cause is elsewhere. seconds: when, on the
    monotonic clock."""

    type: str
    text: str
    traceback: str
    exit_code: int
    for_user: bool
    communication: bool
    seconds: float

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        return cls(
            type=type(error).__name__,
            text=ASIDES.sub("", str(error))[:8000],
            traceback="".join(traceback.format_exception(type(error), error, _below_us(error)))[-20000:],
            exit_code=error.exit_code if isinstance(error, MegaliteError) else 1,
            for_user=isinstance(error, MegaliteError),
            communication=_is_communication(error),
            seconds=time.monotonic(),
        )


def _below_us(error: BaseException) -> TracebackType | None:
    """The traceback from where the launcher has called what a rank runs; all of it where the launcher has failed."""
    here = Path(__file__).parent
    ours = (str(here) + os.sep, str(here.parent / "library" / "ranks.py"))
    frame, caller = error.__traceback__, ""
    while frame is not None and (code := frame.tb_frame.f_code).co_filename.startswith(ours):
        frame, caller = frame.tb_next, code.co_name
    return frame if frame is not None and caller in CALLERS else error.__traceback__


class RankPage:
    """Written by the rank, read by the supervisor; inherited over `fork`. Every call costs about a microsecond."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE_BYTES)
        self._header = _Header.from_buffer(self._memory)
        self._header.beat = self._header.phase_since = time.monotonic()

    def start_beating(self, also: Callable[[], None] = lambda: None) -> None:
        """Starts the thread that renews the beat, and calls `also`, for as long as the process can run Python."""
        threading.Thread(target=self._beat, args=(also,), name="beat", daemon=True).start()

    def _beat(self, also: Callable[[], None]) -> None:
        while True:
            self.beat()
            also()
            time.sleep(BEAT_SECONDS)

    def beat(self) -> None:
        """Shows that this process can run Python."""
        self._header.beat = time.monotonic()

    def set_phase(self, phase: str) -> None:
        """Says what the rank does from now on."""
        text = phase.encode()[:PHASE_BYTES]
        self._memory[PHASE_START : PHASE_START + len(text)] = text
        self._header.phase_since = time.monotonic()
        self._header.phase_bytes = len(text)

    def set_error(self, error: RankError) -> None:
        """Leaves the exception that ends the rank."""
        text = json.dumps(vars(error)).encode()[: PAGE_BYTES - ERROR_START]
        self._memory[ERROR_START : ERROR_START + len(text)] = text
        self._header.error_bytes = len(text)

    @property
    def beat_age(self) -> float:
        """Seconds since the rank last showed that it can run Python."""
        return time.monotonic() - self._header.beat

    @property
    def phase(self) -> str:
        """What the rank last said it does, or an empty text."""
        return self._memory[PHASE_START : PHASE_START + self._header.phase_bytes].decode(errors="replace")

    @property
    def phase_age(self) -> float:
        """Seconds since the rank last reported a phase (or was started)."""
        return time.monotonic() - self._header.phase_since

    @property
    def error(self) -> RankError | None:
        """The exception that ended the rank, if one did."""
        size = self._header.error_bytes
        return RankError(**json.loads(self._memory[ERROR_START : ERROR_START + size])) if size else None


def _is_communication(error: BaseException | None) -> bool:
    """Whether the exception, or one that it was raised from, came out of a broken collective."""
    while error is not None:
        if (
            isinstance(error, PeerLost)
            or type(error).__name__.startswith("Dist")
            or (isinstance(error, RuntimeError | OSError) and COMMUNICATION.search(str(error)))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
