"""`--split A,B,C`: which part of the documents (or characters) trains, validates and tests. Megatron's arithmetic."""

from __future__ import annotations

import math
import re

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
    edges = [0.0]
    for weight in weights:
        edges.append(edges[-1] + weight / total)
    return [(low, high) if high > low else None for low, high in zip(edges[:-1], edges[1:], strict=True)]


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
