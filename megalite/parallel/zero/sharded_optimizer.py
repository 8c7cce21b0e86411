"""One optimizer over the slices that this rank owns.

    reduced gradient --scale--> update of the fp32 masters --cast--> compute weights of one version --all-gather--> all

There is one master per element: where parameters already have the main dtype and one version, the compute buffer itself
is the master. The optimizer sees flat segments, a few long tensors; any `torch.optim.Optimizer` whose update is
elementwise works at any stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.comm import Axis, Handle, TensorShard, all_gather_into
from megalite.parallel.zero.buckets import ParameterBuffers
from megalite.parallel.zero.gradient_sync import Bucket
from megalite.parallel.zero.parts import MakeOptimizer, make_parts
from megalite.parallel.zero.segments import Segment, cut_segments


@dataclass(frozen=True)
class PendingNorm:
    """Sums of squares that are travelling: `[ranks of the norm axis]`, one a rank.

    They are added up in one order whatever carries them: over the shards (`copies` ranks, each `inside` after the one
    before), then over what holds different parameters.
    """

    squares: Tensor
    work: Handle
    copies: int
    inside: int

    def wait(self) -> Tensor:
        """The norm (fp64, 0-dim)."""
        self.work.wait()
        return _sum(_sum(self.squares.view(-1, self.copies, self.inside), 1).flatten(), 0).sqrt()


def _sum(x: Tensor, dim: int) -> Tensor:
    """One after the other along `dim`, from its end."""
    return x.flip(dim).cumsum(dim).select(dim, -1)


class ShardedOptimizer:
    """Any optimizer, any ZeRO stage.

    Args:
        buffers: of this rank's stages (model chunks), family by family.
        make_optimizer: builds the update rule from parameter groups (see `ParamGroup`).
        norm_axis: all ranks that hold parts of one copy of the model and its optimizer state; it goes through whole
            axes of every family. The norm is summed over it.
        offload_fraction: part of the masters and moments that lives, and is updated, in host memory (ZeRO-Offload,
            arXiv 2101.06840).
        store_param_remainders: keep the masters of bf16 weights as the 16 bits that the weights lack (exact).
    """

    def __init__(
        self,
        buffers: Sequence[ParameterBuffers],
        *,
        make_optimizer: MakeOptimizer,
        norm_axis: Axis,
        offload_fraction: float = 0.0,
        store_param_remainders: bool = False,
    ) -> None:
        self.buffers = list(buffers)
        self.norm_axis = norm_axis
        self.segments = [s for b in self.buffers for s in cut_segments(b, offload_fraction, store_param_remainders)]
        self.parts = make_parts(self.segments, make_optimizer)
        self._counted = [s for s in self.segments if self._counts(s)]
        self.step_count = torch.zeros((), dtype=torch.float32)
        self._create_state()

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _create_state(self) -> None:
        """Makes the optimizer allocate its moments, so that a checkpoint can be loaded before the first step.

        A step of zero gradients at learning rate 0 leaves every weight as it is and every moment zero; its count is
        taken back.
        """
        for part in self.parts:
            part.fetch()
            part.update(lr=0.0, weight_decay=0.0, grad_scale=1.0)
        self._set_step_count(0.0)
        for buffers in self.buffers:
            buffers.begin_batch()

    def memory(self) -> dict[str, int]:
        """Bytes of separate master weights and of optimizer state on the device, and of both in host memory."""
        shared = {s.bucket.weights[0].shard.untyped_storage().data_ptr() for s in self.segments}
        held = {"master": 0, "state": 0, "offloaded": 0}
        for segment in self.segments:
            states = sum(t.numel() * t.element_size() for t in self._state_tensors(segment).values())
            master = segment.master.numel() * segment.master.element_size()
            if segment.offloaded:
                held["offloaded"] += master + states
                continue
            held["state"] += states
            if segment.remainder is not None:
                held["master"] += 2 * segment.master.numel()
                continue
            if segment.master.untyped_storage().data_ptr() not in shared:
                held["master"] += master
        for part in self.parts:
            there = "offloaded" if part.segments[0].offloaded else "state"
            held[there] += sum(s.values.numel() * s.values.element_size() for s, _ in part.statistics())
        return held

    def _state_tensors(self, segment: Segment) -> dict[str, Tensor]:
        """The optimizer's tensors with one value per element of the segment."""
        states = [part.optimizer.state[segment.master] for part in self.parts if segment.master in part.optimizer.state]
        state: dict[str, Any] = states[0] if states else {}
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step" and value.numel() == segment.master.numel()
        }

    # ---- step --------------------------------------------------------------------------------------------------------

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the reduced gradients (fp64, 0-dim), each element of the model counted once; the same on
        every rank.

        Not finite if any gradient of any rank is: one agreed decision whether to step.
        """
        return self.start_grad_norm().wait()

    def start_grad_norm(self) -> PendingNorm:
        """This rank's share of `grad_norm` is on its way; `wait` gives the norm. The gradients may be scaled
        meanwhile."""
        device = self.buffers[0].device if self.buffers else torch.device("cpu")
        gradients = [s.gradient for s in self._counted]
        norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if norms:
            total = torch.stack(norms).to(torch.float64).square().sum().view(1)
        squares = total.new_empty(self.norm_axis.size)
        work = all_gather_into(squares, total, self.norm_axis, async_op=True)
        copies, inside = 1, 1
        if self.buffers and (shard := self.buffers[0].axes.shard).size > 1 and _within(shard, self.norm_axis):
            first, second, *_ = (self.norm_axis.ranks.index(rank) for rank in shard.ranks)
            copies, inside = shard.size, second - first
        return PendingNorm(squares, work, copies, inside)

    def _counts(self, segment: Segment) -> bool:
        """Whether this rank counts the segment: the first of those on the norm axis that hold the same."""
        buffers = segment.buffers
        if buffers.replica or (segment.bucket.plan.tied and not buffers.counts_tied):
            return False
        alike = buffers.axes.alike(segment.run.kind.sharded, everywhere=not buffers.options.stage)
        return all(axis.is_first for axis in alike if _within(axis, self.norm_axis))

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, grad_scale: float | Tensor = 1.0, version: int = 0) -> None:
        """Updates the masters with `grad_scale` x gradient and writes the new weights into the compute weights of
        `version`.

        lr: learning rate (a group's `lr_scale`, if it has one, multiplies it). weight_decay: of the groups that decay.
        grad_scale: 1 / loss scale x clip coefficient.
        """
        for buffers in self.buffers:  # a gather that no forward has waited for still reads the slices
            buffers.wait_weights()
        for part in self.parts:  # transfers to the host run behind the device's update, which comes first
            part.fetch()
        for part in self.parts:
            part.update(lr=lr, weight_decay=weight_decay, grad_scale=grad_scale)
        self.step_count += 1
        self.write_weights(version)

    @torch.no_grad()
    def write_weights(self, version: int = 0) -> None:
        """Masters -> compute weights of one version, on every rank."""
        for segment in self.segments:
            if segment.remainder is not None:
                segment.remainder.split()
                continue
            target = segment.weights(version)
            if target.data_ptr() != segment.master.data_ptr():
                target.copy_(segment.master, non_blocking=True)
        for buffers in self.buffers:
            buffers.gather_weights(version)

    # ---- checkpoint --------------------------------------------------------------------------------------------------

    def shards(self) -> list[TensorShard]:
        """Masters (`<name>`), moments (`optimizer/<moment>/<name>`) and the step count (`optimizer/step`) as rectangles
        (views).

        Loading writes through the views; `after_load` must follow.
        """
        shards: list[TensorShard] = []
        for segment in self.segments:
            replica = self._replica(segment)
            if segment.remainder is not None:
                segment.remainder.join()  # until the next step or `after_load`
            shards += segment.shards("", segment.master, replica)
            for name, value in self._state_tensors(segment).items():
                shards += segment.shards(f"optimizer/{name}/", value, replica)
        for part in self.parts:
            for statistic, home in part.statistics():
                replica = replica_of(home.buffers, home.bucket, statistic.sharded, everywhere=True)
                shards.append(statistic.shard(home.parameter, replica))
        return [
            *shards,
            TensorShard("optimizer/step", (), (), self.step_count, self.norm_axis.ranks[self.norm_axis.rank]),
        ]

    def version_shards(self, version: int) -> list[TensorShard]:
        """The owned compute weights of a version as `previous/<name>`: what 2BW's next batch will use."""
        return [
            shard
            for segment in self.segments
            for shard in segment.shards("previous/", segment.weights(version), self._replica(segment))
        ]

    def after_load(self, version: int = 0) -> None:
        """Values have been written through `shards`: refreshes step counters and the compute weights of `version`.

        (Call `wait_weights` of the buffers before writing, if a step was made since the last forward.)
        """
        self._set_step_count(float(self.step_count))
        self.write_weights(version)

    def _replica(self, segment: Segment) -> int:
        buffers = segment.buffers
        return replica_of(buffers, segment.bucket, segment.run.kind.sharded, everywhere=not buffers.options.stage)

    def _set_step_count(self, count: float) -> None:
        self.step_count.fill_(count)
        for part in self.parts:
            part.set_step_count(count)


def replica_of(buffers: ParameterBuffers, bucket: Bucket, sharded: frozenset[str], *, everywhere: bool) -> int:
    """Which copy of a tensor that the axes `sharded` cut this rank holds, 0 being the one that is written.

    everywhere: all ranks of the shard axis hold it.
    """
    copies = 0
    for axis in buffers.axes.alike(sharded, everywhere=everywhere):
        copies = copies * axis.size + axis.rank
    return copies + (bucket.plan.tied and not buffers.counts_tied) + buffers.replica


def _within(axis: Axis, other: Axis) -> bool:
    return set(axis.ranks) <= set(other.ranks)
