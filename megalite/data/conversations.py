"""Conversations one by one, for a score that depends neither on what lies beside them nor on where samples begin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megalite.data.gpt_dataset import GPTDataset, check_ids, expect_pieces, marks_of


class Conversations:
    """The documents of a split with marks, each in samples of its own.

    Each is read from its first token on, in samples of at most `window` labels, without overlap; what a sample lacks
    is padded. So a model sees of a label what lies before it in the conversation, as far as the window reaches.

    part: the split. window: of the model. unit: what the length of a sample is a multiple of, for ranks that share one;
    the window is one. Samples are as long as the longest conversation needs.
    """

    def __init__(self, part: GPTDataset, *, window: int, unit: int = 1) -> None:
        assert marks_of(part.store) is not None, "text has no marks"
        labels = np.maximum(part.store.lengths[part.begin : part.end].astype(np.int64) - 1, 0)
        self.number, self.cut = len(labels), int((labels > window).sum())
        self.seq_length = min(window, max(1, -(-int(labels.max(initial=1)) // unit)) * unit)
        self._part = part
        self._stops = np.cumsum(-(-labels // self.seq_length))

    def __len__(self) -> int:
        return int(self._stops[-1])

    def expect(self, samples: Sequence[int]) -> None:
        expect_pieces(self._part.store, [([document], at, stop) for document, at, stop in map(self._place, samples)])

    def fill(self, sample: int, out: NDArray[np.int64]) -> int:
        document, offset, stop = self._place(sample)
        count = self._part.copy(self._part.store, [document], offset, stop, out)
        check_ids(out[:count], self._part, [document], offset)
        return count

    def fill_marks(self, sample: int, out: NDArray[np.integer]) -> bool:
        marks, (document, offset, stop) = marks_of(self._part.store), self._place(sample)
        if marks is not None:
            self._part.copy(marks, [document], offset, stop, out)
        return marks is not None

    def _place(self, sample: int) -> tuple[int, int, int]:
        """The document of a sample, its first token there and its last."""
        number = int(np.searchsorted(self._stops, sample, "right"))
        offset = (sample - (int(self._stops[number - 1]) if number else 0)) * self.seq_length
        document = self._part.begin + number
        return document, offset, min(offset + self.seq_length, int(self._part.store.lengths[document]) - 1)
