"""Prompts of a file, and their ids."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data import JSONL_SUFFIXES, Tokenizer, read_jsonl, read_text
from megalite.errors import ConfigError, DataError
from megalite.files import input_problem

MOST_BYTES = 1 << 26
"""Of a file of prompts, all of which are held at once."""


def read_prompts(path: str, flag: str) -> list[str]:
    """The field `prompt` of each line of a JSONL file, or each line of another that is not empty. Raises DataError."""
    problem = input_problem(path, MOST_BYTES)
    if problem:
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


def prompt_ids(tokenizer: Tokenizer, texts: Sequence[str], flag: str) -> list[list[int]]:
    """An empty text begins a document. Raises ConfigError where there is no token for that."""
    for text in texts:
        if not text.isascii() and text != text.encode(errors="replace").decode():
            raise ConfigError(
                f"{flag}={ascii(text)[:60]}: has half a character, or bytes that are not UTF-8; repair it"
            )
    found = [tokenizer.encode(text) for text in texts]
    if tokenizer.eod_id is None and not all(found):
        raise ConfigError(f"{flag}: is empty, and this tokenizer has no end-of-document token to begin after")
    return [ids or [tokenizer.eod_id or 0] for ids in found]
