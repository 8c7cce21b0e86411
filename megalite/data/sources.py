"""Which data a run reads: the files behind `--data-path` and its kin, by split and by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config import DataConfig
from megalite.data.corpus import SplitRange
from megalite.data.splits import SPLIT_NAMES, parse_split
from megalite.errors import DataError


@dataclass(frozen=True)
class Source:
    """Data that one flag names: words to blend, and the part of each that a split takes."""

    flag: str
    words: tuple[str, ...]
    part: SplitRange | None
    whole: bool


def sources_of(cfg: DataConfig) -> dict[str, Source]:
    """Finds the data of each split; empty for the default corpus and for mock data. Those of `--data-schedule` are its
    first phase's. Raises DataError."""
    named = {"train": cfg.train_data_path, "valid": cfg.valid_data_path, "test": cfg.test_data_path}
    own = {split: apart(split, words) for split, words in named.items() if words}
    given = [source.flag for source in own.values()]
    if cfg.data_schedule is not None:
        return {**_parts_of(cfg, cfg.phases(1)[0][1], "`data_schedule`"), **own}
    shared = ["`data_path`"] * bool(cfg.data_path) + ["`data_args_path`"] * bool(cfg.data_args_path)
    given += shared
    if len(given) > 1 and shared:
        other = next(flag for flag in given if flag != shared[0])
        raise DataError(f"{shared[0]}: given together with {other}; name the data in one way")
    if cfg.mock_data and given:
        raise DataError(f"`mock_data`: given together with {given[0]}; drop one")
    return _parts_of(cfg, cfg.data_args_path, shared[0]) if shared else own


def phase_sources(cfg: DataConfig) -> list[Source]:
    """The training data of each phase of `--data-schedule`: all of them where validation or test have data of their
    own, else the training part. Raises DataError."""
    return [_parts_of(cfg, file, "`data_schedule`")["train"] for _, file in cfg.phases(1)]


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
