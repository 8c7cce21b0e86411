"""When a run ends before its last iteration: by interval, by duration, or because it is asked to (SIGTERM, SIGUSR1,
SIGHUP, Ctrl-C).

The decision is one for all ranks, and it is taken *before* the iteration after which the run ends: an asynchronous
schedule starts forwards of the next batch inside the current one, so it must know by then whether there is a next.

    before iteration t:   decide(t)  ->  None, or why the run ends after t

A signal reaches ranks at different times, or only one of them. Each rank votes with what it knows, the largest vote
counts. On a GPU the vote is read one iteration later, when it is long there, so that the host never waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from enum import StrEnum
from types import FrameType
from typing import Any

import torch

from megalite.checkpoint import Checkpointer
from megalite.comm import Axis, Handle, agree_max, all_reduce_
from megalite.config import TrainingConfig
from megalite.errors import in_flags
from megalite.late_reading import LateReading
from megalite.launch import INTERRUPTED, SAME_SECONDS

logger = logging.getLogger(__name__)

COMPLETED = "completed"  # other values of `"status"` in the summary line of metrics.jsonl
FAILED = "failed"

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class ExitReason(StrEnum):
    """Why a run ended early; the value is the `"status"` of its summary line."""

    INTERVAL = "exit_interval"
    DURATION = "exit_duration"
    SIGNAL = "exit_signal"
    SAVE_FAILED = "save_failed"


_REASONS = (None, ExitReason.DURATION, ExitReason.SIGNAL, ExitReason.SAVE_FAILED)


class ExitPolicy:
    """Decides, the same way on all ranks, after which iteration the run ends.

    Use as a context manager: signal handlers are installed on entry (unless `--no-exit-signal-handler`) and those
    that stood before are put back on exit. A handler only takes a note, so a signal, or a second one, that arrives in
    the middle of a checkpoint never interrupts it. Only a second Ctrl-C (SIGINT) ends the process at once; so does the
    first one of a run that writes no checkpoint.

    config: `exit_interval`, `exit_duration_in_mins` (from the making of this object on), `exit_signal_handler`.
    device: where the vote travels; on a GPU it is read one iteration late. saver: one of its saves that came to nothing
    ends the run, and a run that is to end waits for no store that is gone. saves: whether it writes a checkpoint then.
    """

    def __init__(
        self, config: TrainingConfig, world: Axis, device: torch.device, saver: Checkpointer, *, saves: bool
    ) -> None:
        self._config, self._world, self._device = config, world, device
        self._saver, self._saves = saver, saves
        self._decided, self._ends_here = 0, False
        self._began = time.monotonic()
        self._received: dict[int, float] = {}  # when each first came
        self._previous: dict[signal.Signals, Any] = {}
        # Only these can be seen differently by different ranks; without them no message is exchanged.
        self._votes = config.exit_signal_handler or config.exit_duration_in_mins is not None
        # Between GPUs a vote is read at the next one: the reduction and its copy to the host have then long happened.
        self._delay = int(device.type == "cuda" and world.size > 1)
        # Of its own: the stream that computes would otherwise wait here for the slowest rank, once an iteration.
        self._stream = torch.cuda.Stream(device) if self._delay else None
        self._reading: LateReading | None = None
        self._asked: tuple[torch.Tensor, Handle] | None = None

    def __enter__(self) -> ExitPolicy:
        # Python delivers signals to the main thread only and refuses handlers elsewhere.
        if self._config.exit_signal_handler and threading.current_thread() is threading.main_thread():
            # `nohup` takes the terminal away, a shell its Ctrl-C from a job in the background.
            stay = {n for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN}
            heard = [n for n in _SIGNALS if n not in stay and (self._saves or n != signal.SIGINT)]
            self._previous = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @property
    def exit_status(self) -> int:
        """Of a run that has ended in order: that of Ctrl-C, if it was heard here."""
        return INTERRUPTED if signal.SIGINT in self._received else 0

    def decide(self, iteration: int, *, evaluates: bool = False, last: bool = False) -> ExitReason | None:
        """Why the run ends after `iteration`, which is about to start, or None. Collective over the world.

        evaluates: an evaluation follows it, at whose end `evaluation_over` asks again. last: no iteration follows it.
        """
        self._decided, self._ends_here = iteration, evaluates or last
        interval = self._config.exit_interval
        reason = ExitReason.INTERVAL if interval is not None and iteration % interval == 0 else None
        if self._votes and (agreed := self._vote(self._wish())) is not None:
            reason = agreed
            if agreed is not ExitReason.DURATION:
                self._saver.hasten()
            if agreed is ExitReason.SIGNAL and self._received:
                name = signal.Signals([*self._received][-1]).name
                logger.warning("received %s: this run ends after iteration %d", name, iteration)
        self._ends_here |= reason is not None
        return reason

    def evaluation_over(self) -> bool:
        """Whether a rank got a signal until now: then the run ends without another iteration. Collective."""
        self._ends_here = False
        self.interrupted()
        return self.last_answer()

    def interrupted(self) -> bool:
        """Whether an evaluation is to stop, because a rank has got a signal: asked before each of its batches. The
        answer is one question old: no stage of a pipeline waits for the others to come to the same batch. Collective,
        the same on all ranks."""
        if not self._previous:  # no signals are heard
            return False
        before = self.last_answer()
        vote = torch.tensor([bool(self._received)], dtype=torch.int32, device=self._device)
        self._asked = vote, all_reduce_(vote, self._world, op="max", async_op=True)
        return before

    def last_answer(self) -> bool:
        """Waits for the last answer and returns it."""
        if self._asked is None:
            return False
        (vote, handle), self._asked = self._asked, None
        handle.wait()
        return bool(vote)

    def _vote(self, wish: ExitReason | None) -> ExitReason | None:
        """The largest wish of all ranks, of this iteration or of `_delay` before."""
        if self._stream is None:
            return _REASONS[int(agree_max(_REASONS.index(wish), self._world))]
        result = 0 if self._reading is None else int(self._reading.read()[0])
        with torch.cuda.stream(self._stream):
            ballot = torch.full((1,), _REASONS.index(wish), dtype=torch.int32, device=self._device)
            all_reduce_(ballot, self._world, op="max")
            self._reading = LateReading(ballot)
        return _REASONS[result]

    def _wish(self) -> ExitReason | None:
        if self._saver.failure is not None:
            return ExitReason.SAVE_FAILED
        if self._received:
            return ExitReason.SIGNAL
        minutes = self._config.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._began >= 60 * minutes:
            return ExitReason.DURATION
        return None

    def _note(self, number: int, _: FrameType | None) -> None:
        # No logger: the handler runs between any two instructions, perhaps while a log line is being written.
        new, now = number not in self._received, time.monotonic()
        self._saver.hasten()
        first = new and (number == signal.SIGINT or not self._received)
        if now - self._received.setdefault(number, now) > SAME_SECONDS and number == signal.SIGINT:
            signal.signal(number, self._previous[signal.SIGINT])
            os.kill(os.getpid(), number)
        if first and self._world.is_first:
            with contextlib.suppress(OSError):
                way_out = "; another Ctrl-C ends it at once" * (number == signal.SIGINT)
                os.write(2, in_flags(f" {self._heard(signal.Signals(number).name)}{way_out}\n").encode())

    def _heard(self, name: str) -> str:
        """What is said at once: an iteration may take minutes."""
        if not self._decided:
            when = "after the first iteration"
        elif self._ends_here:
            when = f"after iteration {self._decided}, without another one (an evaluation is cut short)"
        else:
            number = self._decided + 1 + self._delay
            which = "the one after this" if not self._delay else "the second after this"
            when = f"after iteration {number}, {which} (an evaluation is cut short)"
        return f"received {name}: the run ends {when}, and {'saves' if self._saves else 'saves nothing (no `save`)'}"
