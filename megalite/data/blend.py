"""Several corpora as one: weights, and whose sample comes next; one after the other, in phases."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import cached_arrays, digest_of
from megalite.data.gpt_dataset import Cut, GPTDataset, SampleSource, SequentialSource
from megalite.errors import DataError

# Each part is asked for a little more than its share, since the greedy order may run ahead of it.
SURPLUS = 0.005
MAX_PARTS = 32767

# Of `blend_order`: stretches x parts that are worked on at a time (what a cache holds), steps of the shortest stretch,
# steps before it, and tries until stretches are computed one by one.
ELEMENTS = 1 << 16
SHORTEST = 2048
WARM = 512
ROUNDS = 8

Order = tuple[NDArray[np.int16], NDArray[np.int64]]


def parse_blend(words: Sequence[str], flag: str = "`data_path`") -> tuple[list[str], list[float] | None]:
    """Split `W1 P1 W2 P2 ...` into paths and weights, or take every word as a path (weights None).

    Raises DataError where weights and paths are mixed up, or weights are negative or all 0.
    """
    words = list(words)
    numbers = [_number(word) for word in words[::2]] if len(words) % 2 == 0 else []
    if not numbers or all(number is None for number in numbers):
        return words, None
    shown = " ".join(words[:6]) + (" ..." if len(words) > 6 else "")
    if any(number is None for number in numbers):
        raise DataError(
            f"{flag}={shown}: weights and paths are mixed; give either only paths or weight and path in turn"
        )
    weights = [number for number in numbers if number is not None]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise DataError(f"{flag}={shown}: weights must be 0 or more and not all 0; give weight and path in turn")
    if len(weights) > MAX_PARTS:
        raise DataError(
            f"{flag}: {len(weights)} data sets, at most {MAX_PARTS} can be blended; merge some with "
            "tools/merge_datasets.py"
        )
    return words[1::2], weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalise(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1 (float64, as Megatron computes them)."""
    array = np.array(weights, np.float64)
    return [float(weight) for weight in array / np.sum(array)]


def samples_per_part(weights: Sequence[float], size: int, surplus: float = SURPLUS) -> list[int]:
    """Samples that each part is asked for, for a blend of `size`; `weights` are normalised."""
    return [int(math.ceil(math.ceil(size * weight) * (1 + surplus))) for weight in weights]


