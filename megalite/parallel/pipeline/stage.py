"""A stage: consecutive layers, run forward and backward one micro-batch at a time.

A stage knows nothing about schedules or messages. Between a micro-batch's forward and its backward it keeps what the
backward needs: the storage of the output is released as soon as it has been sent, only the edge of the autograd graph
stays (Megatron-LM calls this deallocating the pipeline output).

An asynchronous schedule keeps several versions of the weights, each in a module of its own: version u is
`modules[u % len(modules)]`. A backward runs on the very tensors that its forward used; if they have been overwritten in
between, autograd's version counter raises.

A split backward (Zero Bubble, arXiv 2401.10241) computes the gradient of the input first, collects the computations of
the weight gradients on the way (`megalite.gradient`), and runs them later.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.comm import TensorSpec
from megalite.gradient import GradSink, Postponed, WeightGradQueue
from megalite.microbatch import StageInput
from megalite.microbatch_notes import ExpertLoads, Magnitudes, MicrobatchNotes


@dataclass
class _InFlight:
    """The state of one micro-batch between its forward and its backward."""

    x: Tensor | None
    end: GradientEdge | Tensor
    shape: torch.Size | None = None


class Stage:
    """One model chunk of one rank.

    modules: one per weight version that is kept, `forward(x, microbatch) -> x`; the last stage's returns the summed
        loss.
    weight_grads: the queue into which the stage's layers put the computations of weight gradients.
    spec: what arrives, `[s, b, h]` (`[s/t, b, h]` under sequence parallelism); of as many elements where samples are
        cut into more and shorter sequences.
    out_spec: what leaves; the same where it is not given.
    is_first, is_last: whether the stage has no predecessor (reads tokens) or no successor (computes the loss).
    loads: where its routers note what they did; a forward says for which micro-batch. None: it has no routers.
    magnitudes: where its products note the size of their operands, of forward and backward. None: none does.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        weight_grads: WeightGradQueue,
        *,
        spec: TensorSpec,
        out_spec: TensorSpec | None = None,
        is_first: bool,
        is_last: bool,
        loads: ExpertLoads | None = None,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        self.modules = list(modules)
        self.loads, self.magnitudes = loads or ExpertLoads(), magnitudes or Magnitudes()
        self._noted: list[MicrobatchNotes[Any]] = [notes for notes in (loads, magnitudes) if notes is not None]
        self._noted_backward: list[MicrobatchNotes[Any]] = [] if magnitudes is None else [magnitudes]
        self.spec, self.out_spec = spec, out_spec or spec
        self.is_first, self.is_last = is_first, is_last
        self._weight_grads = weight_grads
        self._in_flight: dict[int, _InFlight] = {}
        self._deferred: dict[int, list[Postponed]] = {}

    def note(self, notes: MicrobatchNotes[Any], *, backward: bool = False) -> None:
        """From now on its forwards, or backwards, say for which micro-batch these are taken."""
        (self._noted_backward if backward else self._noted).append(notes)

    def module(self, version: int) -> nn.Module:
        """The layers that hold weight version `version`."""
        return self.modules[version % len(self.modules)]

    def forward(self, number: int, x: Tensor | None, microbatch: StageInput, factor: Tensor, *, version: int) -> Tensor:
        """Runs the layers; returns the output `[s, b, h]`, or on the last stage the summed loss (both detached).

        factor: what the micro-batch's summed loss is multiplied with before its backward (0-dim tensor).
        """
        if x is not None:
            x = microbatch.arranged(x).detach().requires_grad_()
        with ExitStack() as noting:
            for notes in self._noted:
                noting.enter_context(notes.of(number))
            out: Tensor = self.module(version)(x, microbatch)
        if self.is_last:
            self._in_flight[number] = _InFlight(x, out * factor)
            return out.detach()
        if out._base is not None:  # a view would keep its whole base alive after the send
            out = out.clone()
        self._in_flight[number] = _InFlight(x, get_gradient_edge(out), out.shape)
        return out.detach()

    def backward(self, number: int, dy: Tensor | None) -> Tensor | None:
        """Whole backward; `dy` is None on the last stage. Returns the input's gradient, zeros where nothing reaches it,
        None on the first stage."""
        saved = self._in_flight.pop(number)
        with ExitStack() as noting:
            for notes in self._noted_backward:
                noting.enter_context(notes.of(number))
            torch.autograd.backward(saved.end, dy if dy is None or saved.shape is None else dy.view(saved.shape))
        if saved.x is None:
            return None
        return torch.zeros_like(saved.x) if saved.x.grad is None else saved.x.grad

    def backward_input(self, number: int, dy: Tensor | None) -> Tensor | None:
        """The first half of a split backward: the gradients of the input and of norms."""
        with self._weight_grads.collect() as deferred:
            dx = self.backward(number, dy)
        self._deferred[number] = deferred
        return dx

    def backward_weight(self, number: int) -> None:
        """The second half: the gradients of matrices and biases, in the order of the first half."""
        for compute in self._deferred.pop(number):
            compute()

    def postponed(self, number: int) -> Counter[GradSink]:
        """How many gradients the second half of a micro-batch's backward will add to each sink."""
        return Counter(item.sink for item in self._deferred[number] if item.sink is not None)

    def arriving(self, number: int) -> TensorSpec:
        """Shape and dtype of the message with a micro-batch's input (and, the other way, with its gradient)."""
        return self.spec

    def leaving(self, number: int) -> TensorSpec:
        """Shape and dtype of the message with its output."""
        return self.out_spec

    @property
    def num_in_flight(self) -> int:
        """Micro-batches between forward and backward."""
        return len(self._in_flight)


class ForwardOnly(Stage):
    """A stage of `schedule.forward_program`: one version of the weights, no graph, nothing kept."""

    def __init__(self, stage: Stage, version: int) -> None:
        self.modules = stage.modules
        self.spec, self.out_spec = stage.spec, stage.out_spec
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self._version = version

    @torch.no_grad()
    def forward(self, number: int, x: Tensor | None, microbatch: StageInput, factor: Tensor, *, version: int) -> Tensor:
        out: Tensor = self.module(self._version)(None if x is None else microbatch.arranged(x), microbatch)
        return out

    @property
    def num_in_flight(self) -> int:
        return 0
