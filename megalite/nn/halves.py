"""Two half-batches of a micro-batch take turns on a rank, so that the messages of one travel while the other computes
(`--tp-comm-overlap`; Merak, arXiv 2206.04959, Domino, arXiv 2409.15241).

A turn is a sixth of a block, and the halves are one turn apart:

    second half   norm       qkv       attend proj       norm       fc1       fc2       norm  ...
    first half                    norm              qkv       attend proj       norm       fc1     ...

A sum that `proj` or `fc2` has started travels while the other half computes one turn. What the norm hands on is
gathered while the other computes the next one; without sequence parallelism there is nothing to gather, and it is the
sum of that norm's gradient that travels there in the backward, which is the mirror image of the forward.

Halves are whole samples, and whatever they add to a gradient they add one after the other: the first half first, since
autograd runs the node that was made last first and the second half goes ahead in the forward. So a micro-batch computes
bit for bit what two micro-batches of half its size would. What waits in the open: the first message of a stage (or of
what is recomputed together), and the last. ZeRO-3 frees a block's weights when the next block begins, so there the
turns do not mix blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config import ModelConfig
from megalite.inventory import Recompute
from megalite.microbatch import Microbatch
from megalite.nn.block import Block
from megalite.nn.head import Head
from megalite.nn.kv_cache import LayerCache
from megalite.nn.mlp import MLP
from megalite.nn.rope import Rotary
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor import LateMessage, LayerContext, added_at_once, receive, send_early

_PER_SAMPLE = ("tokens", "labels", "positions", "loss_mask", "sample_ids", "document_starts", "host_tokens")

Turn = Callable[["HalvedBlock", "Half"], Tensor]


class Half:
    """One half of a micro-batch on its way through blocks.

    x: the residual stream, `[s, b/2, h]` (`[s/t, b/2, h]` under sequence parallelism).
    y: what the last turn made; a sum in flight behind a row-parallel layer.
    message: of the layer that y goes into, or comes from.
    unfinished: the block whose second result, y, is not in x yet.
    """

    def __init__(self, x: Tensor, microbatch: Microbatch) -> None:
        self.x, self.y, self.microbatch = x, x, microbatch
        self.message = LateMessage()
        self.unfinished: HalvedBlock | None = None
        self._turn: Turn | None = None

    def take(self, block: HalvedBlock, turn: Turn) -> None:
        """One turn, through the module's call: its hooks gather weights and move activations."""
        self._turn = turn
        self.y = block(self, self.microbatch)

    def run(self, block: HalvedBlock) -> Tensor:
        """What the block's forward does with a half."""
        assert self._turn is not None
        return self._turn(block, self)

    def finish(self) -> Tensor:
        """x behind the last block so far."""
        if self.unfinished is not None:
            self.x = self.unfinished.after_mlp(self.x, self.unfinished.arrived(self), self.microbatch)
            self.unfinished = None
        return self.x


class HalvedBlock(Block):
    """A block that also runs turn by turn, for two halves alternately."""

    def __init__(self, config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None = None) -> None:
        super().__init__(config, index, ctx, rotary)
        assert isinstance(self.mlp, MLP), "refused by the configuration's rules"
        self.dense, self.tp, self.split = self.mlp, ctx.tp, ctx.sequence_split

    def forward(self, x: Tensor | Half, microbatch: Microbatch, cache: LayerCache | None = None) -> Tensor:
        return x.run(self) if isinstance(x, Half) else super().forward(x, microbatch, cache)

    def turns(self) -> list[Turn]:
        """In the order of a half."""
        first = HalvedBlock._attention_input, HalvedBlock._qkv, HalvedBlock._attended
        return [*first, HalvedBlock._mlp_input, HalvedBlock._fc1, HalvedBlock._fc2]

    def arrived(self, half: Half) -> Tensor:
        """The sum that the last row-parallel layer has started."""
        return receive(half.y, half.message, self.tp, sequence=self.split)

    def _sent(self, half: Half, normed: Tensor) -> Tensor:
        half.message = LateMessage()
        return send_early(normed, half.message, self.tp, sequence=self.split)

    def _attention_input(self, half: Half) -> Tensor:
        x = half.finish()
        with added_at_once(self.input_norm):
            return self._sent(half, self.input_norm(x))

    def _qkv(self, half: Half) -> Tensor:
        qkv: Tensor = self.attention.qkv(half.y, half.message)
        return qkv

    def _attended(self, half: Half) -> Tensor:
        attention = self.attention
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        with ExitStack() as stack:
            for module in (attention, *norms):
                stack.enter_context(added_at_once(module))
            context = attention.attend(half.y, half.microbatch)
        half.message = LateMessage()
        y: Tensor = attention.proj(context, half.message)
        return y

    def _mlp_input(self, half: Half) -> Tensor:
        with added_at_once(self.mlp_norm):
            half.x, normed = self.after_attention(half.x, self.arrived(half), half.microbatch)
        return self._sent(half, normed)

    def _fc1(self, half: Half) -> Tensor:
        hidden: Tensor = self.dense.fc1(half.y, half.message)
        return hidden

    def _fc2(self, half: Half) -> Tensor:
        half.message, half.unfinished = LateMessage(), self
        y: Tensor = self.dense.fc2(half.y, half.message)
        return y


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
        """As `LayerStack.forward`."""
        samples = microbatch.shape[0]
        if samples % 2:
            assert not torch.is_grad_enabled(), "a micro-batch to train on has an even number of samples"
            return super().forward(x, microbatch)
        halves = split(microbatch)[::-1]
        parts: Sequence[Any] = (None, None) if x is None else [p.contiguous() for p in x.split(samples // 2, 1)][::-1]
        layers = self.ordered()
        for begin, end, recompute in self.recompute_ranges:
            given = layers[begin:end], self.crossing, halves, *parts
            if recompute and torch.is_grad_enabled():
                parts = checkpoint(run_halves, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                parts = run_halves(*given)
        second, first = parts
        out: Tensor = first + second if "head" in self.names else torch.cat([first, second], 1)
        trains = out.requires_grad or not torch.is_grad_enabled()
        return out if trains else out.detach().requires_grad_()


def split(microbatch: Microbatch) -> tuple[Microbatch, Microbatch]:
    """(The first half of the samples, the second)."""
    middle = microbatch.shape[0] // 2

    def part(here: slice) -> Microbatch:
        values = {name: getattr(microbatch, name) for name in _PER_SAMPLE}
        return replace(microbatch, **{name: value[here] for name, value in values.items() if value is not None})

    return part(slice(middle)), part(slice(middle, None))


def run_halves(
    layers: Sequence[nn.Module],
    crossing: bool,
    microbatches: Sequence[Microbatch],
    *parts: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Runs the layers for both halves, the second half and then the first; returns x of each."""
    xs = parts
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
    ahead, behind = halves
    try:
        for group in [blocks] if crossing else [[block] for block in blocks]:
            walk = [(block, turn) for block in group for turn in block.turns()]
            ahead.take(*walk[0])
            for before, (block, turn) in pairwise(walk):
                ahead.take(block, turn)
                behind.take(*before)
            behind.take(*walk[-1])
        return tuple(half.finish() for half in halves)
    finally:  # a recomputation ends as soon as it has made what the backward needs: nothing may stay under way
        with torch.no_grad():
            for half in halves:
                half.message.wait()
