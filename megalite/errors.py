"""Errors that users see: floor 0 of the house, importable from everywhere.

Every error that a user can cause is a `MegaliteError`, and its text is written for that user. The form of one line is::

    `setting`=value: what is wrong (the facts); the fix

A setting stands in it by the name of its field, in backquotes; the face that shows the line spells it (`spelled`): as a
flag on the command line, as an argument in a Python program. `str(error)` is the command line's spelling.

Command-line programs print `str(error)` on standard error (rank 0 only, no traceback) and exit with `error.exit_code`:
2 means that a configuration or an input was bad and nothing was trained, 1 that something failed while running.
`assert` is kept for the project's own invariants and never shows a user's mistake.
"""

import re
from collections.abc import Callable, Iterable
from typing import ClassVar

SETTING = re.compile(r"`([a-z][a-z0-9_]*)`")
"""A setting that a message names."""


def spelled(text: str, spell: Callable[[str], str]) -> str:
    """The text with every setting that it names spelled by `spell(name of the field)`."""
    return SETTING.sub(lambda match: spell(match[1]), text)


def flag_of(name: str) -> str:
    """The flag of a field: `zero_stage` is `--zero-stage`."""
    return "--" + name.replace("_", "-")


def in_flags(text: str) -> str:
    """The text in the words of a command line."""
    return spelled(text, flag_of)


def rank_name(rank: int, host: str, *more: str) -> str:
    """How every message names a rank: `rank 3 (host b)`, whoever writes it, so that one search of the logs finds all.

    host: empty where nothing was heard of the rank. more: facts after the host.
    """
    return f"rank {rank} ({', '.join((f'host {host}' if host else 'never heard of', *more))})"


class MegaliteError(Exception):
    """Base of all errors with a message for the user. exit_code: with which a program ends when one reaches its top."""

    exit_code: ClassVar[int] = 2

    @property
    def text(self) -> str:
        """The message with its settings in backquotes, for a face with a spelling of its own."""
        return super().__str__()

    def __str__(self) -> str:
        return in_flags(self.text)


class ConfigError(MegaliteError):
    """Flags or configuration files are wrong: carries *all* problems found in one pass, one line each."""

    def __init__(self, problems: Iterable[str] | str) -> None:
        super().__init__(problems if isinstance(problems, str) else "\n".join(problems))

    @property
    def problems(self) -> list[str]:
        """The lines, in the words of the command line."""
        return str(self).split("\n")


class DataError(MegaliteError):
    """A corpus, index, tokenizer file or split is missing, damaged or too small."""


class CheckpointError(MegaliteError):
    """A checkpoint is missing, damaged, of another model, or cannot be written."""


class ScheduleError(MegaliteError):
    """A pipeline program is illegal: the text names the rule broken and draws the place."""


class RuntimeFailure(MegaliteError):
    """Training had begun and failed (a dead peer, a time-out, a non-finite loss): the text names rank and phase."""

    exit_code: ClassVar[int] = 1


class HostProblem(RuntimeFailure):
    """This host does not compute right: its ranks are not started again."""

    exit_code: ClassVar[int] = 2


class PeerLost(RuntimeFailure):
    """Another rank does not answer: the cause is there, and who watches the ranks names it."""
