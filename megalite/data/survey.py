"""Surveys tell data of runs apart, cheaply even for terabytes: sizes, digests of the document lengths and of sampled
tokens.

A checkpoint keeps the surveys of its run. The place in the data is a number (`consumed_samples`) that means nothing
for other data, so a run that continues compares them. Where the files lie is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megalite.data.indexed import ANSWER, IndexedDataset
from megalite.data.token_store import TokenStore
from megalite.errors import DataError

# Up to WHOLE tokens all are read, beyond that PIECES pieces of PIECE tokens from the first to the last.
WHOLE = 1 << 25
PIECE, PIECES = 1 << 15, 256


@dataclass(frozen=True)
class Survey:
    """One token store: `source` is the flag and path that named it, `lengths` and `content` are digests."""

    source: str
    sequences: int
    tokens: int
    lengths: str
    content: str

    def __post_init__(self) -> None:
        numbers, texts = {self.sequences, self.tokens}, {self.source, self.lengths, self.content}
        if {type(each) for each in numbers} != {int} or {type(each) for each in texts} != {str}:
            raise ValueError("no survey")

    def same_as(self, other: Survey) -> bool:
        """Whether both are the same tokens, wherever they lie."""
        return replace(self, source=other.source) == other

    def size(self) -> str:
        """`1,234 documents of 56,789 tokens`."""
        return f"{self.sequences:,} document{'s' * (self.sequences != 1)} of {self.tokens:,} tokens"


def survey(store: TokenStore, source: str) -> Survey:
    """Surveys a store; generated tokens are known by their lengths."""
    lengths = store.lengths
    content = xxhash.xxh3_128()
    if isinstance(store, IndexedDataset):
        for _, tokens in _sampled(store):
            content.update(np.ascontiguousarray(tokens.astype("<i8")).data)
        for _, marks in _sampled(store.marks) if store.marks is not None else ():
            content.update(np.ascontiguousarray(marks).data)
    return Survey(
        source,
        len(lengths),
        int(lengths.sum(dtype=np.int64)),
        xxhash.xxh3_128_hexdigest(np.ascontiguousarray(lengths).data),
        content.hexdigest(),
    )


def check_vocabulary(store: IndexedDataset, vocab_size: int, tokenizer: str, source: str) -> None:
    """Raises DataError naming the first sampled id that the model has no embedding for, and its document.

    tokenizer: its name, for the message. source: flag and path of the store.
    """
    bounds = np.iinfo(store.dtype)
    if bounds.min >= 0 and bounds.max < vocab_size:
        return
    for start, tokens in _sampled(store):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            at = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
            fix = "name the tokenizer that wrote it"
            if tokenizer == "NullTokenizer" and high == vocab_size:
                fix = f"with Megatron-LM's NullTokenizer that ends a document: use `vocab_size` {high + 1}"
            raise DataError(
                f"{source}: document {store.document_at(start + at)} holds token id {int(tokens[at])}, outside of the "
                f"vocabulary of {tokenizer} (0..{vocab_size - 1}); {fix}"
            )


def unanswered(store: TokenStore) -> int:
    """How many of its conversations have no token that the loss counts; of text there is nothing to ask."""
    if not isinstance(store, IndexedDataset) or store.marks is None:
        return 0
    marks = store.marks.stream(0, store.num_tokens)
    lengths = store.marks.lengths[store.marks.lengths > 0]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return len(store.lengths) - int(np.count_nonzero(np.bitwise_or.reduceat(marks, starts) & ANSWER))


def check_answers(store: TokenStore, begin: int, end: int) -> None:
    """Raises DataError where a training on the conversations `begin:end` would learn nothing, as they have no answer.
    Of text there is nothing to ask, nor of an empty split, which is refused as such."""
    if not isinstance(store, IndexedDataset) or store.marks is None or begin >= end:
        return
    if not any((store.marks.get(number) & ANSWER).any() for number in range(begin, end)):
        raise DataError(
            f"{store.prefix}: none of its {end - begin:,} conversations has an answer of the assistant, so the loss "
            "counts nothing; give messages of the role assistant, or a template that marks what they wrote"
        )


def _sampled(store: IndexedDataset) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Pieces of the tokens in the order of the sequences, each with its place: all of them where they are few."""
    total = store.num_tokens
    if total <= WHOLE:
        at = 0
        for tokens in store.chunks():
            if len(tokens):
                yield at, tokens
            at += len(tokens)
        return
    for number in range(PIECES):
        start = (total - PIECE) * number // (PIECES - 1)
        yield start, store.stream(start, start + PIECE)


