"""The process that renders chat templates: a program of its own, which needs jinja2 alone and imports nothing of ours.

A template is a program of whoever made the tokenizer. Jinja's sandbox keeps it from files and from Python; what it may
use is bounded here: processor time for each conversation, memory of the process, characters of a text. Time is kept by
a signal whose default action ends the process, so that no call into C can outlast it.

    -> {"template": ..., "variables": {...}, "limits": {...},
        "prompt": whether what calls for an answer follows}       <- {}
    -> N, then N lines, the messages of a conversation each       <- N lines: {"text": ..., "answers": [[begin, end]]},
                                                                     {"refused": why} or {"limit": what}
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Messages = list[dict[str, Any]]


class Refused(Exception):
    """The template does not say what is asked."""


class TooLong(Exception):
    """The text has more characters than the limit."""


class GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}`: what the assistant wrote."""

    tags = frozenset(("generation",))  # type: ignore[assignment]  # jinja2 says set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text: str = caller()
        self.environment.on_generation(text)  # type: ignore[attr-defined]  # set by Renderer
        return text


class PlainNamespace(Namespace):
    """Jinja's `namespace()`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in given.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name such as {name!r}")
        super().__setitem__(name, value)


def environment() -> ImmutableSandboxedEnvironment:
    """Makes the environment that chat templates are written for."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": PlainNamespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return made


class Renderer:
    """One template. variables: special tokens by name. characters: the most of a text. prompt: texts that an answer is
    to follow."""

    def __init__(self, template: str, variables: Mapping[str, Any], characters: int, *, prompt: bool) -> None:
        self._length = 0
        self._answers: list[tuple[int, int]] = []
        made = environment()
        made.extend(on_generation=lambda text: self._answers.append((self._length, self._length + len(text))))
        self._template, self._variables = made.from_string(template), variables
        self._tells = GENERATION.search(template) is not None
        self._most = characters
        self._prompt = prompt

    def answer(self, line: bytes) -> dict[str, Any]:
        """Text and answers of one conversation."""
        messages = [self._plain(message) for message in json.loads(line)]
        most = self._most + 8 * len(line)
        if self._prompt:
            return {"text": self._render(messages, most, prompt=True), "answers": []}
        text = self._render(messages, most)
        if self._tells:
            return {"text": text, "answers": self._answers}
        wanted = (i for i, message in enumerate(messages) if message["role"] == "assistant")
        return {"text": text, "answers": [self._span(text, messages, i, most) for i in wanted]}

    @staticmethod
    def _plain(message: dict[str, Any]) -> dict[str, Any]:
        """A field that is null is left out; reasoning is known by all the names that templates have for it."""
        kept = {key: value for key, value in message.items() if value is not None}
        names = ("reasoning_content", "thinking", "reasoning")
        reasoning = next((kept[name] for name in names if name in kept), None)
        return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}

    def _span(self, text: str, messages: Messages, index: int, most: int) -> tuple[int, int]:
        """Characters of the whole text that an answer is."""
        before = self._render(messages[:index], most, prompt=True) if index else ""
        after = self._render(messages[: index + 1], most).rstrip()
        if not index or not text.startswith(after) or not after.startswith(before):
            why = "is the first" if not index else "reads otherwise in the whole conversation than at its end"
            raise Refused(
                f"answer {index + 1} {why}, so the template does not say where it begins"
                + "; put a message of the user before it, or mark answers in the template by {% generation %} blocks"
            )
        return len(before), len(after)

    def _render(self, messages: Messages, most: int, *, prompt: bool = False) -> str:
        self._length, self._answers, pieces = 0, [], []
        given = {**self._variables, "messages": messages, "tools": None, "documents": None}
        for piece in self._template.generate(given, add_generation_prompt=prompt):
            pieces.append(piece)
            self._length += len(piece)
            if self._length > most:
                raise TooLong(f"more than {most:,} characters of text")
        return "".join(pieces)


def bounded(work: Any, limits: Mapping[str, Any]) -> bytes:
    """The line that answers: what `work` gives, or why not."""
    reply: dict[str, Any]
    try:
        return json.dumps(work(), ensure_ascii=False).encode()
    except TooLong as error:
        reply = {"limit": str(error)}
    except MemoryError:
        reply = {"limit": f"more than {limits['memory'] >> 20:,} MiB of memory"}
    except Refused as error:
        reply = {"refused": str(error)}
    except UnicodeEncodeError:
        reply = {"refused": "the chat template writes half a character (a lone surrogate)"}
    except Exception as error:  # what a template raises is its own
        said = " ".join(str(error).split())[:120] or type(error).__name__
        reply = {"refused": f"the chat template refuses it ({said})"}
    return json.dumps(reply).encode()


def main(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    settings = json.loads(stdin.readline())
    limits = settings["limits"]
    # Core dumps and files of any length are nothing that a template needs.
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, limits["memory"])):
        try:
            resource.setrlimit(what, (most, most))
        except (OSError, ValueError):
            pass  # a system that has no such limit, or a lower one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    made: list[Renderer] = []

    def prepare() -> dict[str, Any]:
        made.append(
            Renderer(settings["template"], settings["variables"], limits["characters"], prompt=settings["prompt"])
        )
        return {}

    def say(work: Any, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = bounded(work, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(reply + b"\n")
        stdout.flush()

    say(prepare, limits["seconds"])
    while count := stdin.readline():
        # All of a batch is read before the first is answered: neither side ever waits for the other to read.
        for line in [stdin.readline() for _ in range(int(count))]:
            seconds = limits["seconds"] + limits["seconds_a_message"] * line.count(b'"role"')
            say(lambda line=line: made[0].answer(line), seconds)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
