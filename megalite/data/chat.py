"""Conversations as tokens by the tokenizer's own chat template, and which of them are answers.

    PREFIX_messages_document         tokens of every conversation, a document each
    PREFIX_messages_document_marks   a number for each of them: 1, the loss counts it (an answer of the assistant);
                                     2, a conversation ends here (its template may use the end-of-document token before)

A template with `{% generation %}` blocks says itself what the assistant wrote. Of any other it is what a message of the
assistant adds to the conversation with its prompt, up to white space after it.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megalite.data.beside import MOST_TEMPLATE, TEMPLATE
from megalite.data.cache import digest_of
from megalite.data.chat_process import ChatRenderer, Rendered, TemplateLimit
from megalite.data.corpus import JSONL_SUFFIXES, check_characters, parse_json
from megalite.data.file_chunks import (
    REASONS,
    InputUnit,
    input_size,
    input_units,
    place_of,
    read_unit,
    unit_digest,
    utf8_length,
)
from megalite.data.indexed import ANSWER, END, MARKS, IndexedDataset
from megalite.data.kept_units import UnitTokens
from megalite.data.preprocess import Totals, UnitJob, write_units
from megalite.data.survey import check_answers, unanswered
from megalite.data.tokenizer import Tokenizer, token_dtype
from megalite.data.written_by import note_tokenizer
from megalite.errors import ConfigError, DataError
from megalite.extras import optional_package
from megalite.progress import OnProgress, no_progress
from megalite.strangers import PROGRAMS, check_no_program, read_limited, read_mapping

FLAG = "`data_format`=chat"
Messages = list[dict[str, Any]]
FORM = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Of ShareGPT's form (from, value, a list in `conversations`): who a message is from -> its role."""
ROLES = {"system", "user", "assistant"}
PAIRS = ({"instruction", "output"}, {"prompt", "completion"}, {"prompt", "response"}, {"question", "answer"})
"""Fields of lines with one question each."""
#: Of tokenizer_config.json, by which templates name special tokens.
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class ChatTemplate:
    """The template beside a Hugging Face tokenizer, rendered within limits by a process of its own.

    directory: the tokenizer's, which `flag` names. asked: what asks for the template. Raises DataError where there is
    none, ConfigError where a program of the tokenizer's maker would have to run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        directory: str | None,
        *,
        asked: str = FLAG,
        flag: str = "`tokenizer_model`",
    ) -> None:
        if tokenizer.kind != "HuggingFaceTokenizer" or directory is None:
            raise DataError(f"{asked}: needs `tokenizer_type`=HuggingFaceTokenizer, whose files have the chat template")
        jinja = optional_package(asked, "jinja2").__version__
        if tuple(int(part) for part in re.findall(r"\d+", jinja)[:3]) < (3, 1, 6):  # from older sandboxes are ways out
            raise ConfigError(f"{asked}: needs jinja2 3.1.6 or newer, not {jinja}; pip install -U jinja2")
        self._backend: Any = tokenizer.backend  # type: ignore[attr-defined]  # of this kind
        self.text, self.variables = read_template(Path(directory), flag)
        self._tells = re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None
        self._renderer: ChatRenderer | None = None
        try:
            ChatRenderer(self.text, self.variables).close()
        except DataError as error:
            raise DataError(f"{flag}={directory}: {str(error).replace(' for it', '', 1)}") from None

    def prompts(self, talks: Sequence[Messages]) -> list[list[int]]:
        """Tokens of each conversation and of what calls for the next answer. Raises DataError where the template does
        not take one, or needs more for it than a template may."""
        found = []
        with contextlib.closing(ChatRenderer(self.text, self.variables, prompt=True)) as renderer:
            for number, rendered in enumerate(renderer.render(talks), 1):
                if isinstance(rendered, DataError):
                    raise DataError(f"conversation {number}: {rendered}" if len(talks) > 1 else str(rendered))
                found.append(list(self._backend.encode(rendered.text, add_special_tokens=False).ids))
        return found

    def encode(self, talks: Sequence[Messages]) -> Iterator[tuple[list[int], list[bool]] | DataError]:
        """Of each conversation its tokens, and which are answers; DataError where the template does not take it. Raises
        TemplateLimit in the turn of the one that needs more than a template may."""
        renderer = self._renderer
        if renderer is None or renderer.owner != os.getpid():  # forked workers have one each
            renderer = self._renderer = ChatRenderer(self.text, self.variables)
        try:
            for found in renderer.render(talks):
                yield found if isinstance(found, DataError) else self._tokens(found)
        except TemplateLimit:
            self._renderer = None
            raise

    def _tokens(self, rendered: Rendered) -> tuple[list[int], list[bool]]:
        """Ids, and whether each is of an answer: begins within it, or by a template that says so, reaches into it."""
        encoding = self._backend.encode(rendered.text, add_special_tokens=False)
        spans = rendered.answers
        if not self._tells:
            return list(encoding.ids), [any(a <= begin < b for a, b in spans) for begin, _ in encoding.offsets]
        answers = [False] * len(encoding.ids)
        for begin, end in (span for span in spans if span[0] < span[1]):
            if (first := encoding.char_to_token(begin)) is None:
                break
            last = encoding.char_to_token(end - 1)
            stop = len(answers) if last is None else last + 1
            answers[first:stop] = [True] * (stop - first)
        return list(encoding.ids), answers

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_renderer": None}


def read_template(where: Path, flag: str = "`tokenizer_model`") -> tuple[str, dict[str, str]]:
    """Template and special tokens beside the tokenizer `where`, which `flag` names. Raises DataError; ConfigError for a
    program's."""
    folder = where if where.is_dir() else where.parent
    config = read_mapping(folder / "tokenizer_config.json", flag)
    check_no_program(folder / "tokenizer_config.json", config.get(PROGRAMS), flag)
    model = read_mapping(folder / "config.json", flag).get(PROGRAMS)
    check_no_program(folder / "config.json", model.get("AutoTokenizer") if isinstance(model, dict) else None, flag)
    template: Any = config.get("chat_template")
    if isinstance(template, list):  # several with names
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = named[-1].get("template") if named else None
    file = folder / TEMPLATE
    if file.exists():
        try:
            template = read_limited(file, flag, MOST_TEMPLATE).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{flag}={file}: not UTF-8 text (byte {error.start}); convert it") from None
    if not isinstance(template, str):
        raise DataError(f"{flag}={where}: has no chat template; take the tokenizer of a chat model")
    if len(template) > MOST_TEMPLATE:
        raise DataError(
            f"{flag}={where}: a chat template of {len(template):,} characters; {MOST_TEMPLATE:,} is the most"
        )
    config = read_mapping(folder / "special_tokens_map.json", flag) | config
    tokens = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return template, {name: text for name, text in texts.items() if isinstance(text, str)}


