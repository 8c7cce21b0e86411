"""What is printed: log lines, errors, the end by a signal; in the words of the command line."""

from __future__ import annotations

import logging
import signal
import sys

from megalite.errors import MegaliteError, in_flags
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


def print_error(error: MegaliteError) -> None:
    """Prints the lines of an error for the user, without a traceback."""
    print_lines(str(error))


def print_lines(text: str) -> None:
    """Prints an account of what went wrong."""
    for line in text.split("\n"):
        print(f"error: {line}", file=sys.stderr, flush=True)


def print_interrupted(phase: str = "", number: int = signal.SIGINT, *, saves: bool = True) -> None:
    """The line of a process that was ended by a signal."""
    print(interrupted_line(phase, number, saves), file=sys.stderr, flush=True)