def blend_order(weights: Sequence[float], size: int) -> Order:
    """Number of the part, int16 `[size]`, and number of the sample in it, int64 `[size]` (Megatron-LM's greedy rule).

    At step t the part that is furthest behind its share, `argmax_i w_i * max(t, 1) - taken_i`, gives its next sample;
    the first wins ties. Step t does not depend on `size`: a longer blend begins with the shorter one.

    Step by step that takes parts x samples operations of Python. Here many stretches of the order are computed side by
    side, one step of all of them at a time::

        steps      0 ......... 5000 ......... 10000 ......... 15000
        stretch 0  [=========>
        stretch 1        ~~~~~[=========>                         ~ begins earlier, from a guess: nobody is further
        stretch 2                      ~~~~~[=========>             behind than any other by more than a sample

    The rule forgets where it came from within a few samples of each part, so nearly every stretch begins in the state
    in which the one before it ends. That is compared, and a stretch that does not is computed again from there: the
    result is that of the single loop, bit for bit (`tests/unit/data/test_blend.py` compares the two).
    """
    shares = np.array(normalise(weights), np.float64)
    count = max(1, min(ELEMENTS // len(shares), size // SHORTEST))
    length = -(-size // count)
    first = np.arange(count) * length
    begin = _guess(shares, np.maximum(first - WARM, 0))
    _advance(shares, np.maximum(first - WARM, 0), begin, min(WARM, length))
    begin[0] = 0.0
    parts, samples = np.empty((length, count), np.int16), np.empty((length, count), np.int64)
    ends = np.empty_like(begin)
    wrong = np.arange(count)
    for number in range(count + ROUNDS):
        taken = begin[wrong]
        parts[:, wrong], samples[:, wrong] = _advance(shares, first[wrong], taken, length)
        ends[wrong] = taken
        wrong = np.flatnonzero((ends[:-1] != begin[1:]).any(axis=1)) + 1
        if not len(wrong):
            break
        if number >= ROUNDS:  # a part of next to no weight remembers for long: one after the other
            wrong = wrong[:1]
        begin[wrong] = ends[wrong - 1]
    return parts.T.reshape(-1)[:size].copy(), samples.T.reshape(-1)[:size].copy()


def _guess(shares: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Samples taken of each part before these steps, `[steps, parts]`, if all parts are as close as they can be."""
    wanted = steps[:, None] * shares
    taken = np.floor(wanted)
    more = (steps - taken.sum(axis=1)).astype(np.int64)
    place = np.argsort(np.argsort(taken - wanted, axis=1, kind="stable"), axis=1, kind="stable")
    taken += place < more[:, None]
    return taken


def _advance(shares: NDArray[np.float64], first: NDArray[np.int64], taken: NDArray[np.float64], length: int) -> Order:
    """Part and sample of `length` steps of every stretch, `[length, stretches]`; taken `[stretches, parts]` goes on."""
    parts, samples = np.empty((length, len(taken)), np.int16), np.empty((length, len(taken)), np.int64)
    behind, stretches = np.empty_like(taken), np.arange(len(taken))
    for step in range(length):
        np.multiply(np.maximum(first + step, 1).astype(np.float64)[:, None], shares, out=behind)
        behind -= taken
        chosen = behind.argmax(axis=1)
        parts[step], samples[step] = chosen, taken[stretches, chosen]
        taken[stretches, chosen] += 1.0
    return parts, samples


class BlendedDataset(SampleSource):
    """Samples of several data sets of one split, each with a weight, in the order of `blend_order`.

    size: samples of the blend.
    """

    def __init__(
        self, parts: Sequence[GPTDataset], weights: Sequence[float], size: int, *, cache_dir: Path | None = None
    ) -> None:
        assert parts and len(parts) == len(weights)
        self.parts: list[GPTDataset] = list(parts)
        self.seq_length, self.stops = parts[0].seq_length, [size]
        self._part, self._sample = cached_arrays(
            cache_dir,
            digest_of("blend", 1, [float(w) for w in weights], size),
            ("part", "sample"),
            lambda: blend_order(weights, size),
            lambda part, sample: part.shape == sample.shape == (size,),
        )
        asked = np.bincount(self._part, minlength=len(parts))
        for part, count in zip(self.parts, asked.tolist(), strict=True):
            if count > len(part):
                raise DataError(
                    f"`data_path`={part.store.name}: the blend needs {count} samples, {len(part)} are there; "
                    "lower its weight"
                )

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the split in all parts; a store that is named twice counts once."""
        return sum({(id(part.store), part.begin): part.tokens_per_epoch for part in self.parts}.values())

    def cut(self, sample: int) -> Cut:
        _, sample = self.locate(sample)
        return self.parts[int(self._part[sample])].cut(int(self._sample[sample]))

    def sequential(self) -> SequentialSource:
        """All parts once, one after the other, whatever their weights."""
        return SequentialSource(self.parts)


class PhasedDataset(SampleSource):
    """Data that change on the way (`--data-schedule`). phases: (first sample, data set) in order, the first from 0 on.
    Phase and place of a sample are functions of its number alone; a batch may begin in one and end in the next."""

    SEED_STEP = 1_000_003
    """Between the seeds of two phases: data that occur in both come in different orders."""

    def __init__(self, phases: Sequence[tuple[int, GPTDataset | BlendedDataset]]) -> None:
        self.parts: list[GPTDataset | BlendedDataset] = [dataset for _, dataset in phases]
        self.seq_length = self.parts[0].seq_length
        self.stops = [first for first, _ in phases[1:]] + [phases[-1][0] + len(self.parts[-1])]

    def cut(self, sample: int) -> Cut:
        phase, number = self.locate(sample)
        return self.parts[phase].cut(number)

    @staticmethod
    def asked_of(steps: Sequence[tuple[int, str]], total: int) -> list[int]:
        """Samples of each phase in a training of `total`; 1 of what it does not reach, so that that is looked at."""
        ends = [first for first, _ in steps[1:]] + [total]
        return [max(1, min(end, total) - first) for (first, _), end in zip(steps, ends, strict=True)]


class BlendParts:
    """The number of each sample's part (`--loss-by-part`); a file that occurs twice, or in two phases, is one part.
    names: of the parts, in order: of the files, or whole paths where two files share one. Raises DataError where there
    is but one part."""

    def __init__(self, dataset: GPTDataset | BlendedDataset | PhasedDataset) -> None:
        paths = list(dict.fromkeys(_paths(dataset)))
        if isinstance(dataset, GPTDataset) or len(paths) < 2:
            raise DataError(f"`loss_by_part`: all training data are {paths[0]}; name more than one, or drop it")
        self._dataset, self._numbers = dataset, {path: number for number, path in enumerate(paths)}
        short = tuple(Path(path).name for path in paths)
        self.names = short if len(set(short)) == len(short) else tuple(paths)

    def __call__(self, sample: int) -> int:
        return self._numbers[self._dataset.cut(sample).part.store.name]


def _paths(dataset: GPTDataset | BlendedDataset | PhasedDataset) -> list[str]:
    if isinstance(dataset, GPTDataset):
        return [dataset.store.name]
    return [path for part in dataset.parts for path in _paths(part)]
