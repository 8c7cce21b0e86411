"""Bounds on tokenizers of other people, which else end in a panic, in hours or with all memory."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from megalite.errors import DataError

#: Bytes of a tokenizer's file. The largest of a million tokens are half of it.
MOST_BYTES = 128 << 20
#: Ids up to the largest; a table of them has some bytes for each.
MOST_IDS = 1 << 24
#: Characters that a normalizer or a decoder may make of one.
MOST_GROWTH = 1000
#: Runs of each of these are what patterns that try every way to cut a text take longest for.
PROBES = tuple(char * 40 + end for char in "a1 !_\né" for end in ("", "#"))
SECONDS = 2.0


@contextlib.contextmanager
def within(origin: str, work: str) -> Iterator[None]:
    """Whatever the package raises, panics of its Rust code among it, as a DataError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, DataError):
        raise
    except BaseException as error:
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise DataError(f"{origin}: {work} ({said})") from None


def check_ids(largest: int, origin: str) -> None:
    """Raises DataError where a table of all ids would be senseless."""
    if largest >= MOST_IDS:
        raise DataError(f"{origin}: has the id {largest:,}; {MOST_IDS:,} ids are the most; take another tokenizer")


def check_growth(definition: Mapping[str, Any], origin: str) -> None:
    """Raises DataError where the rules that replace text multiply it: thirty of `a -> aa` make a gigabyte of one."""
    for part in ("normalizer", "decoder"):
        rules = list(_replacements(definition.get(part)))
        grown = max((_grown(rules[at:]) for at in range(len(rules))), default=0)
        if grown > MOST_GROWTH:
            raise DataError(
                f"{origin}: its {part} makes more than {MOST_GROWTH:,} characters of one; take another tokenizer"
            )


def _replacements(rule: Any) -> Iterator[tuple[str | None, str]]:
    """(text, what takes its place) of each step; None: a pattern."""
    if not isinstance(rule, dict):
        return
    for inner in (*rule.get("normalizers", ()), *rule.get("decoders", ())):
        yield from _replacements(inner)
    if rule.get("type") == "Replace":
        pattern = rule.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        yield text or None, str(rule.get("content", ""))
    elif rule.get("type") == "Prepend":
        yield "", str(rule.get("prepend", ""))


def _grown(rules: list[tuple[str | None, str]]) -> float:
    """Factor by which the rules lengthen the first one's text."""
    first = rules[0][0] or "a"
    text = first
    for pattern, content in rules:
        if len(content) > MOST_GROWTH:
            return len(content)
        if pattern == "":
            text = content + text
        else:
            text = text.replace(pattern, content) if pattern else content * len(text)
        if len(text) > MOST_GROWTH * len(first):
            break
    return len(text) / len(first)


def probe(backend: Any, origin: str) -> None:
    """Raises DataError where the tokenizer panics at plain text, or takes seconds for two lines of it."""
    begin = time.thread_time()
    for text in ("An e\u0301 \u65e5 \U00010348\t\r\n0", *PROBES):
        with within(origin, "fails on plain text"):
            try:
                ids = backend.encode(text, add_special_tokens=False).ids
                backend.decode(ids, skip_special_tokens=False)
            except Exception:  # such as a character that its vocabulary does not have; a panic is none
                continue
        if (taken := time.thread_time() - begin) > SECONDS:
            raise DataError(
                f"{origin}: takes {taken:.1f} s for {len(text)} characters, its patterns try every way to cut them; "
                "take another tokenizer"
            )
