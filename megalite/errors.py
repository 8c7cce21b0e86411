"""Errors that users see: floor 0 of the house, importable from everywhere.

Every error that a user can cause is a `MegaliteError`, and its text is written for that user. The form of one line is::

    --flag=value: what is wrong (the facts); the fix

Command-line programs print `str(error)` on standard error (rank 0 only, no traceback) and exit with `error.exit_code`:
2 means that a configuration or an input was bad and nothing was trained, 1 that something failed while running.
`assert` is kept for the project's own invariants and never shows a user's mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class MegaliteError(Exception):
    """Base of all errors with a message for the user.

    Attributes:
        exit_code: status with which a command-line program ends when this error reaches its top.
    """

    exit_code: ClassVar[int] = 2


class ConfigError(MegaliteError):
    """Flags or configuration files are wrong: carries *all* problems found in one pass, one line each.

    Args:
        problems: one line per problem, or a single line.
    """

    def __init__(self, problems: Iterable[str] | str) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        """Survive a trip between processes with `problems` intact."""
        return type(self), (self.problems,)


class DataError(MegaliteError):
    """A corpus, index, tokenizer file or split is missing, damaged or too small."""


class CheckpointError(MegaliteError):
    """A checkpoint is missing, damaged, of another model, or cannot be written."""


class ScheduleError(MegaliteError):
    """A pipeline program is illegal: the text names the rule broken and draws the place."""


class RuntimeFailure(MegaliteError):
    """Training had begun and failed (a dead peer, a time-out, a non-finite loss): the text names rank and phase."""

    exit_code: ClassVar[int] = 1


class PeerLost(RuntimeFailure):
    """Another rank does not answer: the cause is there, and who watches the ranks names it."""
