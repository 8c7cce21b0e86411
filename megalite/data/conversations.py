"""Conversations one by one, for a score that depends neither on what lies beside them nor on where samples begin."""

from __future__ import annotations

import numpy as np

from megalite.data.gpt_dataset import Cut, GPTDataset, SampleSource, locate


class Conversations(SampleSource):
    """The documents of a split with marks, each in samples of its own.

    Each is read from its first token on, in samples of at most `window` labels, without overlap; what a sample lacks
    is padded. So a model sees of a label what lies before it in the conversation, as far as the window reaches.

    part: the split. window: of the model. unit: what the length of a sample is a multiple of, for ranks that share one;
    the window is one. Samples are as long as the longest conversation needs.
    """

    def __init__(self, part: GPTDataset, *, window: int, unit: int = 1) -> None:
        assert part.store.marks is not None, "text has no marks"
        labels = np.maximum(part.store.lengths[part.begin : part.end].astype(np.int64) - 1, 0)
        self.number, self.number_cut = len(labels), int((labels > window).sum())
        self.seq_length = min(window, max(1, -(-int(labels.max(initial=1)) // unit)) * unit)
        self._part = part
        self._stops = np.cumsum(-(-labels // self.seq_length)).tolist()

    def __len__(self) -> int:
        return int(self._stops[-1])

    def cut(self, sample: int) -> Cut:
        number, piece = locate(self._stops, sample)
        document, offset = self._part.begin + number, piece * self.seq_length
        stop = min(offset + self.seq_length, int(self._part.store.lengths[document]) - 1)
        return Cut(self._part, [document], offset, stop)
