"""Standard output and error that can fail without ending a run.

A reader that has gone (`| head`), a full disk behind `> log`, a terminal that was lost with its ssh: what is written
there is lost, what is computed is not. The first failure is said once, on the other of the two streams; from then on
the null device replaces the one that failed, for Python and for libraries alike. What a stream's encoding lacks is
escaped.
"""

import contextlib
import os
import sys
from io import TextIOWrapper
from typing import Any, TextIO


class Stream:
    """A text stream whose `write` and `flush` never raise for what lies behind it.

    stream: the real one. name: in words. other: where its failure is reported. quiet: that its reader has gone is no
    failure.
    """

    def __init__(self, stream: TextIO, name: str, other: TextIO, *, quiet: bool = False) -> None:
        self._stream, self._name, self._other, self._quiet = stream, name, other, quiet

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flushes; what cannot be written is dropped."""
        try:
            self._stream.flush()
        except BlockingIOError:  # another process on the terminal has made it non-blocking
            with contextlib.suppress(OSError):
                os.set_blocking(self._stream.fileno(), True)
                self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, self._stream.fileno())
            os.close(descriptor)
            self._stream.flush()  # what was buffered
        if self._quiet and isinstance(error, BrokenPipeError):
            return
        with contextlib.suppress(OSError, ValueError):
            self._other.write(
                f"{self._name} failed ({error.strerror}): nothing is written there any more, work continues\n"
            )
            self._other.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escape_unsayable() -> None:
    """Makes the standard streams write `\\xe9` for a character that their encoding lacks, in place of an error: a text
    may hold any, and where it is shown is no reason to end what it is shown of.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def keep_streams(*, quiet: bool = False) -> None:
    """Makes this process's standard streams outlive their readers. Call it first: closed ones become the null device,
    lest the next file that is opened takes their number and is written into by the next print. quiet: for a text that
    people look at the beginning of.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    escape_unsayable()
    out = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    err = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    if not isinstance(out, Stream):
        sys.stdout, sys.stderr = (
            Stream(out, "standard output", err, quiet=quiet),
            Stream(err, "standard error", out),
        )
