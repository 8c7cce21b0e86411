"""What the command-line tools share: flags with `-` or `_`, one-line errors, exit statuses."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalite.extras import CORE, core_lacks, require_core

PLANNERS = ("plan", "show_schedule")
"""Tools that compute with plain numbers: they run wherever YAML can be read."""

require_core(torch=False, plain=PLANNERS)

from megalite.config import without_effect
from megalite.errors import ConfigError, MegaliteError, in_flags
from megalite.files import input_problem, url_problem
from megalite.launch import INTERRUPTED, print_error
from megalite.streams import escape_unsayable

PATHS = ("DIR", "FILE", "OTHER", "PATH", "PREFIX", "RUN")
"""What a flag is called in `--help` that takes a file or a folder."""
MOST = 10**9
"""Of a flag that counts iterations or the like, and has no bound of its own."""


class ToolParser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors of one line, and which names the nearest flag."""

    def __init__(self, description: str = "", **more: Any) -> None:
        """more: what `argparse` gives the parser of a command of a tool."""
        form = argparse.ArgumentDefaultsHelpFormatter
        super().__init__(description=description, allow_abbrev=False, formatter_class=form, **more)

    def parse_args(  # type: ignore[override]  # argparse allows namespaces of other types, which no tool has
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse `args`, in whose flags `_` may stand for `-`.

        Raises:
            ConfigError: a flag is unknown, lacks its value or has a wrong one.
        """
        words = [_with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        found, unknown = self.parse_known_args(words)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            nearest = difflib.get_close_matches(unknown[0].split("=")[0], flags, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "see --help"
            raise ConfigError(f"unknown flag {unknown[0]}; {hint}")
        return found

    def parse_known_args(  # type: ignore[override]  # as above
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's. Raises ConfigError where a path is a URL."""
        found, unknown = super().parse_known_args(args, namespace)
        problems = []
        for action in self._actions:
            kind = str(action.metavar or "").partition(".")[0].split("|")[-1]
            value = getattr(found, action.dest, None) if kind in PATHS or action.type is Path else None
            for path in value if isinstance(value, list) else [value]:
                if (problem := url_problem(str(path), stores=action.type is stored)) is not None:
                    problems.append(f"{(action.option_strings or [str(action.metavar)])[0]}={path}: {problem}")
        if problems:
            raise ConfigError(problems)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Called by argparse: one line instead of a usage text."""
        raise ConfigError(message.replace("argument --", "--"))


def stored(text: str) -> str:
    """The type of a flag whose path may be a URL of a store."""
    return text


def check_numbers(flags: argparse.Namespace, **bounds: tuple[float, float]) -> None:
    """Raises ConfigError, a line for each flag whose number is outside its (least, most); None is no number."""
    found = []
    for name, (least, most) in bounds.items():
        numbers = getattr(flags, name)
        for number in numbers if isinstance(numbers, list) else [numbers]:
            if number is not None and not least <= number <= most:
                found.append(f"--{name.replace('_', '-')}={number}: must be >= {least:,} and <= {most:,}")
    if found:
        raise ConfigError(found)


def check_file(flag: str, path: str | None, most_bytes: int | None = None) -> None:
    """Raises ConfigError where a file that is named cannot be read by every rank."""
    problem = None if path is None else input_problem(path, most_bytes)
    if problem:
        raise ConfigError(f"{flag}={path}: {problem}")


def run_tool(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Run `main` with `argv` (the command line); returns the exit status, that of `main` if it has one. Errors become
    lines on standard error."""
    escape_unsayable()
    try:
        return main(sys.argv[1:] if argv is None else argv) or 0
    except MegaliteError as error:
        print_error(error)
        return error.exit_code
    except PermissionError as error:  # another user's file, wherever it was met
        print(f"error: {error.filename}: cannot be read or written by this user ({error.strerror})", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:  # torch, which some tools need for some of what they do
        if error.name not in CORE:
            raise
        print(f"error: {core_lacks([error.name])}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted by SIGINT", file=sys.stderr, flush=True)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader (`| head`) has seen enough; what is still buffered must not raise at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def name_ignored(argv: Sequence[str]) -> None:
    """Says on standard error which flags of a training script have no effect, as pretrain_gpt.py does in its log."""
    if (line := without_effect(argv)) is not None:
        print(line, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Prints at once, so that a reader at the other end of a pipe sees it now, settings as flags."""
    print(in_flags(text), flush=True)


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