def survey_differences(then: Any, now: Mapping[str, Sequence[Survey]]) -> list[str]:
    """Lists how the data of a run differ from those of its checkpoint; empty where they are the same or not known.

    Splits that one of the two does not use are passed over, as are validation and test data that another flag names
    (the report tells of those).

    then: what the checkpoint's meta holds: split -> surveys as JSON objects. DataError where it is no such table.
    """
    try:
        before = {str(split): [Survey(**one) for one in stores] for split, stores in dict(then).items()}
    except (TypeError, ValueError):
        raise DataError("`load`: the checkpoint's account of its data is damaged; load an older one") from None
    found = []
    for split, stores in now.items():
        old = before.get(split)
        if old is None or (split != "train" and [s.source for s in old] != [s.source for s in stores]):
            continue
        if len(old) != len(stores):
            found.append(f"{stores[0].source}: {len(stores)} sources of {split} data (checkpoint {len(old)})")
        for was, store in zip(old, stores, strict=False):
            if not store.same_as(was):
                found.append(_difference(was, store))
    return list(dict.fromkeys(found))


def _difference(was: Survey, now: Survey) -> str:
    if (was.sequences, was.tokens) != (now.sequences, now.tokens):
        what = f"{now.size()} (checkpoint {was.size()})"
    elif was.lengths != now.lengths:
        what = f"{now.size()} as in the checkpoint, but of other lengths"
    else:
        what = f"{now.size()} as in the checkpoint, but other tokens"
    return f"{now.source}: {what}{f', there {was.source}' * (was.source != now.source)}"


def surveys_to_meta(surveys: Mapping[str, Sequence[Survey]]) -> dict[str, Any]:
    return {split: [asdict(one) for one in stores] for split, stores in surveys.items()}


@dataclass(frozen=True)
class Phase:
    """A phase of `--data-schedule`, as a checkpoint keeps it. It has begun once its first sample was consumed: data,
    weights and beginning then belong to the run; what has not begun may be edited."""

    first: int  # its first sample
    name: str  # the file that names its data
    weights: tuple[float, ...]  # of the blend; empty: by size
    requests: tuple[int, ...]  # totals of its samples asked for so far, as `Datasets.train_requests`
    surveys: tuple[Survey, ...]  # of its data


def begun_phases(meta: Mapping[str, Any]) -> list[Phase]:
    """The phases of a checkpoint's run that have begun; empty where it had none. Raises DataError."""
    try:
        phases = [_phase(**one) for one in meta.get("data_phases", ())]
        return [phase for number, phase in enumerate(phases) if not number or phase.first < meta["consumed_samples"]]
    except (TypeError, ValueError, KeyError):
        raise DataError("`load`: the checkpoint's account of its phases is damaged; load an older one") from None


def _phase(first: int, name: str, weights: list[float], requests: list[int], surveys: list[dict[str, Any]]) -> Phase:
    if not all(type(number) is int and number >= 0 for number in (first, *requests)) or type(name) is not str:
        raise ValueError
    return Phase(first, name, tuple(map(float, weights)), tuple(requests), tuple(Survey(**one) for one in surveys))


def phase_differences(meta: Mapping[str, Any], now: Sequence[Phase]) -> list[str]:
    """How phases that have begun differ from those of the checkpoint. Raises DataError where its account is damaged."""
    then, consumed = begun_phases(meta), meta.get("consumed_samples", 0)
    if not now:
        return [f"`data_schedule`: not given, and {len(then)} of its phases have begun"] if len(then) > 1 else []
    found: list[str] = []
    for number, (was, phase) in enumerate(zip_longest(then, now)):
        named = f"`data_schedule`: phase {number + 1} ({(phase or was).name})"
        if phase is None:
            return [*found, f"{named} has begun and is gone"]
        if was is None:
            if number and phase.first < consumed:
                found.append(f"{named} would begin before the {consumed:,} samples that are consumed")
            continue
        if was.first != phase.first:
            return [*found, f"{named} has begun and is now from sample {phase.first:,} (checkpoint {was.first:,})"]
        if was.weights != phase.weights:
            found.append(f"{named} has begun and its weights differ")
        then_had = {"train": [asdict(one) for one in was.surveys]}
        if number and (other := survey_differences(then_had, {"train": phase.surveys})):  # of the first others tell
            found.append(f"{named} has begun: {'; '.join(other)}")
    return found
