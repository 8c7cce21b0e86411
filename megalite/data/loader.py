"""From sample numbers to micro-batches, a little ahead of the training loop.

Which samples a rank reads is a pure function of the samples consumed so far. They are walked in order: a micro-step of
all data-parallel ranks takes `micro_batch_size * dp_size` of them, rank r the r-th run of `micro_batch_size`; a global
batch is as many micro-steps as fit in it. So its samples do not depend on the layout, and a run may resume with another
data-parallel size without losing or repeating one. Peers on other axes compute the same.

What a micro-batch holds depends on its first sample only, never on how large a global batch is, so threads can prepare
the next ones while the batch size ramps up. They spend their time copying out of memory-mapped files, which does not
hold up the training loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.config import DataConfig
from megalite.data.blend import BlendParts
from megalite.data.gpt_dataset import SampleSource
from megalite.data.indexed import ANSWER, END
from megalite.errors import DataError
from megalite.microbatch import Microbatch

# Micro-batches that each thread keeps ready.
DEPTH = 2
MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
# Micro-batches ahead that a source in a store begins to fetch, at least.
ANNOUNCED = 16


@dataclass(frozen=True, kw_only=True)
class DocumentMasks:
    """Effects of the end of a document on positions, attention and loss, by the flags of these names.

    Raises DataError for a flag without an `eod_id` to go by.
    """

    eod_id: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @classmethod
    def of(cls, data: DataConfig, eod_id: int | None) -> DocumentMasks:
        """The flags of a data section."""
        return cls(eod_id=eod_id, **{name: getattr(data, name) for name in MASKS})

    def __post_init__(self) -> None:
        for name in MASKS if self.eod_id is None else ():
            if getattr(self, name):
                raise DataError(
                    f"`{name}`: the tokenizer has no end-of-document token; drop it or use another tokenizer"
                )


NO_MASKS = DocumentMasks()


def make_microbatch(
    text: NDArray[np.int64],
    valid: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    masks: DocumentMasks,
    marks: NDArray[np.uint8] | None = None,
) -> Microbatch:
    """Inputs, labels, positions and masks of samples.

    An end-of-document token belongs to the document that it ends. With `eod_mask_loss` the loss is dropped where the
    *input* is such a token (there the label is the unforeseeable first token of another document), as Megatron does.

    text: tokens, int64 `[b, S + 1]`.
    valid: tokens of each row that are there, int64 `[b]`; labels beyond weigh nothing.
    sample_ids: int64 `[b]`.
    marks: of the tokens, `[b, S + 1]`: which of them the loss counts as labels, and which end a document, where the
        end-of-document token does not say it.
    """
    tokens, labels = text[:, :-1], text[:, 1:]
    b, s = tokens.shape
    index = np.arange(s, dtype=np.int64)
    loss_mask = (index[None, :] < valid[:, None] - 1).astype(np.float32)
    if marks is not None:
        loss_mask *= marks[:, 1:] & ANSWER
    positions = np.broadcast_to(index, (b, s))
    document_starts = None
    if masks.eod_id is not None:
        is_end = tokens == masks.eod_id if marks is None else (marks[:, :-1] & END) > 0
        if masks.eod_mask_loss:
            loss_mask[is_end] = 0.0
        begins = np.zeros((b, s), np.int64)
        begins[:, 1:] = np.where(is_end[:, :-1], index[1:], 0)
        starts = np.maximum.accumulate(begins, axis=1)
        if masks.reset_attention_mask:
            document_starts = starts
        if masks.reset_position_ids:
            positions = index - starts
    return Microbatch(
        tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
        labels=torch.from_numpy(np.ascontiguousarray(labels)),
        positions=torch.from_numpy(np.array(positions)),
        loss_mask=torch.from_numpy(loss_mask),
        sample_ids=torch.from_numpy(sample_ids),
        document_starts=None if document_starts is None else torch.from_numpy(document_starts),
    )


class BatchLoader:
    """Hands this data-parallel rank its micro-batches, global batch by global batch.

    Its whole state is `consumed_samples`. Close it (or use it as a context manager) to end its threads.

    consumed_samples: samples that all ranks together have read before.
    pieces: samples consumed when a global batch begins -> the sequences that each of its samples is cut into.
    num_workers: threads that prepare micro-batches ahead; 0: in the caller's thread.
    pin_memory: put tensors where an accelerator copies from without waiting.
    parts: of the blend, whose losses are logged apart; None: none are.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        masks: DocumentMasks = NO_MASKS,
        pieces: Callable[[int], int] = lambda consumed: 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        parts: BlendParts | None = None,
    ) -> None:
        self.source, self.consumed_samples = source, consumed_samples
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._masks, self._pieces, self._pin = masks, pieces, pin_memory
        self.parts = parts
        self._pool = None
        if num_workers:
            # A thread that pins memory for a device other than the first must be told so.
            device = torch.cuda.current_device() if pin_memory and torch.cuda.is_initialized() else None
            choose = partial(torch.cuda.set_device, device) if device is not None else None
            self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="megalite-data", initializer=choose)
        self._ahead = num_workers * DEPTH
        self._announced = consumed_samples
        self._queue: deque[tuple[int, Future[Microbatch]]] = deque()
        self._peeked: dict[int, Microbatch] = {}

    def next_batch(self, global_batch_size: int) -> list[Microbatch]:
        """This rank's micro-batches of the next global batch; moves `consumed_samples` on by `global_batch_size`.

        Raises DataError where the samples are used up.
        """
        if self.consumed_samples + global_batch_size > len(self.source):
            raise DataError(
                f"no samples left to consume ({self.consumed_samples} consumed, {len(self.source)} in all, "
                f"`global_batch_size`={global_batch_size}); prepare the data for more samples"
            )
        return self._next(global_batch_size)

    def full_pass(self, global_batch_size: int) -> Iterator[list[Microbatch]]:
        """Global batches to the end of `source`, the last one filled up with samples without loss; then closes."""
        with self:
            while self.consumed_samples < len(self.source):
                yield self._next(global_batch_size)

    def _next(self, global_batch_size: int) -> list[Microbatch]:
        step = self.micro_batch_size * self.dp_size
        count, rest = divmod(global_batch_size, step)
        assert count > 0 and not rest, f"the configuration refuses {global_batch_size} samples in steps of {step}"
        pieces = self._pieces(self.consumed_samples)
        batch = [self._take(self.consumed_samples + m * step).in_pieces(pieces) for m in range(count)]
        self.consumed_samples += global_batch_size
        return batch

    def skip(self, samples: int) -> None:
        """Pass over samples of all ranks without reading them."""
        self.consumed_samples += samples
        self._peeked = {first: mb for first, mb in self._peeked.items() if first >= self.consumed_samples}

    def peek(self, count: int) -> list[Microbatch]:
        """The next micro-batches, at most `count` and as far as there are samples; they are still to come."""
        step = self.micro_batch_size * self.dp_size
        pieces = self._pieces(self.consumed_samples)
        firsts = range(self.consumed_samples, self.consumed_samples + count * step, step)
        whole = [first for first in firsts if first + step <= len(self.source)]
        self._peeked.update({first: self._take(first) for first in whole if first not in self._peeked})
        return [self._peeked[first].in_pieces(pieces) for first in whole]

    def _take(self, first: int) -> Microbatch:
        """The micro-batch of the micro-step from sample `first` on; keeps the threads busy with those after it."""
        if first in self._peeked:
            return self._peeked.pop(first)
        self._announce(first)
        if self._pool is None:
            return self._make(first)
        while self._queue and self._queue[0][0] != first:
            self._queue.popleft()[1].cancel()
        step = self.micro_batch_size * self.dp_size
        following = self._queue[-1][0] + step if self._queue else first
        while len(self._queue) <= self._ahead and (following == first or following < len(self.source)):
            self._queue.append((following, self._pool.submit(self._make, following)))
            following += step
        return self._queue.popleft()[1].result()

    def _announce(self, first: int) -> None:
        """Tells the source this rank's samples of the micro-steps from sample `first` on that are read soon."""
        step, b = self.micro_batch_size * self.dp_size, self.micro_batch_size
        self._announced = max(self._announced, first)
        while self._announced <= first + max(self._ahead, ANNOUNCED) * step and self._announced < len(self.source):
            begin = self._announced + self.dp_rank * b
            self.source.expect(range(begin, min(begin + b, len(self.source))))
            self._announced += step

    def _make(self, first: int) -> Microbatch:
        b = self.micro_batch_size
        begin = first + self.dp_rank * b
        text = np.empty((b, self.source.seq_length + 1), np.int64)
        valid = np.zeros(b, np.int64)
        marks = np.empty(text.shape, np.uint8)
        marked = False
        for row in range(b):
            has_marks = False
            if begin + row < len(self.source):
                valid[row], has_marks = self.source.read(begin + row, text[row], marks[row])
            text[row, valid[row] :] = 0
            if not has_marks:
                marks[row] = ANSWER + END * (text[row] == self._masks.eod_id)
            marked |= has_marks
        ids = np.arange(begin, begin + b, dtype=np.int64)
        made = make_microbatch(text, valid, ids, self._masks, marks if marked else None)
        if self.parts is not None:
            made = replace(made, blend_parts=torch.tensor([self.parts(sample) for sample in ids.tolist()]))
        return made.map(Tensor.pin_memory) if self._pin else made

    def close(self) -> None:
        """End the threads; the loader cannot be used any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._queue.clear()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
