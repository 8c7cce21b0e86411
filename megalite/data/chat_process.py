"""The parent's side of `chat_renderer.py`: conversations in, their texts out, within limits."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

from megalite.errors import DataError
from megalite.strangers import FencedProgram

PROGRAM = "chat_renderer.py"
#: Conversations that travel together.
BATCH = 128


#: Hundreds of times what honest templates need, for each conversation. seconds: of processor time; seconds_a_message:
#: more, since each answer is rendered again to find where it begins. memory: bytes of address space of the process.
#: characters: of a text, and eight for each byte of the conversation.
LIMITS = {"seconds": 10.0, "seconds_a_message": 0.02, "memory": 1 << 30, "characters": 16 << 20}


class TemplateLimit(DataError):
    """A template reached a limit. `--skip-bad-lines` does not pass over that: each line would take as long."""


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation, and the characters `(begin, end)` of each answer."""

    text: str
    answers: list[tuple[int, int]] = field(default_factory=list)


class ChatRenderer:
    """One template in a process of its own, which lives as long as this object.

    variables: special tokens by name. prompt: texts end with what calls for an answer, and none is looked for. Raises
    DataError where the template is none.
    """

    def __init__(self, template: str, variables: Mapping[str, str], *, prompt: bool = False) -> None:
        self.owner = os.getpid()
        self._program = FencedProgram(Path(__file__).with_name(PROGRAM))
        self.close = self._program.close
        settings = {"template": template, "variables": dict(variables), "limits": LIMITS, "prompt": prompt}
        self._program.send(json.dumps(settings).encode() + b"\n")
        reply = self._receive()
        if "refused" in reply:
            raise DataError(str(reply["refused"]).replace("refuses it", "is none", 1))

    def render(self, talks: Sequence[list[dict[str, Any]]]) -> Iterator[Rendered | DataError]:
        """Renders conversations, in order; DataError where the template does not take it.

        Raises TemplateLimit in the turn of the conversation that reached one.
        """
        following = iter(talks)
        while batch := list(islice(following, BATCH)):
            lines = [_as_line(talk) for talk in batch]
            self._program.send(b"".join([b"%d\n" % len(lines), *lines]))
            for _ in batch:
                reply = self._receive()
                if "refused" in reply:
                    yield DataError(str(reply["refused"]))
                else:
                    yield Rendered(reply["text"], [(begin, end) for begin, end in reply["answers"]])

    def _receive(self) -> dict[str, Any]:
        line = self._program.line()
        if line is None:
            if (status := self._program.status()) == -signal.SIGPROF:
                raise _limit(f"more than {LIMITS['seconds']:g} seconds of processor time")
            raise TemplateLimit(
                f"the process that rendered the chat template ended (status {status}); repair the template"
            )
        reply = cast("dict[str, Any]", json.loads(line))
        if "limit" in reply:
            raise _limit(reply["limit"])
        return reply


def _limit(needed: str) -> TemplateLimit:
    return TemplateLimit(f"the chat template needs {needed} for it, which is the limit; repair the template")


def _as_line(talk: list[dict[str, Any]]) -> bytes:
    try:
        return json.dumps(talk).encode() + b"\n"
    except RecursionError:
        return b'[{"role": "too many levels"\n'  # refused there, in its turn
