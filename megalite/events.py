"""`--on-event`: a command that is told what happens to a run, by JSON on its standard input.

    any room --tell_event--> EventHandler, on a logger of its own --Popen--> the command, never waited for

The entry script listens, from before the ranks start to the end of the process: ranks inherit it, and the process that
supervises them tells who was killed. Where nobody listens, nothing happens.
"""

from __future__ import annotations

import json
import logging
import shlex
import socket
import threading
from collections.abc import Mapping
from datetime import datetime
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

logger = logging.getLogger(__name__)
_told = logging.getLogger("megalite.events.told")


def tell_event(event: str, **facts: Any) -> None:
    """Tells whoever listens on this rank."""
    for handler in _told.handlers:
        handler.handle(logging.makeLogRecord({"msg": event, "facts": facts}))


def share_facts(**facts: Any) -> None:
    """Adds facts that all events of this process have from now on."""
    for handler in _told.handlers:
        assert isinstance(handler, EventHandler)
        handler.facts.update(facts)


class EventHandler(logging.Handler):
    """Starts a command for each event. command: as a shell would split it; no shell runs it. facts: of all events of
    the process. seconds: after which the command is ended."""

    def __init__(self, command: str, facts: Mapping[str, Any], seconds: float = 10.0) -> None:
        super().__init__()
        self._command, self.facts, self._seconds, self._warned = shlex.split(command), dict(facts), seconds, False

    def __enter__(self) -> EventHandler:
        _told.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _told.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        time = datetime.now().astimezone().isoformat(timespec="microseconds")
        event = {"event": record.msg, "time": time, "host": socket.gethostname(), **self.facts, **vars(record)["facts"]}
        try:
            # In a session of its own: signals to the run are not meant for it.
            started = Popen(self._command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            assert started.stdin is not None
            with started.stdin as told:
                told.write(json.dumps(event, default=str).encode() + b"\n")  # it fits into the pipe, read or not
        except OSError as error:
            self._warn(f"{error.strerror}")
        else:
            threading.Thread(target=self._watch, args=(started,), daemon=True).start()

    def _watch(self, started: Popen[bytes]) -> None:
        try:
            if status := started.wait(self._seconds):
                self._warn(f"ended with status {status}")
        except TimeoutExpired:
            started.kill()
            started.wait()
            self._warn(f"took more than {self._seconds:g} s and was ended")

    def _warn(self, what: str) -> None:
        """Once: a command that is broken is so at every event."""
        if not self._warned:
            self._warned = True
            logger.warning("`on_event`: %s %s; training continues", self._command[0], what)
