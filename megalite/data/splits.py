"""Which data a run reads, by split and by phase: the files behind `--data-path` and its kin, and which part of the
documents (or characters) trains, validates and tests (`--split A,B,C`, Megatron's arithmetic)."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config import DataConfig
from megalite.errors import DataError

SPLIT_NAMES = ("train", "valid", "test")


class UnusableSplit(DataError):
    """A split that is empty or too small."""


def parse_split(text: str) -> list[tuple[float, float] | None]:
    """Fractions `(from, to)` of train, valid and test; None for a part of weight 0. Weights need not sum to anything.

    Raises DataError unless there are one to three non-negative numbers with a positive sum.
    """
    advice = "give train,valid,test weights such as 969,30,1"
    words = [word for word in re.split(r"[,/\s]+", text.strip()) if word]
    try:
        weights = [float(word) for word in words]
    except ValueError:
        raise DataError(f"`split`={text}: not numbers; {advice}") from None
    if not 1 <= len(weights) <= 3:
        raise DataError(f"`split`={text}: {len(weights)} numbers; {advice}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise DataError(f"`split`={text}: weights must be 0 or more and not all 0; {advice}")
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    edges = [0.0, *itertools.accumulate(weight / total for weight in weights)]
    return [(low, high) if high > low else None for low, high in itertools.pairwise(edges)]


def bounds_of(part: tuple[float, float] | None, count: int) -> tuple[int, int]:
    """First and last-but-one item of a part of `count` items (round half to even, as Megatron)."""
    if part is None:
        return 0, 0
    return int(round(part[0] * float(count))), int(round(part[1] * float(count)))


def without(split: str) -> str:
    """Advice for a message: how a run does without a split."""
    return {"train": "only evaluate by `skip_train`", "test": "go without a final test, as here"}.get(
        split, "do not evaluate, by `eval_iters` 0"
    )


@dataclass(frozen=True)
class Source:
    """Data that one flag names: words to blend, and the part of each that a split takes."""

    flag: str
    words: tuple[str, ...]
    part: tuple[float, float] | None
    whole: bool


def sources_of(cfg: DataConfig) -> dict[str, Source]:
    """Finds the data of each split; empty for the default corpus and for mock data. With `--data-schedule` they are its
    first phase's, and `train 1`, `train 2` ... the training data of those that follow. Raises DataError."""
    named = {"train": cfg.train_data_path, "valid": cfg.valid_data_path, "test": cfg.test_data_path}
    own = {split: apart(split, words) for split, words in named.items() if words}
    given = [source.flag for source in own.values()]
    if cfg.data_schedule is not None:
        first, *later = (_parts_of(cfg, file, "`data_schedule`") for _, file in cfg.phases(1))
        return {**first, **own, **{f"train {number}": parts["train"] for number, parts in enumerate(later, 1)}}
    shared = ["`data_path`"] * bool(cfg.data_path) + ["`data_args_path`"] * bool(cfg.data_args_path)
    given += shared
    if len(given) > 1 and shared:
        other = next(flag for flag in given if flag != shared[0])
        raise DataError(f"{shared[0]}: given together with {other}; name the data in one way")
    if cfg.mock_data and given:
        raise DataError(f"`mock_data`: given together with {given[0]}; drop one")
    return _parts_of(cfg, cfg.data_args_path, shared[0]) if shared else own


def apart(split: str, words: Sequence[str]) -> Source:
    """Data all of which belong to a split."""
    return Source(f"`{split}_data_path`", tuple(words), (0.0, 1.0), whole=True)


def _parts_of(cfg: DataConfig, file: str | None, flag: str) -> dict[str, Source]:
    """The splits of what `--data-path` names, or a file. Beside splits with data of their own, training takes all."""
    words = tuple(cfg.data_path) if file is None else _read_words(cfg, file)
    if cfg.valid_data_path or cfg.test_data_path:
        return {"train": Source(flag, words, (0.0, 1.0), whole=True)}
    parts = dict(zip(SPLIT_NAMES, parse_split(cfg.split), strict=True))
    return {split: Source(flag, words, part, whole=False) for split, part in parts.items()}


def _read_words(cfg: DataConfig, path: str) -> tuple[str, ...]:
    flag = cfg.lists[path]
    try:
        words = tuple(Path(path).read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DataError(f"{flag}: cannot be read ({why})") from None
    if not words:
        raise DataError(f"{flag}: the file is empty; write into it what `data_path` would hold")
    return words
