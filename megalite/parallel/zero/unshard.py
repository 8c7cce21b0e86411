"""Gathers compute weights before a layer uses them, and frees them afterwards (stage 3).

    forward    use(0) | use(1)  | use(2)  ...       use(i): wait for the weights of layer i, start the gather of
    gather     0, 1     2         3                 layer i + 1, free all others
    backward   use(2) | use(1)  | use(0)            the same in the other direction; the last layer is still gathered

A layer is freed when another one is gathered, not when its forward ends. So a layer whose backward follows its forward
(the last two of a stage, or a recomputed one) is not gathered twice. In stages 1 and 2 the same hooks wait for the
gather of updated weights, which overlaps the first forward after a step.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from megalite.comm import Axis, Handle, all_gather_into
from megalite.errors import RuntimeFailure
from megalite.schedule import ChunkKey, ChunkUse, StageKey


class ComingWeights:
    """Weights that a layer waits for before it runs.

    full: all of them, contiguous; the parameters are views of it. Its memory exists only while `resident`.
    sharded: whether something must arrive before they can be read.
    released_after_use: whether their memory comes and goes. nbytes: of `full`, resident or not.
    pinned: they stay until `FlatWeights.reshard`, whichever layer is in use.
    """

    def __init__(self, full: Tensor, *, sharded: bool, released_after_use: bool) -> None:
        self.full, self.nbytes = full, full.nbytes
        self.sharded, self.released_after_use = sharded, released_after_use
        self.resident, self.pinned = True, False
        self._arriving: Handle | None = None

    def start_gather(self, *, async_op: bool) -> None:
        """Starts to fetch them, if something must arrive; they may be read after `wait`. Perhaps collective."""
        self.wait()
        if self.sharded:
            self.allocate()
            self._arriving = self._fetch(async_op=async_op)

    def _fetch(self, *, async_op: bool) -> Handle:
        raise NotImplementedError

    def wait(self) -> None:
        """Returns when the weights can be read."""
        if self._arriving is not None:
            arriving, self._arriving = self._arriving, None
            arriving.wait()

    def allocate(self) -> None:
        """Memory for `full`, if it was freed."""
        if not self.resident:
            self.full.untyped_storage().resize_(self.nbytes)
        self.resident = True

    def free(self) -> None:
        """Frees the memory of `full`, if it comes and goes."""
        if self.released_after_use and self.resident and not self.pinned:
            self.wait()
            self.full.untyped_storage().resize_(0)
            self.resident = False

    def updated(self, *, async_op: bool) -> None:
        """Called when the place that they come from holds new values. A backward through the old ones is an error."""
        torch.autograd.graph.increment_version(self.full)
        if self.released_after_use and not self.pinned:
            self.free()
        else:
            self.start_gather(async_op=async_op)
            if not async_op:
                self.wait()

    def holds(self, x: Tensor) -> bool:
        """Whether x lies in the memory that `free` frees."""
        return self.released_after_use and x.untyped_storage()._cdata == self.full.untyped_storage()._cdata


class BucketWeights(ComingWeights):
    """One bucket's weights in one version, gathered from all ranks.

    owned: this rank's slice. sizes: elements that each rank owns.
    shard: this rank's slice (stages 1 and 2: a view of `full`; stage 0: `full` itself).
    """

    def __init__(self, full: Tensor, owned: slice, *, axis: Axis, stage: int, sizes: Sequence[int]) -> None:
        several = axis.size > 1
        super().__init__(full, sharded=stage > 0 and several, released_after_use=stage == 3 and several)
        self.axis, self._sizes = axis, sizes
        self.shard = full[owned].clone() if self.released_after_use else full[owned]

    def _fetch(self, *, async_op: bool) -> Handle:
        # `.data` has its own version counter: what autograd saved of these weights is unchanged by gathering them
        # again.
        return all_gather_into(self.full.data, self.shard, self.axis, sizes=self._sizes, async_op=async_op)


Weights = Sequence[ComingWeights]


class Unsharder:
    """Keeps the weights of the layer in use and of the next one gathered on this rank, or what a plan says."""

    def __init__(self, *, prefetch: bool) -> None:
        self.prefetch = prefetch
        self._own: dict[ChunkKey, Weights] = {}
        self._plan: Iterator[ChunkUse] | None = None
        self._present: list[ComingWeights] = []
        self._last: Weights = []
        self._in_backward: Weights | None = None
        self._behind: dict[nn.Module, tuple[Weights, Weights]] = {}

    def attach(self, layers: Sequence[nn.Module], weights: Sequence[Weights], stage: StageKey = (0, 0)) -> None:
        """Hooks the layers of a stage (in forward order); weights[i]: what layer i uses."""
        seen: list[ComingWeights] = []
        for i, layer in enumerate(layers):
            self._own[*stage, i] = [each for each in weights[i] if each not in seen]
            seen += weights[i]
            if not any(w.sharded for w in weights[i]):
                continue
            before = weights[i - 1] if i > 0 else []
            after = weights[i + 1] if i + 1 < len(layers) else []
            arrived: list[Any] = []
            layer.register_forward_pre_hook(partial(self._before_forward, weights[i], after, arrived))
            if any(w.released_after_use for w in weights[i]):
                layer.register_forward_hook(partial(self._after_forward, weights[i], before, arrived))
                self._behind[layer] = weights[i], before

    def _before_forward(
        self, wanted: Weights, ahead: Weights, arrived: list[Any], layer: nn.Module, args: Sequence[Any]
    ) -> None:
        """arrived: becomes the nodes of autograd's graph behind the layer's input."""
        arrived[:] = [x.grad_fn for x in args if isinstance(x, Tensor)]
        self.use(wanted, ahead)

    def _after_forward(
        self, wanted: Weights, before: Weights, arrived: list[Any], layer: nn.Module, args: Any, output: Any
    ) -> Any:
        """Gathers the weights again for the layer's backward; returns the output, without what lies in their memory.

        Autograd runs the node that was made last first, so the layer's backward begins with a node behind its results.
        What the layer hands on as it came belongs to an earlier layer.
        """
        values = output if isinstance(output, tuple) else (output,)
        apart = [x.clone() if isinstance(x, Tensor) and any(w.holds(x) for w in wanted) else x for x in values]
        made = [x for x in apart if isinstance(x, Tensor) and x.grad_fn is not None and x.grad_fn not in arrived]
        arrived.clear()  # a graph is not kept beyond its micro-batch
        if made and torch.is_grad_enabled():
            register_multi_grad_hook(made, lambda gradient: self.use(wanted, before, backward=True), mode="any")
        if all(x is value for x, value in zip(apart, values, strict=True)):
            return None
        return tuple(apart) if isinstance(output, tuple) else apart[0]

    def follow(self, plan: Iterable[ChunkUse] | None) -> None:
        """From now on layers are used as `plan` says, which begins with nothing on the device; None: as they come."""
        self.free_all()
        self._plan = None if plan is None else iter(plan)

    def _use_planned(self, plan: Iterator[ChunkUse], wanted: Weights) -> None:
        """Takes the plan's next step. What is used twice in a row is one step."""
        if wanted is self._last:
            return
        step, self._last = next(plan, None), wanted
        planned = () if step is None else [each for key in step.wanted for each in self._own[key]]
        if step is None or {id(each) for each in planned} != {id(each) for each in wanted}:
            raise RuntimeFailure("a layer's weights are used where the plan of `param_offload` has them on the host")
        for key in step.leave:
            for each in self._own[key]:
                each.free()
        self._present = [each for each in self._present if each.resident]
        for key in step.come:
            for each in self._own[key]:
                self._start(each, async_op=key not in step.wanted)
        for each in wanted:
            each.wait()

    def use(self, wanted: Weights, ahead: Weights, *, backward: bool = False) -> None:
        """Makes `wanted` readable and starts to gather `ahead`."""
        if self._plan is not None:
            self._use_planned(self._plan, wanted)
            return
        recomputed = wanted is self._in_backward and not backward
        self._in_backward = wanted if backward else None
        if recomputed and all(bucket.resident for bucket in wanted):
            return  # recomputed inside its own backward: the layer needed next is the one before it, already in flight
        # After the last layer comes the backward, which needs the layer used before this one.
        self._free_others([*wanted, *(ahead or self._last)] if self.prefetch else wanted)
        self._last = wanted
        ahead = ahead if self.prefetch else []
        for bucket in wanted:
            if not bucket.resident:
                self._start(bucket, async_op=False)
            bucket.wait()
        for bucket in ahead:
            if not bucket.resident:
                self._start(bucket, async_op=True)

    def pass_by(self, layer: nn.Module) -> None:
        """Takes part in what a layer's backward gathers, which other ranks run and this one does not."""
        if layer in self._behind:
            self.use(*self._behind[layer], backward=True)

    def free_all(self) -> None:
        """Frees everything that is not pinned."""
        self._in_backward, self._last = None, []
        self._free_others([])

    def _start(self, bucket: ComingWeights, *, async_op: bool) -> None:
        bucket.start_gather(async_op=async_op)
        self._present.append(bucket)

    def _free_others(self, keep: Weights) -> None:
        for bucket in self._present:
            if bucket not in keep and not bucket.pinned:
                bucket.free()
        self._present = [bucket for bucket in self._present if bucket.resident]
