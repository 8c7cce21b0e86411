"""Batch size and sequence length as pure functions of the samples consumed.

::

    constant                    B ________________________
    --rampup-batch-size 4 2 60  4 ___6 ___8 ___10 ________    S, then +I at equal distances over N samples, up to B
    --step-batch-size-schedule  768 _______1536 __________    sizes from given token counts on

A resumed run needs `consumed_samples` alone. Schedules of other quantities (learning rate) count samples, so a growing
batch neither shortens nor stretches them; `samples_after` and `iterations_for` convert between the two units.
"""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Self

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"(\d+(?:\.\d+)?)([KMGBT]?):(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Steps:
    """Numbers by the sample count from which each holds.

    An iteration has the number that holds at its first sample, so a change waits for the end of the iteration.

    steps: `(first sample, number)`, first samples rising from 0. number, counts: how messages call a number, and what
    it is one of.
    """

    steps: tuple[tuple[int, int], ...]
    number: ClassVar[str]
    counts: ClassVar[str]

    @classmethod
    def constant(cls, number: int) -> Self:
        return cls(((0, number),))

    @classmethod
    def parse(cls, text: str, seq_length: int) -> Self:
        """The numbers of `TOKENS:NUMBER` pairs. Raises ValueError as `parse_words`, or for a number below 1."""
        steps = parse_words(text, seq_length, cls.number)
        for pair, (_, word) in zip(text.split(), steps, strict=True):
            if not word.isdecimal():
                raise ValueError(f"'{pair}' is not TOKENS:{cls.number}")
            if int(word) < 1:
                raise ValueError(f"'{pair}' has no {cls.counts}")
        return cls(tuple((first, int(word)) for first, word in steps))

    def at(self, consumed_samples: int) -> int:
        """The number of the iteration that begins after `consumed_samples`."""
        return next(number for first, number in reversed(self.steps) if first <= consumed_samples)


class BatchSizeSchedule(Steps):
    """Samples of a global batch (`--step-batch-size-schedule "0:768 250B:1536"`: from 0 tokens on 768, then 1536)."""

    number = "SIZE"
    counts = "samples"

    @classmethod
    def ramp(cls, start: int, increment: int, ramp_samples: int, global_batch_size: int) -> BatchSizeSchedule:
        """Grow from `start` by `increment` to `global_batch_size`, evenly over `ramp_samples` samples.

        Raises ValueError where the increment does not lead from `start` to the full batch.
        """
        if start < 1 or increment < 1 or start > global_batch_size or (global_batch_size - start) % increment:
            raise ValueError("the increment must lead from the first to the full batch")
        count = (global_batch_size - start) // increment
        if count == 0 or ramp_samples <= 0:
            return cls.constant(global_batch_size)
        # The full size is reached when ramp_samples are consumed: the k-th increment at k/count of them.
        return cls(tuple((-(-ramp_samples * k // count), start + k * increment) for k in range(count + 1)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.steps)

    @property
    def final(self) -> int:
        return self.steps[-1][1]

    def samples_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed when `iterations` more iterations have run."""
        consumed = consumed_samples
        for size, count in self._runs(consumed_samples):
            run = min(count, iterations)
            consumed += run * size
            iterations -= run
        return consumed

    def iterations_for(self, samples: int, consumed_samples: int = 0) -> int:
        """Iterations that consume at least `samples` samples in all (the last one may pass the mark)."""
        consumed, iterations = consumed_samples, 0
        for size, count in self._runs(consumed_samples):
            run = min(count, max(0, -(-(samples - consumed) // size)))
            consumed += run * size
            iterations += run
        return iterations

    def _runs(self, consumed: int) -> list[tuple[int, int]]:
        """Split the future into (size, iterations at that size); the last size holds forever."""
        runs = []
        for (_, size), (stop, _) in itertools.pairwise(self.steps):
            count = max(0, -(-(stop - consumed) // size))
            runs.append((size, count))
            consumed += count * size
        return [*runs, (self.final, sys.maxsize)]


class LengthSchedule(Steps):
    """Tokens of a sequence (`--seq-length-schedule`).

    Everything else counts samples of `--seq-length` tokens, the longest; what is shorter is cut out of them, so a batch
    has as many tokens at every length, and the tokens of step k do not depend on the schedule::

        0:4096 500B:32768     |____|____|____|____|____|____|____|____|     8 sequences of each sample
                              |_______________________________________|     from 500 billion tokens on the sample whole
    """

    number = "LENGTH"
    counts = "tokens"

    @property
    def lengths(self) -> tuple[int, ...]:
        """All that occur, the first first."""
        return tuple(dict.fromkeys(length for _, length in self.steps))


def parse_words(text: str, seq_length: int, what: str) -> tuple[tuple[int, str], ...]:
    """`(first sample, word)` of `TOKENS:WORD` pairs; TOKENS may end in K, M, G (or B) or T.

    seq_length: tokens of a sample; a threshold counts as reached with the sample that reaches it. what: the name of the
    word. Raises ValueError where the text is not of that form, does not begin at 0, or does not rise.
    """
    steps: list[tuple[int, str]] = []
    for pair in text.split():
        match = _STEP.fullmatch(pair)
        if match is None:
            raise ValueError(f"'{pair}' is not TOKENS:{what}")
        tokens = int(Decimal(match[1]) * UNITS.get(match[2].upper(), 1))
        steps.append((-(-tokens // seq_length), match[3]))
    if not steps or steps[0][0] != 0:
        raise ValueError("the first step must begin at 0 tokens")
    if any(after <= before for (before, _), (after, _) in itertools.pairwise(steps)):
        raise ValueError("the token counts must rise")
    return tuple(steps)
