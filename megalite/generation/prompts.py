"""Prompts of a file, and their ids."""

import json
from collections.abc import Sequence
from typing import Any

from megalite.data import (
    JSONL_SUFFIXES,
    Messages,
    Tokenizer,
    open_text,
    parse_json,
    parse_messages,
    read_jsonl,
    read_text,
)
from megalite.errors import ConfigError, DataError
from megalite.files import input_problem

MOST_BYTES = 1 << 26
"""Of a file of prompts, all of which are held at once."""


def read_prompts(path: str, flag: str) -> list[str]:
    """The field `prompt` of each line of a JSONL file, or each line of another that is not empty. Raises DataError."""
    if problem := input_problem(path, MOST_BYTES):
        raise DataError(f"{flag}={path}: {problem}")
    if path.endswith(JSONL_SUFFIXES):
        try:
            texts = list(read_jsonl(path, flag, "prompt"))
        except DataError as error:
            raise DataError(f'{flag}: {str(error).split(";")[0]}; a line is such as {{"prompt": "Once"}}') from None
    else:
        lines = read_text(path, f"{flag}={path}").replace("\r\n", "\n").replace("\r", "\n").split("\n")
        texts = [line for line in lines if line.strip()]
    if not texts:
        raise DataError(f"{flag}={path}: holds no prompt; write one in each line")
    return texts


def read_talks(path: str, flag: str, begin: Sequence[dict[str, Any]] = ()) -> list[Messages]:
    """Conversations that wait for an answer: the field `messages` of each line of a JSONL file, or `prompt`, what a
    user says; of another file each line that is not empty. begin: what `--system` puts in front. Raises DataError."""
    if not path.endswith(JSONL_SUFFIXES):
        return [[*begin, said("user", text)] for text in read_prompts(path, flag)]
    if problem := input_problem(path, MOST_BYTES):
        raise DataError(f"{flag}={path}: {problem}")
    with open_text(path, flag) as file:
        try:
            lines = ((line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.strip())
            talks = [_talk(line, where, begin) for line, where in lines]
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise DataError(f"{flag}={path}: cannot be read ({str(error)[:80]})") from None
    if not talks:
        raise DataError(f"{flag}={path}: holds no conversation; write one in each line")
    return talks


def _talk(line: str | bytes, where: str, begin: Sequence[dict[str, Any]]) -> Messages:
    try:
        record = parse_json(line, where)
        if isinstance(record, dict) and "messages" not in record and isinstance(record.get("prompt"), str):
            line = json.dumps({"messages": [said("user", record["prompt"])]})
        (messages,) = parse_messages(line, ("messages",), where)
    except DataError as error:
        form = '{"messages": [{"role": "user", "content": "Hi"}]}'
        raise DataError(f"{str(error).split(';')[0]}; a line is such as {form}") from None
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: ends with the assistant's message, so nothing waits for an answer; drop that")
    if begin and any(message["role"] == "system" for message in messages):
        raise DataError(f"{where}: has a system message of its own, and `system` gives another; drop one of the two")
    return [*begin, *messages]


def check_whole(text: str, flag: str) -> None:
    """Raises ConfigError for half a character."""
    if not text.isascii() and text != text.encode(errors="replace").decode():
        raise ConfigError(f"{flag}={ascii(text)[:60]}: has half a character, or bytes that are not UTF-8; repair it")


def said(role: str, text: str) -> dict[str, str]:
    """A message of a conversation."""
    return {"role": role, "content": text}


def prompt_ids(tokenizer: Tokenizer, texts: Sequence[str], flag: str, front: Sequence[int] = ()) -> list[list[int]]:
    """Ids of each text, behind those of `front`; an empty text begins a document. Raises ConfigError where there is no
    token for that."""
    for text in texts:
        check_whole(text, flag)
    found = [[*front, *tokenizer.encode(text)] for text in texts]
    if tokenizer.eod_id is None and not all(found):
        raise ConfigError(f"{flag}: is empty, and this tokenizer has no end-of-document token to begin after")
    return [ids or [tokenizer.eod_id or 0] for ids in found]
