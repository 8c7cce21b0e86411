"""Gathers compute weights before a layer uses them, and frees them afterwards (stage 3).

    forward    use(0) | use(1)  | use(2)  ...       use(i): wait for the weights of layer i, start the gather of
    gather     0, 1     2         3                 layer i + 1, free all others
    backward   use(2) | use(1)  | use(0)            the same in the other direction; the last layer is still gathered

A layer is freed when another one is gathered, not when its forward ends. So a layer whose backward follows its forward
(the last two of a stage, or a recomputed one) is not gathered twice. In stages 1 and 2 the same hooks wait for the
gather of updated weights, which overlaps the first forward after a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from megalite.comm import Axis, Handle, all_gather_into


class BucketWeights:
    """One bucket's weights in one version.

    full: all of them, contiguous; the parameters are views of it. In stage 3 its memory exists only while `resident`.
    shard: this rank's slice (stages 1 and 2: a view of `full`; stage 0: `full` itself).
    pinned: stays gathered until `reshard`, whichever layer is in use.
    """

    def __init__(self, full: Tensor, owned: slice, *, axis: Axis, stage: int) -> None:
        self.axis = axis
        self.sharded = stage > 0 and axis.size > 1
        self.released_after_use = stage == 3 and axis.size > 1
        self.full = full
        self.shard = full[owned].clone() if self.released_after_use else full[owned]
        self.resident = True
        self.pinned = False
        self._gather: Handle | None = None

    def start_gather(self, *, async_op: bool) -> None:
        """Starts to gather all ranks' slices; collective. The result may be read after `wait`."""
        self.wait()
        if not self.sharded:
            return
        if self.released_after_use and not self.resident:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self.resident = True
        # `.data` has its own version counter: what autograd saved of these weights is unchanged by gathering them
        # again.
        self._gather = all_gather_into(self.full.data, self.shard, self.axis, async_op=async_op)

    def wait(self) -> None:
        """Returns when the weights can be read."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def free(self) -> None:
        """Frees the memory of `full` (stage 3 only)."""
        if self.released_after_use and self.resident:
            self.wait()
            self.full.untyped_storage().resize_(0)
            self.resident = False

    def updated(self, *, async_op: bool) -> None:
        """Called when the slice holds new values. From then on, a backward through the old ones is an error."""
        torch.autograd.graph.increment_version(self.full)
        if self.released_after_use and not self.pinned:
            self.free()
        else:
            self.start_gather(async_op=async_op)
            if not async_op:
                self.wait()


Weights = Sequence[BucketWeights]


class Unsharder:
    """Keeps the weights of the layer in use and of the next one gathered on this rank."""

    def __init__(self, *, prefetch: bool) -> None:
        self.prefetch = prefetch
        self._present: list[BucketWeights] = []
        self._last: Weights = []
        self._in_backward: Weights | None = None

    def attach(self, layers: Sequence[nn.Module], weights: Sequence[Weights]) -> None:
        """Hooks the layers of a stage (in forward order); weights[i]: what layer i uses."""
        for i, layer in enumerate(layers):
            if not any(w.sharded for w in weights[i]):
                continue
            before = weights[i - 1] if i > 0 else []
            after = weights[i + 1] if i + 1 < len(layers) else []
            layer.register_forward_pre_hook(partial(self._before_forward, weights[i], after))
            if any(w.released_after_use for w in weights[i]):
                layer.register_forward_hook(partial(self._after_forward, weights[i], before))

    def _before_forward(self, wanted: Weights, ahead: Weights, layer: nn.Module, args: Any) -> None:
        self.use(wanted, ahead)

    def _after_forward(self, wanted: Weights, ahead: Weights, layer: nn.Module, args: Any, output: Any) -> None:
        """Gathers the weights again when the gradient of the output arrives; of several, that of the last."""
        if isinstance(output, tuple):
            made = [x for x in output if x.requires_grad and not any(x is arrived for arrived in args)]
            if torch.is_grad_enabled() and made:
                register_multi_grad_hook(made, lambda gradients: self.use(wanted, ahead, backward=True))
        elif torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(lambda gradient: self.use(wanted, ahead, backward=True))

    def use(self, wanted: Weights, ahead: Weights, *, backward: bool = False) -> None:
        """Makes `wanted` readable and starts to gather `ahead`."""
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

    def free_all(self) -> None:
        """Frees everything that is not pinned."""
        self._in_backward, self._last = None, []
        self._free_others([])

    def _start(self, bucket: BucketWeights, *, async_op: bool) -> None:
        bucket.start_gather(async_op=async_op)
        self._present.append(bucket)

    def _free_others(self, keep: Weights) -> None:
        for bucket in self._present:
            if bucket not in keep and not bucket.pinned:
                bucket.free()
        self._present = [bucket for bucket in self._present if bucket.resident]
