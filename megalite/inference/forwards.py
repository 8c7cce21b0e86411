"""Micro-batches through a loaded model, whichever ranks hold it: what evaluation is made of."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from megalite.comm import TensorSpec
from megalite.engine import run_forwards
from megalite.generation import ModelParts
from megalite.inference.loaded_model import LoadedModel
from megalite.microbatch import Microbatch
from megalite.nn import Head
from megalite.parallel.pipeline import ForwardOnly
from megalite.schedule import forward_program

Score = Callable[[Head, Tensor, Microbatch], Tensor]
"""(Head, what the last block made of the micro-batch `[s, b, h]`, the micro-batch) -> what is kept of it. `s` and the
micro-batch are this rank's part where ranks share sequences."""


@torch.inference_mode()
def score_all(loaded: LoadedModel, microbatches: Sequence[Microbatch], score: Score) -> dict[int, Tensor]:
    """Applies `score` to each micro-batch, on the rank of the last stage that has it: number -> what it gives.
    Collective."""
    parts = loaded.parts
    rank = loaded.mesh.coordinate("pp")
    program = forward_program(loaded.placement, len(microbatches))
    local = [parts.cut(microbatch.to(parts.device)) for microbatch in microbatches]
    stages = {key: _Scoring(key[0], parts, local, score) for key in loaded.placement.stages_of(rank)}
    return run_forwards(program, rank, stages, loaded.channel, local)


class _Scoring(ForwardOnly):
    """A stage whose last ends in `score`."""

    def __init__(self, number: int, parts: ModelParts, local: Sequence[Microbatch], score: Score) -> None:
        self.is_first, self.is_last = number == 0, number == parts.num_stages - 1
        self._stack, self._parts, self._local, self._score = parts.stages[number], parts, local, score

    def arriving(self, number: int) -> TensorSpec:
        b, s = self._local[number].shape
        return TensorSpec((s, b, self._parts.config.hidden_size), self._parts.boundary, self._parts.device)

    leaving = arriving

    def forward(self, number: int, x: Tensor | None, microbatch: object, factor: Tensor, *, version: int) -> Tensor:
        batch = self._local[number]
        y = self._stack.body(x, batch)
        return self._score(cast(Head, self._stack.get_submodule("head")), y, batch) if self.is_last else y


def at_once(loaded: LoadedModel) -> int:
    """Micro-batches of a replica that go through the pipeline together: idle for at most a fifth of the time."""
    return 1 if loaded.parts.num_stages == 1 else 4 * loaded.placement.num_ranks
