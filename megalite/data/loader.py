"""From sample numbers to micro-batches, a little ahead of the training loop.

What a micro-batch holds depends on its first sample only (`sampler.py`), never on how large a global batch is, so
threads can prepare the next ones while the batch size ramps up. The threads spend their time copying out of
memory-mapped files, which does not hold up the training loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.gpt_dataset import SampleSource
from megalite.data.sampler import num_micro_batches
from megalite.errors import DataError
from megalite.microbatch import Microbatch

# Micro-batches that each thread keeps ready.
DEPTH = 2


def make_microbatch(
    text: NDArray[np.int64],
    valid: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    *,
    eod_id: int | None,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> Microbatch:
    """Inputs, labels, positions and masks of samples.

    An end-of-document token belongs to the document that it ends. With `eod_mask_loss` the loss is dropped where the
    *input* is such a token (there the label is the unforeseeable first token of another document), as Megatron does.

    Args:
        text: tokens, int64 `[b, S + 1]`. valid: tokens of each row that are there, int64 `[b]`; labels beyond weigh
        nothing.
        sample_ids: int64 `[b]`.
    """
    tokens, labels = text[:, :-1], text[:, 1:]
    b, s = tokens.shape
    index = np.arange(s, dtype=np.int64)
    loss_mask = (index[None, :] < valid[:, None] - 1).astype(np.float32)
    positions = np.broadcast_to(index, (b, s))
    document_ids = None
    if eod_id is not None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
        is_end = tokens == eod_id
        if eod_mask_loss:
            loss_mask[is_end] = 0.0
        if reset_attention_mask:
            document_ids = np.cumsum(is_end, axis=1) - is_end
        if reset_position_ids:
            begins = np.zeros((b, s), np.int64)
            begins[:, 1:] = np.where(is_end[:, :-1], index[1:], 0)
            positions = index - np.maximum.accumulate(begins, axis=1)
    return Microbatch(
        tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
        labels=torch.from_numpy(np.ascontiguousarray(labels)),
        positions=torch.from_numpy(np.array(positions)),
        loss_mask=torch.from_numpy(loss_mask),
        sample_ids=torch.from_numpy(sample_ids),
        document_ids=None if document_ids is None else torch.from_numpy(document_ids),
    )


class BatchLoader:
    """Hands this data-parallel rank its micro-batches, global batch by global batch.

    Its whole state is `consumed_samples`. Close it (or use it as a context manager) to end its threads.

    Args:
        source: samples. consumed_samples: samples that all ranks together have read before.
        num_workers: threads that prepare micro-batches ahead; 0: in the caller's thread.
        pad: past the end of `source` give samples without loss instead of an error.
        pin_memory: put tensors where an accelerator copies from without waiting.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        eod_id: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        num_workers: int = 0,
        pad: bool = False,
        pin_memory: bool = False,
    ) -> None:
        if eod_id is None:
            given = {
                "--reset-position-ids": reset_position_ids,
                "--reset-attention-mask": reset_attention_mask,
                "--eod-mask-loss": eod_mask_loss,
            }
            for flag in (flag for flag, value in given.items() if value):
                raise DataError(f"{flag}: the tokenizer has no end-of-document token; drop it or use another tokenizer")
        self.source, self.consumed_samples = source, consumed_samples
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._eod_id, self._pad, self._pin = eod_id, pad, pin_memory
        self._reset_positions, self._reset_mask, self._eod_mask_loss = (
            reset_position_ids,
            reset_attention_mask,
            eod_mask_loss,
        )
        self._pool = None
        if num_workers:
            # A thread that pins memory for a device other than the first must be told so.
            device = torch.cuda.current_device() if pin_memory and torch.cuda.is_initialized() else None
            choose = partial(torch.cuda.set_device, device) if device is not None else None
            self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="megalite-data", initializer=choose)
        self._ahead = num_workers * DEPTH
        self._queue: deque[tuple[int, Future[Microbatch]]] = deque()

    def next_batch(self, global_batch_size: int) -> list[Microbatch]:
        """This rank's micro-batches of the next global batch; moves `consumed_samples` on by `global_batch_size`.

        Raises:
            DataError: the batch is no whole number of micro-steps, or the samples are used up.
        """
        count = num_micro_batches(global_batch_size, self.micro_batch_size, self.dp_size)
        stop = self.consumed_samples + global_batch_size
        if stop > len(self.source) and not self._pad:
            raise DataError(
                f"no samples left to consume ({self.consumed_samples} consumed, {len(self.source)} in all, "
                f"--global-batch-size={global_batch_size}); prepare the data for more samples"
            )
        step = self.micro_batch_size * self.dp_size
        batch = [self._take(self.consumed_samples + m * step) for m in range(count)]
        self.consumed_samples = stop
        return batch

    def skip(self, samples: int) -> None:
        """Pass over samples of all ranks without reading them."""
        self.consumed_samples += samples

    def _take(self, first: int) -> Microbatch:
        """The micro-batch of the micro-step that begins at sample `first`; keeps the threads busy with those after
        it."""
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

    def _make(self, first: int) -> Microbatch:
        b = self.micro_batch_size
        begin = first + self.dp_rank * b
        text = np.empty((b, self.source.seq_length + 1), np.int64)
        valid = np.zeros(b, np.int64)
        for row in range(b):
            if begin + row < len(self.source):
                valid[row] = self.source.fill(begin + row, text[row])
            else:
                text[row] = 0
        batch = make_microbatch(
            text,
            valid,
            np.arange(begin, begin + b, dtype=np.int64),
            eod_id=self._eod_id,
            reset_position_ids=self._reset_positions,
            reset_attention_mask=self._reset_mask,
            eod_mask_loss=self._eod_mask_loss,
        )
        return _pinned(batch) if self._pin else batch

    def close(self) -> None:
        """End the threads; the loader cannot be used any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._queue.clear()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pinned(batch: Microbatch) -> Microbatch:
    return Microbatch(
        tokens=batch.tokens.pin_memory(),
        labels=batch.labels.pin_memory(),
        positions=batch.positions.pin_memory(),
        loss_mask=batch.loss_mask.pin_memory(),
        sample_ids=batch.sample_ids.pin_memory(),
        document_ids=None if batch.document_ids is None else batch.document_ids.pin_memory(),
    )


def full_pass(
    source: SampleSource,
    global_batch_size: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    eod_mask_loss: bool = False,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_id: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[list[Microbatch]]:
    """Global batches over the whole of `source`, once; the last one is filled up with samples without loss."""
    with BatchLoader(
        source,
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        eod_id=eod_id,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        num_workers=num_workers,
        pad=True,
        pin_memory=pin_memory,
    ) as loader:
        while loader.consumed_samples < len(source):
            yield loader.next_batch(global_batch_size)
