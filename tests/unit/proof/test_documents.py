"""Which documents of an iteration stand out: those that are one token over and over, and no ordinary one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megalite.proof.documents import DocumentLoss, outstanding, part_of_one


def ordinary(rng: random.Random, number: int, same: float = 0.1) -> DocumentLoss:
    """A document of typical text: its mean loss scatters as the mean of its tokens does."""
    tokens = rng.choice([8, 40, 200, 900])
    return DocumentLoss("text", number, rng.gauss(3.0, (0.05 + 4.0 / tokens) ** 0.5), tokens, "once", same)


@pytest.mark.parametrize("seed", range(10))
def test_a_cheap_document_of_one_token_stands_out_and_ordinary_ones_do_not(seed: int) -> None:
    rng = random.Random(seed)
    beside = {i: [ordinary(rng, 100 * i + k) for k in range(12)] for i in range(4)}
    here = [ordinary(rng, k) for k in range(12)]
    assert outstanding(here, beside) == []
    repeated = DocumentLoss("text", 999, 0.4, 200, "aaaa", 0.95)
    assert outstanding([*here, repeated], beside) == [repeated]
    dear = DocumentLoss("text", 998, 9.0, 900, "0f3a", 0.1)
    assert outstanding([dear, *here], beside) == [dear]


@pytest.mark.parametrize(
    ("ids", "part"),
    [([7] * 40, 1.0), ([7] * 36 + [1, 2, 3, 4], 0.9), (list(range(40)), 1 / 40), ([7] * 31, 0.0), ([], 0.0)],
)
def test_the_part_that_is_one_token(ids: list[int], part: float) -> None:
    assert part_of_one(np.array(ids, dtype=np.int64)) == pytest.approx(part)
