"""How far a long piece of work is: a bar on a terminal, lines in a log.

    tokenising [#######-------------] 35 %, 1.02 GB of 2.9 GB, 35.1 MB/s, 54 s left

A library function that may take long has a parameter `on_progress` and knows nothing about terminals; its caller passes
a `ProgressBar`. The bar writes to standard error, so that what a tool prints stays data, and stays silent about work
that takes less than two seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

OnProgress = Callable[[float, float | None, str], None]
"""Called with (done, total or None, a note) as the work continues."""


def no_progress(done: float, total: float | None = None, note: str = "") -> None:
    """An `OnProgress` that reports nothing."""


#: Seconds before the first report, between two drawings of a bar, between two lines of a log.
SILENT, REDRAW, LINES = 2.0, 0.1, 10.0
WIDTH = 20
NARROW = 80
ERASE = "\r\x1b[K"


class ProgressBar:
    """An `OnProgress` for people. As a context manager it erases its bar at the end.

    what: the work, "tokenising".
    unit: of `done`; "B" becomes kB, MB ...
    lines: seconds between two lines of a log; 0: neither lines nor a bar.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        *,
        lines: float = LINES,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._unit, self._lines, self._clock = what, unit, lines, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = is_terminal(self._stream)
        self._begin = clock()
        self._next = self._begin + SILENT if lines else float("inf")
        self._drawn = False

    def __call__(self, done: float, total: float | None = None, note: str = "") -> None:
        """Reports `done` of `total`; without a total there is a rate but no bar."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (REDRAW if self._terminal else self._lines)
        text = self._text(done, total, note, now - self._begin)
        if self._terminal:
            text = ERASE + text[: self._columns() - 1]
            self._drawn = True
        self._write(text if self._terminal else text + "\n")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Erases the bar."""
        if self._drawn:
            self._write(ERASE)
            self._drawn = False

    def _text(self, done: float, total: float | None, note: str, seconds: float) -> str:
        rate = done / seconds
        parts = [amount(done, self._unit)]
        bar = ""
        if total:
            done = min(done, total)
            full = int(WIDTH * done / total)
            bar = f" [{'#' * full}{'-' * (WIDTH - full)}]" if self._terminal else ":"
            parts = [f"{int(100 * done / total)} %"]
            parts += [of(done, total, self._unit)] if self._unit != "%" else []
        parts.append(f"{amount(rate, self._unit if self._unit in 'B%' else '')}/s")
        if total and rate and done < total:
            parts.append(f"{duration((total - done) / rate)} left")
        if note:  # last: a narrow terminal may not have room for it
            parts.append(note)
        return f"{self._what}{bar or ':'} {', '.join(parts)}"

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or NARROW
        except (OSError, ValueError):
            return NARROW

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader is gone; the work continues
            self._next = float("inf")


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody reads along; a stream that is closed is no terminal."""
    try:
        return stream.isatty()
    except ValueError:
        return False


def amount(value: float, unit: str) -> str:
    """`1.02 GB`, `35 tensors`, `0.8 samples`."""
    if unit == "B":
        return in_units(value, unit)
    return (f"{value:,.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}").rstrip()


def in_units(number: float, unit: str = "") -> str:
    """Three digits: 1234567 and `B` -> `1.23 MB`, with the prefixes k, M, G, T, P, E."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if abs(number) < 999.5 or prefix == "E":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}".rstrip()


def of(done: float, total: float, unit: str) -> str:
    """`1.02 GB of 2.9 GB`, `3 of 35 tensors`."""
    return f"{amount(done, unit)} of {amount(total, unit)}" if unit == "B" else f"{done:,.0f} of {amount(total, unit)}"


def duration(seconds: float) -> str:
    """`54 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24:,} d {hours % 24:02} h"
