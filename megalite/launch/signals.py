"""SIGTERM, SIGUSR1 and SIGHUP before training begins: the process ends at once, with one line.

    start-up    a handler tells of the end and leaves; what was half written has no final name, the next run removes it
    training    the signal is noted: a checkpoint, then status 0 (`megalite.train.exits` replaces these handlers)
    leaving     ignored: all that matters is on disk

No exception: libraries swallow what is raised while they are imported, and the run would go on. Ranks that were forked
here leave it to the system, which ends them wherever they are, and to their supervisor, which tells.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from megalite.errors import flag_of

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
PATIENCE_SECONDS = 1.0
LOST = "what was done after the newest checkpoint is not saved"


def interrupted_line(phase: str, number: int, saves: bool = True) -> str:
    """What is said of a process that a signal has ended; its exit status is 128 more than the signal's number. saves:
    whether it has a place for checkpoints."""
    where = f" in phase '{phase}'" if phase else ""
    if number == signal.SIGINT:  # Ctrl-C
        lost = LOST if saves else f"nothing was saved (no {flag_of('save')})"
        if not phase or phase.startswith("start-up"):
            lost = "nothing was saved"
        return f"error: interrupted by SIGINT{where}; {lost}"
    return f"error: ended by {signal.Signals(number).name}{where}; nothing was saved"


class EndAtOnce:
    """A handler that ends this process. phase: what it does now; tells: whether it is the one to say so."""

    def __init__(self, phase: Callable[[], str] = str, *, tells: bool = True) -> None:
        self._phase, self._tells = phase, tells

    def install(self) -> None:
        """For all signals of `ENDING`; one that is ignored (nohup) stays so."""
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self)

    def __call__(self, number: int, _: FrameType | None = None) -> None:
        if self._tells:
            with contextlib.suppress(OSError):  # no print: the signal may have come in the middle of one
                os.write(2, f"{interrupted_line(self._phase(), number)}\n".encode())
        os._exit(128 + number)


def ends_at_once() -> bool:
    """Whether SIGTERM ends this process at once."""
    return isinstance(signal.getsignal(signal.SIGTERM), EndAtOnce)


def replace_handlers(by: signal.Handlers) -> None:
    """Undoes `EndAtOnce.install`; handlers of others stay."""
    for number in ENDING:
        if isinstance(signal.getsignal(number), EndAtOnce):
            signal.signal(number, by)


def ear() -> Callable[[], None]:
    """Made by the main thread, for another one to call again and again: calls a handler `EndAtOnce` that the main
    thread, waiting inside a library for ranks that do not come, has not called within `PATIENCE_SECONDS`."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    heard: list[tuple[float, int]] = []

    def listen() -> None:
        with contextlib.suppress(BlockingIOError):
            heard.extend((time.monotonic(), number) for number in os.read(reading, 64))
        while heard and time.monotonic() - heard[0][0] > PATIENCE_SECONDS:
            _, number = heard.pop(0)
            handler = signal.getsignal(number)
            if isinstance(handler, EndAtOnce):
                handler(number)

    return listen


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Within, the signals of `ENDING` do nothing, in the main thread: Python sets handlers nowhere else."""
    mine = ENDING if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in mine}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