def parse_messages(line: str | bytes, keys: Sequence[str], where: str) -> list[Any]:
    """The conversation in field `keys[0]` of one JSONL line; `where` is its place, for the error."""
    record = parse_json(line, where)
    messages = record.get(keys[0]) if isinstance(record, dict) else None
    if messages is None and keys[0] == "messages" and isinstance(record, dict):
        talk = record.get("conversations")
        if isinstance(talk, list) and talk and isinstance(talk[0], dict) and {"from", "value"} <= talk[0].keys():
            messages = talk  # of ShareGPT
    if messages == []:
        raise DataError(f"{where}: the list in field '{keys[0]}' is empty; drop the line, or `skip_bad_lines` does")
    if not isinstance(messages, list):
        raise DataError(f"{where}: no list of messages in field '{keys[0]}'; {_other_form(record, keys[0])}")
    messages = [_message(message, f"{where}: message {number}") for number, message in enumerate(messages, 1)]
    for number, message in enumerate(messages, 1):
        for name in ("role", "content"):
            check_characters(message.get(name) or "", f"{where}: {name} of message {number}")
    if record.get("tools"):
        raise DataError(f"{where}: has tools, which are not supported; leave them out, or `skip_bad_lines` drops it")
    return [messages]


def _message(given: Any, where: str) -> dict[str, Any]:
    """A message with a role and a text: of ShareGPT's form, or with a list of texts, made one of ours. What calls tools
    needs no text."""
    wrong = f"{where} is not an object with a role and a content that are texts"
    if not isinstance(given, dict):
        raise DataError(wrong)
    message: dict[str, Any] = given
    if "role" not in message and {"from", "value"} <= message.keys():
        speaker = message["from"]
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise DataError(f"{where} is from {str(speaker)[:40]!r}; of ShareGPT's form {', '.join(SPEAKERS)} are read")
        rest = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = {**rest, "role": SPEAKERS[speaker], "content": message["value"]}
    content = message.get("content")
    if isinstance(content, list) and content:
        parts = [part if isinstance(part, dict) else {} for part in content]
        other = [part for part in parts if part.get("type") != "text" or not isinstance(part.get("text"), str)]
        if other:
            kind = str(other[0].get("type"))[:40]
            raise DataError(
                f"{where} has a part of type {kind}; parts of its content must be of type text, with a text"
            )
        message = {**message, "content": "".join(part["text"] for part in parts)}
    called = content is None and message.get("role") == "assistant" and _calls(message)
    if not called and not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise DataError(wrong)
    return message


