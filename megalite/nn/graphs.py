"""CUDA graphs of a stage's blocks (`--cuda-graph-impl local`): two launches a block in the place of its kernels.

A *lane* is the place of one micro-batch between its forward and its backward: its input, positions and sample numbers,
and for every block two captured graphs, with all that they keep. A micro-batch takes a free lane, or one is captured:
in the end there are as many as the schedule has micro-batches in flight.

    forward     copy the input in      replay block 0, 1 .. n-1
    backward                           replay block n-1 .. 0; after each, eagerly: gradients of weights into their sinks

Gradients of weights stay outside, as in a split backward (`WeightGradQueue`): whether a sink overwrites or adds, where
its memory is (ZeRO-2), and when its bucket is reduced is decided by the host.

Each lane has a memory pool of its own. Within a pool a graph may reuse what earlier ones have freed, so graphs must be
replayed in the order in which they were captured; that holds within a lane, and not between lanes.

Invariant: the same kernels on the same numbers as without, so the same bits. Proof: `tests/equivalence/test_graphs.py`,
on stand-ins that refuse what a graph cannot hold, and spoil all memory that another graph may use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.gradient import GradSink, Node, Postponed, WeightGradQueue, sink_of
from megalite.inventory import GRAPH_WARM_UP
from megalite.microbatch import Microbatch
from megalite.nn.block import Block
from megalite.nn.kv_cache import LayerCache
from megalite.nn.stack import LayerStack


class BlockGraphs:
    """Takes the place of `forward` of each block of a stage; hooks of the blocks run as before."""

    def __init__(self, stack: LayerStack, weight_grads: WeightGradQueue) -> None:
        self.blocks = [layer for layer in stack.ordered() if isinstance(layer, Block)]
        self.weight_grads = weight_grads
        self.free: list[Lane] = []
        self._lane: Lane | None = None
        self._runs = 0
        for index, block in enumerate(self.blocks):
            block.forward = partial(self._forward, index)  # type: ignore[method-assign]  # of this one alone

    def _forward(self, index: int, x: Tensor, microbatch: Microbatch, cache: LayerCache | None = None) -> Tensor:
        block = self.blocks[index]
        if not torch.is_grad_enabled() or not block.training or cache is not None:
            return Block.forward(block, x, microbatch, cache)
        if index == 0:
            self._runs += 1
            self._lane = None
            if self._runs > GRAPH_WARM_UP:
                self._lane = self.free.pop() if self.free else Lane(self, x, microbatch)
                self._lane.begin(x, microbatch)
        if self._lane is None:
            return Block.forward(block, x, microbatch)
        y = _Replay.apply(x, self._lane, index)
        # What leaves the stage may still be on its way when the lane is used again.
        return y.clone() if block is self.blocks[-1] else y


class _Backward(NamedTuple):
    """dy, dx: gradients of the result and of the input. gradients: what autograd computes of parameters, and their
    sinks. postponed: gradients of weights, computed of what the graphs leave."""

    graph: torch.cuda.CUDAGraph
    dy: Tensor
    dx: Tensor
    gradients: list[tuple[GradSink, Tensor]]
    postponed: list[Postponed]


_Ends = tuple[Tensor, Tensor, list[nn.Parameter]]
"""Of a block: its input, its result, and the parameters of which its backward has gradients."""


class Lane:
    """The graphs of all blocks of a stage for one micro-batch at a time."""

    def __init__(self, graphs: BlockGraphs, x: Tensor, microbatch: Microbatch) -> None:
        self._graphs, self._open = graphs, 0
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        # What blocks do not read is empty: who read it would fail, and not get what an earlier micro-batch had.
        none, positions = microbatch.positions.new_empty(0), torch.empty_like(microbatch.positions)
        samples = torch.empty_like(microbatch.sample_ids)
        self.microbatch = Microbatch(tokens=none, labels=none, loss_mask=none, positions=positions, sample_ids=samples)
        self.x = torch.empty_like(x)
        # The host must not wait: a receive that is posted may be for what the peer makes of this very micro-batch.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            ends, self._forwards = self._capture_forwards()
            self._backwards = self._capture_backwards(ends)
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self, x: Tensor, microbatch: Microbatch) -> None:
        """A micro-batch comes in."""
        if x.shape != self.x.shape:
            raise ValueError(f"a micro-batch of {tuple(x.shape)} where graphs were captured of {tuple(self.x.shape)}")
        self._open = 1
        self.x.copy_(x.detach())
        for name in ("positions", "sample_ids"):
            getattr(self.microbatch, name).copy_(getattr(microbatch, name))

    def forward(self, index: int) -> Tensor:
        graph, y = self._forwards[index]
        graph.replay()
        return y

    def backward(self, index: int, dy: Tensor) -> Tensor:
        """Returns the gradient of the input; those of parameters are added, or put where the schedule wants them."""
        captured, queue = self._backwards[index], self._graphs.weight_grads
        if dy.data_ptr() != captured.dy.data_ptr():
            captured.dy.copy_(dy)
        captured.graph.replay()
        for sink, gradient in captured.gradients:
            sink.add(gradient)
        self._open += len(captured.postponed)
        for item in captured.postponed:
            queue.put(partial(self._compute, item), item.sink)
        if index == 0:
            self._leave()
        return captured.dx

    def _compute(self, item: Postponed) -> None:
        item()
        self._leave()

    def _leave(self) -> None:
        """The lane is free when the backward is over and all that it has postponed."""
        self._open -= 1
        if self._open == 0:
            self._graphs.free.append(self)

    @contextmanager
    def _capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        # Other threads (the loader's, NCCL's watchdog) may do meanwhile what this one may not.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()

    def _capture_forwards(self) -> tuple[list[_Ends], list[tuple[torch.cuda.CUDAGraph, Tensor]]]:
        """(Ends of the blocks; their graphs, and their results in the memory of these)."""
        ends, forwards, x = [], [], self.x
        for block in self._graphs.blocks:
            x = x.detach().requires_grad_()
            with _leaves_of(block) as leaves, self._capture() as graph:
                y = Block.forward(block, x, self.microbatch)
            ends.append((x, y, leaves))
            x = y.detach()
            forwards.append((graph, x))
        return ends, forwards

    def _capture_backwards(self, ends: list[_Ends]) -> list[_Backward]:
        backwards: list[_Backward] = []
        dy = torch.empty_like(ends[-1][1])
        while ends:
            x, y, parameters = ends.pop()
            with self._capture() as graph, self._graphs.weight_grads.collect() as postponed:
                dx, *gradients = torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)
            del y
            found = [(_sink(p), g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
            backwards.append(_Backward(graph, dy, dx, found, list(postponed)))
            dy = dx
        return backwards[::-1]


class _Replay(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lane: Lane, index: int) -> Tensor:
        ctx.lane, ctx.index = lane, index
        return lane.forward(index).detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.lane.backward(ctx.index, dy), None, None


@contextmanager
def _leaves_of(block: Block) -> Iterator[list[nn.Parameter]]:
    """The block's parameters are new leaves of the stream that captures. What autograd has for one of its own was made
    on another stream, and micro-batches in flight keep it: that stream would wait for a capture, which CUDA refuses."""
    given = [(module, name, p) for module in block.modules() for name, p in module.named_parameters(recurse=False)]
    leaves: list[nn.Parameter] = []
    try:
        for module, name, parameter in given:
            leaf = nn.Parameter(parameter.detach(), parameter.requires_grad)
            vars(leaf).update(vars(parameter))  # where its gradient goes
            module.register_parameter(name, leaf)
            leaves += [leaf] if leaf.requires_grad else []
        yield leaves
    finally:
        for module, name, parameter in given:
            module.register_parameter(name, parameter)


def _sink(parameter: Tensor) -> GradSink:
    sink = sink_of(parameter)
    assert sink is not None, "graphs are captured in training, where every gradient has its place"
    return sink
