"""Conversations as tokens by the tokenizer's own chat template, and which of them are answers.

    PREFIX_messages_document         tokens of every conversation, a document each
    PREFIX_messages_document_marks   a number for each of them: 1, the loss counts it (an answer of the assistant);
                                     2, a conversation ends here (its template may use the end-of-document token before)

A template with `{% generation %}` blocks says itself what the assistant wrote. Of any other it is what a message of the
assistant adds to the conversation with its prompt, up to white space after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megalite.data.cache import digest_of
from megalite.data.corpus import JSONL_SUFFIXES
from megalite.data.file_chunks import InputUnit, input_size, input_units, read_unit, unit_digest, utf8_length
from megalite.data.indexed import ANSWER, END, MARKS
from megalite.data.kept_units import UnitTokens
from megalite.data.preprocess import Summary, Totals, UnitJob, write_units
from megalite.data.tokenizer import Tokenizer, token_dtype
from megalite.errors import DataError
from megalite.extras import optional_package
from megalite.progress import OnProgress, untold

FLAG = "--data-format=chat"
Messages = list[dict[str, Any]]


class ChatTemplate:
    """The template beside a Hugging Face tokenizer, by the package transformers.

    directory: what `--tokenizer-model` names. Raises DataError where there is no template.
    """

    def __init__(self, tokenizer: Tokenizer, directory: str | None) -> None:
        if tokenizer.kind != "HuggingFaceTokenizer" or directory is None:
            raise DataError(f"{FLAG}: needs --tokenizer-type=HuggingFaceTokenizer, whose files have the chat template")
        transformers = optional_package(FLAG, "transformers")
        folder = Path(directory) if Path(directory).is_dir() else Path(directory).parent
        self._theirs: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._backend: Any = tokenizer.backend  # type: ignore[attr-defined]  # of this kind
        template = getattr(self._theirs, "chat_template", None)
        if not isinstance(template, str):
            raise DataError(f"--tokenizer-model={directory}: has no chat template; take the tokenizer of a chat model")
        self.text = template
        self._tells = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def encode(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Tokens of a conversation, and which are answers. Raises DataError where the template does not take it."""
        if self._tells:
            found = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return list(found["input_ids"]), [bool(value) for value in found["assistant_masks"]]
        text = self._apply(messages, tokenize=False)
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans = [self._span(text, messages, i) for i, message in enumerate(messages) if message["role"] == "assistant"]
        return list(encoding.ids), [any(a <= begin < b for a, b in spans) for begin, _ in encoding.offsets]

    def _span(self, text: str, messages: Messages, index: int) -> tuple[int, int]:
        """Characters of the whole text that an answer is."""
        before = self._apply(messages[:index], tokenize=False, add_generation_prompt=True) if index else ""
        after = self._apply(messages[: index + 1], tokenize=False).rstrip()
        if not index or not text.startswith(after) or not after.startswith(before):
            why = "is the first" if not index else "reads otherwise in the whole conversation than at its end"
            raise DataError(f"answer {index + 1} {why}, so the template does not say where it begins")
        return len(before), len(after)

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._theirs.apply_chat_template(messages, **options)
        except Exception as error:  # what a template raises is its own
            raise DataError(f"the chat template refuses it ({str(error).splitlines()[0][:120]})") from None


def parse_messages(line: str | bytes, keys: Sequence[str], where: str) -> list[Any]:
    """The conversation in field `keys[0]` of one JSONL line; `where` is its place, for the error."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); repair the line, or --skip-bad-lines drops it") from None
    messages = record.get(keys[0]) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: no list of messages in field '{keys[0]}'; name the field by --json-keys")
    for number, message in enumerate(messages, 1):
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: message {number} is not an object with a role and a content that are texts")
    if record.get("tools"):
        raise DataError(f"{where}: has tools, which are not supported; leave them out, or --skip-bad-lines drops it")
    return [messages]


@dataclass(frozen=True)
class ChatJob(UnitJob):
    """Turns units of conversations into tokens and marks."""

    template: ChatTemplate | None = None
    marked: ClassVar[bool] = True

    @property
    def dtypes(self) -> list[np.dtype[np.integer]]:
        return [token_dtype(self.tokenizer.vocab_size), np.dtype(np.uint8)]

    @property
    def settings(self) -> str:
        assert self.template is not None
        return digest_of("chat", super().settings, self.template.text)

    def run(self, unit: InputUnit) -> UnitTokens:
        assert self.template is not None
        if unit.columns is not None or not str(unit.place).endswith(JSONL_SUFFIXES):
            raise DataError(f"--input={unit.place}: {FLAG} reads JSONL with a list of messages in each line")
        (column,), skipped = read_unit(unit, self.json_keys, skip_bad_lines=self.skip_bad_lines, parse=parse_messages)
        ids, marks, total = [], [], 0
        for number, messages in enumerate(column, 1):
            try:
                tokens, answers = self.template.encode(messages)
            except DataError as error:
                if self.skip_bad_lines:
                    skipped += 1
                    continue
                raise DataError(f"{unit.place}: conversation {number} of a block: {error}") from None
            ids.append(np.array(tokens, self.dtypes[0]))
            marks.append(np.array(answers, np.uint8) * ANSWER)
            if tokens:
                marks[-1][-1] |= END
            total += sum(utf8_length(message["content"]) for message in messages)
        lengths = np.array([len(each) for each in ids], np.int32)
        columns = [np.concatenate([np.empty(0, t), *each]) for t, each in zip(self.dtypes, (ids, marks), strict=True)]
        return UnitTokens(columns, [lengths, lengths], total, skipped, unit_digest(unit))


def preprocess_chat(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    key: str = "messages",
    workers: int = 1,
    skip_bad_lines: bool = False,
    on_progress: OnProgress = untold,
) -> Summary:
    """Tokenise conversations, lists of messages in field `key` of JSONL lines, into a pair of tokens and one of marks.

    Raises DataError where an input is missing or broken, or nothing in it gives a token.
    """
    job = ChatJob(tokenizer, (key,), append_eod=False, skip_bad_lines=skip_bad_lines, template=template)
    totals, prefix = Totals(input_size(inputs)), f"{output_prefix}_{key}_document"
    units = (unit for path in inputs for unit in input_units(path, (key,)))
    prefixes = (prefix, prefix + MARKS)
    write_units(job, units, prefixes, totals, source=" ".join(inputs), workers=workers, on_progress=on_progress)
    return Summary((prefix,), totals)
