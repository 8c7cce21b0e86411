"""Two half-batches of a micro-batch take turns on a rank, so that the messages of one travel while the other computes
(`--tp-comm-overlap`; Merak, arXiv 2206.04959, Domino, arXiv 2409.15241).

A turn is a segment of a block (`Block.segments`), and the halves are one turn apart:

    second half   norm       qkv       attend proj       norm       fc1       fc2       norm  ...
    first half                    norm              qkv       attend proj       norm       fc1     ...

A sum that `proj` or `fc2` has started travels while the other half computes one turn. What the norm hands on is
gathered while the other computes the next one; without sequence parallelism there is nothing to gather, and it is the
sum of that norm's gradient that travels there in the backward, which is the mirror image of the forward.

A block with experts has more messages, and the halves are two turns apart:

    second half   dispatch  fc1     -         fc2  combine  norm  qkv      attend  proj route    dispatch ...
    first half          proj  route  dispatch   fc1   -       fc2  combine   norm   qkv  attend     proj  ...

(`-`: a rest, without a shared expert.) Each message travels while the other half multiplies matrices. Only where
experts are both dealt out and cut (ep and etp above 1) a block may have a message more than products: one of each half
waits in the open.

Halves are whole samples, and whatever they add to a gradient they add one after the other: the first half first, since
autograd runs the node that was made last first and the second half goes ahead in the forward. So a micro-batch computes
bit for bit what two micro-batches of half its size would; auxiliary losses of experts are means over halves. What waits
in the open: the first message of a stage (or of what is recomputed together), and the last. ZeRO-3 frees a block's
weights when the next block begins, so there the turns do not mix blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, repeat
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.inventory import Recompute
from megalite.microbatch import Microbatch
from megalite.nn.block import Block
from megalite.nn.head import Head
from megalite.nn.kv_cache import LayerCache
from megalite.nn.mlp import MLP
from megalite.nn.segment import Segment
from megalite.nn.stack import LayerStack, trainable
from megalite.parallel.tensor import LateMessage, added_at_once

_PER_SAMPLE = (
    "tokens", "labels", "positions", "loss_mask", "sample_ids", "document_starts", "host_tokens", "token_losses",
)  # fmt: skip


class Half:
    """One half of a micro-batch on its way through blocks.

    x: the residual stream, `[s, b/2, h]` (`[s/t, b/2, h]` under sequence parallelism).
    unfinished: the block whose last segment has not been run yet: it shares a turn with what follows.
    """

    def __init__(self, x: Tensor, microbatch: Microbatch) -> None:
        self.microbatch = microbatch
        self.unfinished: HalvedBlock | None = None
        self._values: tuple[Any, ...] = (x,)
        self._last: Segment | None = None
        self._turn: Segment | None = None
        self._messages: list[LateMessage] = []

    @property
    def x(self) -> Tensor:
        x: Tensor = self._values[0]
        return x

    def turns(self, blocks: Sequence[HalvedBlock], crossing: bool) -> Iterator[None]:
        """Takes one turn after the other, each through the block's call: its hooks gather weights and move
        activations. The last segment waits for the next block, unless it has weights and those go with its block
        (`crossing` is False)."""
        for block in blocks:
            *segments, last = block.segments(self.microbatch, None, self._message)
            waits = crossing or not last.owners
            for self._turn in segments if waits else (*segments, last):
                if self._turn is last:
                    self.unfinished = block
                block(self, self.microbatch)
                if self._turn is last:
                    self.unfinished = None
                elif waits and self._turn is segments[-1]:
                    self._last, self.unfinished = last, block
                yield

    def run(self) -> Tensor:
        """Runs the segment whose turn it is: the forward of a block that is called with a half."""
        assert self._turn is not None
        self.finish()
        self._run(self._turn)
        made: Tensor = self._values[-1]
        return made

    def finish(self) -> Tensor:
        """x behind the last block so far."""
        if self._last is not None:
            self._run(self._last)
            self._last = self.unfinished = None
        return self.x

    def _run(self, segment: Segment) -> None:
        with ExitStack() as stack:
            for module in segment.owners:
                stack.enter_context(added_at_once(module))
            self._values = segment.run(*self._values)

    def wait(self) -> None:
        """Returns when nothing of the tensor axis is under way."""
        for message in self._messages:
            message.wait()

    def _message(self) -> LateMessage:
        self._messages.append(LateMessage())
        return self._messages[-1]


class HalvedBlock(Block):
    """A block that also runs turn by turn, for two halves alternately."""

    def forward(self, x: Tensor | Half, microbatch: Microbatch, cache: LayerCache | None = None) -> Tensor:
        return x.run() if isinstance(x, Half) else super().forward(x, microbatch, cache)


class HalvedStack(LayerStack):
    """A stage whose micro-batches run as two halves. (An odd number of samples, which occurs in evaluation alone, runs
    whole.)

    crossing: turns of neighbouring blocks may mix.
    """

    def __init__(
        self,
        config: ModelConfig,
        named_layers: Sequence[tuple[str, nn.Module]],
        recompute: Recompute | None = None,
        *,
        crossing: bool = True,
    ) -> None:
        super().__init__(config, named_layers, recompute)
        self.crossing = crossing
        for parameter in self.parameters():
            parameter.sink_uses = 2 * getattr(parameter, "sink_uses", 1)  # type: ignore[attr-defined]  # ours

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Runs all layers, half by half; see `LayerStack.forward`."""
        samples = microbatch.shape[0]
        if samples % 2:
            assert not torch.is_grad_enabled(), "a micro-batch to train on has an even number of samples"
            return super().forward(x, microbatch)
        halves = split(microbatch)[::-1]
        parts: Sequence[Any] = (None, None) if x is None else [p.contiguous() for p in x.split(samples // 2, 1)][::-1]
        second, first = self.by_ranges(partial(run_halves, self.crossing, halves), *parts)
        return trainable(first + second if "head" in self.names else torch.cat([first, second], 1))


def split(microbatch: Microbatch) -> tuple[Microbatch, Microbatch]:
    """(The first half of the samples, the second)."""
    middle = microbatch.shape[0] // 2
    half = replace(microbatch, share=None if microbatch.share is None else microbatch.share / 2)
    return of_samples(half, slice(middle)), of_samples(half, slice(middle, None))


def of_samples(microbatch: Microbatch, samples: slice) -> Microbatch:
    """Some of the samples (views)."""
    values = {name: getattr(microbatch, name) for name in _PER_SAMPLE}
    own = {name: value[samples] for name, value in values.items() if value is not None}
    whole, starts = microbatch.documents, microbatch.document_starts
    documents = None if whole is None or starts is None else whole.part(samples, starts.shape[1])
    return replace(microbatch, documents=documents, **own)


def run_halves(
    crossing: bool, microbatches: Sequence[Microbatch], layers: Sequence[nn.Module], *xs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Runs the layers for both halves, the second half and then the first; returns x of each."""
    for is_block, group in groupby(layers, lambda layer: isinstance(layer, HalvedBlock)):
        if is_block:
            xs = _take_turns([b for b in group if isinstance(b, HalvedBlock)], crossing, xs, microbatches)
            continue
        for layer in group:
            xs = tuple(_one_by_one(layer, x, microbatch) for x, microbatch in zip(xs, microbatches, strict=True))
    return xs


def _one_by_one(layer: nn.Module, x: Tensor | None, microbatch: Microbatch) -> Tensor:
    with added_at_once(layer.final_norm) if isinstance(layer, Head) else nullcontext():
        out: Tensor = layer(x, microbatch)
    return out


def _take_turns(
    blocks: Sequence[HalvedBlock], crossing: bool, xs: Sequence[Tensor | None], microbatches: Sequence[Microbatch]
) -> tuple[Tensor, ...]:
    halves = [Half(x, microbatch) for x, microbatch in zip(xs, microbatches, strict=True) if x is not None]
    apart = 1 if all(isinstance(block.mlp, MLP) for block in blocks) else 2
    try:
        for group in [blocks] if crossing else [[block] for block in blocks]:
            ahead, behind = (half.turns(group, crossing) for half in halves)
            for _ in range(apart):
                next(ahead)
            for _ in chain(ahead, repeat(None, apart)):
                next(behind)
        return tuple(half.finish() for half in halves)
    finally:  # a recomputation ends as soon as it has made what the backward needs: nothing may stay under way
        with torch.no_grad():
            for half in halves:
                half.wait()
