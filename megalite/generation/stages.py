"""A stage of the model in a program of forwards: a prompt or a token in, activations or the next token out.

stage t * S + s of the program = stage s of the model in round t
first of a round:   tokens [b] (of the prompt in round 0, else those that have come back)  ->  [n, b, h]
last of a round:    [n, b, h]  ->  the tokens that were chosen, int64 [b]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from megalite.comm import ContextAxes, TensorSpec, all_reduce_
from megalite.config import ModelConfig
from megalite.generation.groups import Slot
from megalite.generation.sampling import Sampling, pick_tokens
from megalite.microbatch import Microbatch
from megalite.nn import Head, LayerStack
from megalite.parallel.context import SequenceCut
from megalite.parallel.pipeline import ForwardOnly


@dataclass(frozen=True)
class ModelParts:
    """The stages of a model that are on this rank."""

    stages: Mapping[int, LayerStack]  # by number
    num_stages: int  # on all ranks
    config: ModelConfig
    cp: ContextAxes  # the ranks that share a prompt
    boundary: torch.dtype  # between stages
    device: torch.device

    @property
    def cut(self) -> SequenceCut:
        """This rank's part of a prompt."""
        return SequenceCut(self.cp.heads.rank + self.cp.heads.size * self.cp.ring.rank, self.cp.size, self.cp.ring.size)

    @property
    def unit(self) -> int:
        """Divisor of the length of a prompt that is cut."""
        return self.cp.size * (2 if self.cp.ring.size > 1 else 1)


@dataclass
class Turn:
    """This rank's group of a slot in one episode: what a micro-batch of the program is."""

    slot: Slot
    tokens: Tensor  # of the chunk, `[b, n]` on the CPU
    column: int  # of the first of them
    last: bool  # whether it is the prompt's last chunk
    chosen: list[Tensor] = field(default_factory=list)  # of each round, on the rank that chose them

    def arranged(self, x: Tensor) -> Tensor:
        """Messages have the shape of what is sent."""
        return x

    def length(self, round_: int) -> int:
        """Tokens of a row in this round."""
        return self.tokens.shape[1] if round_ == 0 else 1

    def microbatch(self, round_: int, tokens: Tensor | None, parts: ModelParts) -> Microbatch:
        """The micro-batch that the layers see. tokens: int64 `[b, n]`; None on stages that do not read them."""
        b = len(self.slot.mine)
        n = self.length(round_)
        device = parts.device
        begin = self.column if round_ == 0 else self.column + self.tokens.shape[1] + round_ - 1
        places = torch.arange(begin, begin + n, device=device)
        pads = torch.tensor(self.slot.pads, device=device)[:, None]
        positions = (places[None] - pads).clamp(0, parts.config.text_positions - 1)
        ids = torch.zeros(b, n, dtype=torch.int64, device=device) if tokens is None else tokens.clamp(min=0)
        whole = Microbatch(
            tokens=ids,
            labels=ids,
            positions=positions,
            loss_mask=torch.zeros(b, n, device=device),
            sample_ids=torch.zeros(b, dtype=torch.int64, device=device),
            document_starts=torch.minimum(places[None], pads) if any(self.slot.pads) else None,
            places=places if n == 1 and self.column + round_ > 0 else None,
        )
        return parts.cut(whole) if round_ == 0 and self.column == 0 else whole


@dataclass(eq=False)
class GenerationStage(ForwardOnly):
    """Stage `number` of a program of forwards, for the executor."""

    number: int
    rounds: int
    parts: ModelParts
    turns: list[Turn]
    sampling: Sampling
    num_choices: int

    def __post_init__(self) -> None:
        self.round, self.stage = divmod(self.number, self.parts.num_stages)
        self.is_first, self.is_last = self.number == 0, self.number == self.parts.num_stages * self.rounds - 1
        self._begins, self._ends = self.stage == 0, self.stage == self.parts.num_stages - 1

    def arriving(self, number: int) -> TensorSpec:
        return self._spec(number, tokens=self._begins)

    def leaving(self, number: int) -> TensorSpec:
        return self._spec(number, tokens=self._ends)

    def _spec(self, number: int, *, tokens: bool) -> TensorSpec:
        turn, parts = self.turns[number], self.parts
        if tokens:
            return TensorSpec((len(turn.slot.mine),), torch.int64, parts.device)
        shared = self.round == 0 and turn.column == 0 and parts.cp.size > 1
        n = turn.length(self.round) // (parts.cp.size if shared else 1)
        return TensorSpec((n, len(turn.slot.mine), parts.config.hidden_size), parts.boundary, parts.device)

    @torch.inference_mode()
    def forward(self, number: int, x: Tensor | None, microbatch: object, factor: Tensor, *, version: int) -> Tensor:
        """Tokens or activations in, activations or tokens out."""
        turn, parts, stack = self.turns[number], self.parts, self.parts.stages[self.stage]
        tokens = None
        if self._begins:
            tokens = turn.tokens.to(parts.device) if x is None else x[:, None]
            x = None
        batch = turn.microbatch(self.round, tokens, parts)
        y = stack.body(x, batch, turn.slot.caches[self.stage])
        if not self._ends:
            return y
        if not turn.last:
            return y.new_zeros(0)
        head = cast(Head, stack.get_submodule("head"))
        keys = [(row.request.sample, row.request.number, len(row.text) + self.round) for row in turn.slot.mine]
        seeds, numbers, positions = torch.tensor(keys, device=y.device).unbind(1)
        logits, choices = head.local_logits(last_token(y, batch, parts.cp))[0], self.num_choices
        chosen = pick_tokens(logits, self.sampling, seeds, numbers, positions, num_choices=choices, axis=head.tp)
        turn.chosen.append(chosen)
        return chosen


def last_token(y: Tensor, batch: Microbatch, cp: ContextAxes) -> Tensor:
    """Activations of the last column, `[n, b, h]` -> `[1, b, h]`, the same on all ranks that share the prompt."""
    if batch.order is None:
        return y[-1:]
    assert batch.places is not None
    own = batch.places == batch.order.max()
    found = (y * own[:, None, None]).sum(0, keepdim=True)
    for axis in (cp.heads, cp.ring):
        all_reduce_(found, axis)
    return found
