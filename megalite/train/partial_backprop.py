"""Structured partial backpropagation (SPB; Kumar et al. 2021, arXiv:2111.10672): `--partial-backprop-groups k`.

The blocks are k groups; group 0 is on top, with the head. Micro-batch j of replica d back-propagates through the top
groups alone in step t, as many as

    depth(d, j, t) = ((d + j + t) mod k) + 1

    k=2, two replicas with two micro-batches each       step 0   d=0: 1 2   d=1: 2 1       step 1   d=0: 2 1   d=1: 1 2

and the gradient of a layer is the mean over the micro-batches that computed it. So k + 1 of 2k backwards of a block are
left; every rank has as many where k divides its micro-batches. It is another optimisation than that of the whole
gradient, whose average over k steps it is at the same weights.

A group that is left out lies behind a detached tensor; a pipeline stage that is not reached gives nothing back but
zeros, and computes nothing to do so. What goes down into group g is multiplied there by the ratio of
the numbers of micro-batches that compute groups g - 1 and g: no layer, sum or update knows. Where ranks reduce each
micro-batch by itself (ZeRO 2 and 3), one that has not computed a layer joins in the layer's messages with zeros.

Proof: `tests/equivalence/test_partial_backprop.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh
from megalite.config import Config
from megalite.engine import BuiltStages, Weights
from megalite.gradient import sink_of
from megalite.microbatch_notes import MicrobatchNotes
from megalite.parallel.zero import Unsharder


class Depths(MicrobatchNotes[int]):
    """How far the micro-batch that runs forward is back-propagated. groups: k. replica: d, of `replicas`. size: of a
    batch in micro-batches of a replica."""

    def __init__(self, groups: int, replica: int, replicas: int, size: int) -> None:
        super().__init__()
        self.groups, self.replica, self.replicas, self.size = groups, replica, replicas, size

    def at(self, microbatch: int) -> int:
        """How many groups the backward of a micro-batch of this replica reaches."""
        step, place = divmod(microbatch, self.size)
        return depth_of(self.groups, self.replica, place, step)

    @property
    def running(self) -> int | None:
        """The micro-batch that runs forward, where a backward follows."""
        return self._microbatch if torch.is_grad_enabled() else None

    def cut(self, group: int, x: Tensor) -> Tensor:
        """x on its way up from a group: where no backward reaches that, what is above begins a graph of its own."""
        number = self.running
        return x if number is None or self.at(number) > group else x.detach().requires_grad_()

    def enter(self, group: int, x: Tensor) -> Tensor:
        """The same where a group ends, so that other micro-batches compute what is above."""
        y, number = self.cut(group, x), self.running
        if y is not x or number is None:
            return y
        numbers = counts(self.groups, self.replicas, self.size, number // self.size % self.groups)
        if numbers[group - 1] != numbers[group]:
            x.register_hook(lambda gradient: gradient * (numbers[group - 1] / numbers[group]))
        return x

    def attach(self, stack: nn.Module, top: int, begins: Mapping[int, nn.Module]) -> None:
        """stack: the layers of a stage. top: the group of the highest. begins: the lowest block of each group that
        begins here and has others below."""
        for group, above in begins.items():

            def entered(block: nn.Module, args: tuple[Any, ...], below: int = group + 1) -> tuple[Any, ...]:
                return (self.enter(below, args[0]), *args[1:])

            above.register_forward_pre_hook(entered, prepend=True)

        stack.register_forward_hook(lambda stack, args, out: self.cut(top, out))


class Unreached(MicrobatchNotes[int]):
    """Behind each backward of a stage, what its rank owes the others of the layers that it has not computed: the
    messages in which their weights come, and their gradients, zeros, are summed. layers: with their groups, from
    below."""

    def __init__(self, depths: Depths, layers: Sequence[tuple[int, nn.Module]], weights: Unsharder) -> None:
        super().__init__()
        self._depths, self._layers, self._weights = depths, layers, weights

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        yield
        depth = self._depths.at(microbatch)
        for group, layer in reversed(self._layers):
            if group >= depth:
                self._weights.pass_by(layer)
                for sink in map(sink_of, reversed([*layer.parameters()])):
                    if sink is not None:
                        sink.done()


def depth_of(groups: int, replica: int, place: int, step: int) -> int:
    """Groups through which micro-batch `place` of a replica is back-propagated."""
    return (replica + place + step) % groups + 1


@lru_cache
def counts(groups: int, replicas: int, size: int, step: int) -> list[int]:
    """How many micro-batches of a step compute each group."""
    depths = [depth_of(groups, replica, place, step) for replica in range(replicas) for place in range(size)]
    return [sum(depth > group for depth in depths) for group in range(groups)]


def attach_depths(config: Config, mesh: ParallelMesh, built: BuiltStages, weights: Weights) -> None:
    """Hooks the stages of this rank, and their blocks."""
    groups, replicas = config.training.partial_backprop_groups, mesh.size("dp")
    number = config.model.num_layers
    begins = [number * (groups - 1 - group) // groups for group in range(groups)]  # the lowest block of each

    def group_of(name: str) -> int:
        """Of a layer: the head is above all blocks, the embedding below."""
        index = {"embedding": 0, "head": number - 1}.get(name)
        index = int(name.removeprefix("layers.")) if index is None else index
        return next(group for group, first in enumerate(begins) if index >= first)

    for key, (stage, modules) in built.items():
        depths = Depths(groups, mesh.coordinate("dp"), replicas, config.num_microbatches(mesh.size("world")))
        stage.note(depths)
        for stack, module in zip(stage.modules, modules, strict=True):
            named = dict(zip(module.names, module.ordered(), strict=True))
            firsts = {group: f"layers.{first}" for group, first in enumerate(begins[:-1])}
            here = {group: named[name] for group, name in firsts.items() if name in named}
            depths.attach(stack, group_of(module.names[-1]), here)
            buffers = weights.buffers[key][0]
            if buffers.options.stage >= 2:  # ranks reduce every micro-batch by itself
                layers = [(group_of(name), layer) for name, layer in named.items()]
                stage.note(Unreached(depths, layers, buffers.weights.unsharder), backward=True)
