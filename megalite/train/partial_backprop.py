"""Structured partial backpropagation (SPB; Kumar et al. 2021, arXiv:2111.10672): `--partial-backprop-groups k`.

The blocks are k groups; group 0 is on top, with the head. Micro-batch j of replica d back-propagates through the top
groups alone in step t, as many as

    depth(d, j, t) = ((d + j + t) mod k) + 1

    k=2, two replicas with two micro-batches each       step 0   d=0: 1 2   d=1: 2 1       step 1   d=0: 2 1   d=1: 1 2

and the gradient of a layer is the mean over the micro-batches that computed it. So k + 1 of 2k backwards of a block are
left; every rank has as many where k divides its micro-batches. It is another optimisation than that of the whole
gradient, whose average over k steps it is at the same weights.

A group that is left out lies behind a detached tensor. What goes down into group g is multiplied there by the ratio of
the numbers of micro-batches that compute groups g - 1 and g: no layer, sum or update knows.

Proof: `tests/equivalence/test_partial_backprop.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh
from megalite.config import Config
from megalite.engine import BuiltStages
from megalite.microbatch_notes import MicrobatchNotes


class Depths(MicrobatchNotes[int]):
    """How far the micro-batch that runs forward is back-propagated. groups: k. replica: d, of `replicas`. size: of a
    batch in micro-batches of a replica."""

    def __init__(self, groups: int, replica: int, replicas: int, size: int) -> None:
        super().__init__()
        self.groups, self.replica, self.replicas, self.size = groups, replica, replicas, size
        self._depth, self._counts = groups, [1] * groups

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        step, place = divmod(microbatch, self.size)
        self._depth = depth_of(self.groups, self.replica, place, step)
        self._counts = counts(self.groups, self.replicas, self.size, step % self.groups)
        with super().of(microbatch):
            yield

    def enter(self, group: int, x: Tensor) -> Tensor:
        """x on its way from group `group` to the one above."""
        if not self.wanted or not torch.is_grad_enabled():
            return x
        if self._depth <= group:
            return x.detach().requires_grad_()  # the group above begins a graph of its own
        ratio = self._counts[group - 1] / self._counts[group]
        if ratio != 1:
            x.register_hook(lambda gradient: gradient * ratio)
        return x

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """blocks: all of the model, from below."""
        for group in range(1, self.groups):
            above = blocks[len(blocks) * (self.groups - group) // self.groups]

            def entered(block: nn.Module, args: tuple[Any, ...], group: int = group) -> tuple[Any, ...]:
                return (self.enter(group, args[0]), *args[1:])

            above.register_forward_pre_hook(entered)


def depth_of(groups: int, replica: int, place: int, step: int) -> int:
    """Groups through which micro-batch `place` of a replica is back-propagated."""
    return (replica + place + step) % groups + 1


@lru_cache
def counts(groups: int, replicas: int, size: int, step: int) -> list[int]:
    """How many micro-batches of a step compute each group."""
    depths = [depth_of(groups, replica, place, step) for replica in range(replicas) for place in range(size)]
    return [sum(depth > group for depth in depths) for group in range(groups)]


def attach_depths(config: Config, mesh: ParallelMesh, built: BuiltStages) -> None:
    """Hooks the blocks of the one stage that there is."""
    groups, replicas = config.training.partial_backprop_groups, mesh.size("dp")
    for stage, modules in built.values():
        depths = Depths(groups, mesh.coordinate("dp"), replicas, config.num_microbatches(mesh.size("world")))
        stage.note(depths)
        for module in modules:
            depths.attach([module.get_submodule(name) for name in module.names if name.startswith("layers.")])
