"""`--data-schedule`: training data that change on the way, as one data set.

    sample     0 ............ first ............ first ........ total
               |  web.txt     |  code.txt       |  anneal.txt  |
               order, survey    order, survey     order, survey

Which phase a sample belongs to, and its place there, are functions of its number alone; a batch may begin in one phase
and end in the next. A phase has begun once its first sample was consumed. Its data, its weights and its beginning then
belong to the run; what has not begun may be edited.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from megalite.data.blend import BlendedDataset, Composed
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.survey import Survey, survey_differences
from megalite.errors import DataError

SEED_STEP = 1_000_003
"""Between the seeds of two phases: data that occur in both come in different orders."""


@dataclass(frozen=True)
class Phase:
    """What a checkpoint records of a phase, as JSON.

    first: its first sample. name: the file that names its data. weights: of the blend; empty: by size.
    requests: totals of its samples asked for so far, as `Datasets.train_requests`. surveys: of its data.
    """

    first: int
    name: str
    weights: tuple[float, ...]
    requests: tuple[int, ...]
    surveys: tuple[Survey, ...]


class PhasedDataset(Composed):
    """phases: (first sample, data set) in order; the first begins at 0."""

    def __init__(self, phases: Sequence[tuple[int, GPTDataset | BlendedDataset]]) -> None:
        self._firsts = [first for first, _ in phases]
        self.parts: list[GPTDataset | BlendedDataset] = [dataset for _, dataset in phases]
        self.seq_length = self.parts[0].seq_length

    def __len__(self) -> int:
        return self._firsts[-1] + len(self.parts[-1])

    def source_of(self, sample: int) -> tuple[GPTDataset, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        phase = bisect_right(self._firsts, sample) - 1
        part, number = self.parts[phase], sample - self._firsts[phase]
        return (part, number) if isinstance(part, GPTDataset) else part.source_of(number)


def asked_of(steps: Sequence[tuple[int, str]], total: int) -> list[int]:
    """Samples of each phase in a training of `total`; 1 of those that it does not reach, so that they are looked at."""
    ends = [first for first, _ in steps[1:]] + [total]
    return [max(1, min(end, total) - first) for (first, _), end in zip(steps, ends, strict=True)]


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
