"""What is said: log lines, errors, the end by a signal, in the words of the command line; hosts that are left out."""

import contextlib
import logging
import signal
import sys
import time
from pathlib import Path

from megalite.errors import MegaliteError, in_flags
from megalite.events import tell_event
from megalite.launch.signals import interrupted_line


class FlagFormatter(logging.Formatter):
    """Log lines in the words of the command line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, its settings as flags."""
        return in_flags(super().format(record))


def log_to_stdout(level: int, prefix: str = " ") -> None:
    """What is logged goes to standard output, one line a message."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(FlagFormatter(f"{prefix}%(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def print_error(error: MegaliteError | str) -> None:
    """Prints the lines of an error for the user, without a traceback, or of an account of what went wrong."""
    for line in str(error).split("\n"):
        print(f"error: {line}", file=sys.stderr, flush=True)


def print_lost(line: str) -> None:
    """Tells who does not answer any more, on standard error and to the command of `--on-event`."""
    print_error(line)
    tell_event("lost", line=line)


def list_host(path: Path, line: str) -> None:
    """Adds a line to the list of hosts that were left out."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')} {line}\n")


def print_interrupted(phase: str = "", number: int = signal.SIGINT, *, saves: bool = True) -> None:
    """The line of a process that was ended by a signal."""
    print(interrupted_line(phase, number, saves), file=sys.stderr, flush=True)
