"""Which functions of the product a piece of work enters: what a reader of it has to read."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType

PRODUCT = Path(__file__).resolve().parents[1]

Entered = Counter[tuple[str, str]]
"""Calls by (file under `megalite/`, function)."""


@contextmanager
def calls_entered() -> Iterator[Entered]:
    """Counts the calls of the product's functions in this thread and in threads that start meanwhile. What an import
    runs, the bodies of modules and classes, is not counted."""
    counts: Counter[CodeType] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    entered: Entered = Counter()
    before = sys.getprofile()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        for code, number in counts.items():
            path = Path(code.co_filename)
            if code.co_flags & CO_NEWLOCALS and path.is_relative_to(PRODUCT):
                entered[str(path.relative_to(PRODUCT)), code.co_qualname] += number