def _other_form(record: Any, key: str) -> str:
    """What to do with a line that has no messages in a field: what it looks like says it."""
    fields = record if isinstance(record, dict) else {}
    lists = [name for name, value in fields.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if {"prompt", "completion"} <= fields.keys() and lists:
        return f"join prompt and completion to one list of messages: {FORM}"
    if lists:
        return f"name the field by `json_keys`: {lists[0][:40]} holds a list of objects"
    if any(names <= fields.keys() for names in PAIRS):
        return f"a question and its answer are two messages: {FORM}"
    has = ", ".join(str(name)[:40] for name in list(fields)[:8]) or "no field at all"
    return f"it has {has}; a line is {FORM}, or another field is named by `json_keys`"


@dataclass(frozen=True)
class ChatJob(UnitJob):
    """Turns units of conversations into tokens and marks."""

    template: ChatTemplate
    marked: ClassVar[bool] = True

    @property
    def dtypes(self) -> list[np.dtype[np.integer]]:
        return [token_dtype(self.tokenizer.vocab_size), np.dtype(np.uint8)]

    @property
    def settings(self) -> str:
        return digest_of("chat 3", super().settings, self.template.text)

    def run(self, unit: InputUnit) -> UnitTokens:
        (column,), skipped, lines = read_unit(
            unit, self.json_keys, skip_bad_lines=self.skip_bad_lines, parse=parse_messages
        )
        ids, marks, total, roles, lost = [], [], 0, set[str](), 0
        answers = self.template.encode(column)
        for line, messages in zip(lines, column, strict=True):
            try:
                found = next(answers)
            except DataError as error:  # of a limit
                raise DataError(f"{place_of(unit, line)}: {error}") from None
            if isinstance(found, DataError):
                if not self.skip_bad_lines:
                    raise DataError(f"{place_of(unit, line)}: {found}")
                skipped.append(f"{place_of(unit, line)}: {found}" if len(skipped) < REASONS else "")
                continue
            roles |= {message["role"] for message in messages} - ROLES
            lost += any(message.get("tool_calls") for message in messages) and self._loses_calls(messages, found[0])
            ids.append(np.array(found[0], self.dtypes[0]))
            marks.append(np.array(found[1], np.uint8) * ANSWER)
            if found[0]:
                marks[-1][-1] |= END
            total += sum(utf8_length(message.get("content") or "") for message in messages)
        lengths = np.array([len(each) for each in ids], np.int32)
        columns = [np.concatenate([np.empty(0, t), *each]) for t, each in zip(self.dtypes, (ids, marks), strict=True)]
        source, reasons = unit_digest(unit), tuple(skipped[:REASONS])
        return UnitTokens(columns, [lengths, lengths], total, len(skipped), source, reasons, frozenset(roles), lost)

    def _loses_calls(self, messages: Messages, ids: list[int]) -> bool:
        """Whether the template has left out a call of a tool: its name is not in the text."""
        text = self.tokenizer.decode(ids)
        for call in itertools.chain.from_iterable(_calls(message) for message in messages):
            named = call.get("function", call) if isinstance(call, dict) else None
            name = named.get("name") if isinstance(named, dict) else None
            if not isinstance(name, str) or name not in text:
                return True
        return False


def _calls(message: dict[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or []
    return calls if isinstance(calls, list) else [calls]


def preprocess_chat(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    key: str = "messages",
    workers: int = 1,
    skip_bad_lines: bool = False,
    on_progress: OnProgress = no_progress,
) -> Totals:
    """Tokenise conversations, lists of messages in field `key` of JSONL lines, into a pair of tokens and one of marks.

    Raises DataError where an input is missing or broken, or nothing in it gives a token.
    """
    for path in inputs:
        if not path.endswith(JSONL_SUFFIXES) and (os.path.exists(path) or path.startswith("hf:")):
            raise DataError(
                f"`input`={path}: {FLAG} reads JSON lines (.jsonl) with a list of messages in each; of a data set of "
                'Hugging Face, Parquet too, ds.to_json("talks.jsonl") makes them'
            )
    job = ChatJob(tokenizer, (key,), append_eod=False, skip_bad_lines=skip_bad_lines, template=template)
    prefix = f"{output_prefix}_{key}_document"
    totals = Totals((prefix, prefix + MARKS), input_size(inputs))
    units = (unit for path in inputs for unit in input_units(path, (key,)))
    write_units(job, units, totals, source=" ".join(inputs), workers=workers, on_progress=on_progress)
    written = IndexedDataset(prefix, flag="`output_prefix`")
    check_answers(written, 0, len(written))
    totals.unanswered = unanswered(written)
    note_tokenizer(prefix, tokenizer)
    return replace(totals, prefixes=(prefix,))
