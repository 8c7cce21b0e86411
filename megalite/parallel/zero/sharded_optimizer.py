"""One optimizer over the slices that this rank owns.

    reduced gradient --scale--> update of the fp32 masters --cast--> compute weights of one version --all-gather--> all

There is one master per element: where parameters already have the main dtype and one version, the compute buffer itself
is the master. The optimizer sees flat segments, a few long tensors; any `torch.optim.Optimizer` whose update is
elementwise works at any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.comm.collectives import all_reduce_
from megalite.comm.layout import TensorShard, shards_of_range
from megalite.comm.mesh import Axis
from megalite.parallel.zero.buckets import ParameterBuffers
from megalite.parallel.zero.gradient_sync import Bucket
from megalite.parallel.zero.layout import Run, Slot

ParamGroup = dict[str, Any]
"""What `make_optimizer` receives: `params` (list of tensors), `decay` (bool: weight decay applies), `whole` (bool: the
tensors have their parameter's shape and must be updated as matrices) and, for whole groups, `placements` (their places
in the logical tensors)."""


@dataclass
class Segment:
    """A piece of a run that this rank owns: one tensor of the optimizer."""

    buffers: ParameterBuffers
    bucket: Bucket
    run: Run
    start: int
    stop: int
    master: Tensor

    @property
    def gradient(self) -> Tensor:
        """The reduced gradient, in the gradient dtype, shaped like `master`."""
        flat = self.bucket.gradient[self.start - self.bucket.owned_start : self.stop - self.bucket.owned_start]
        return flat.view(self.master.shape)

    def weights(self, version: int) -> Tensor:
        """The owned compute weights of a version, shaped like `master`."""
        shard = self.bucket.weights[version].shard
        flat = shard[self.start - self.bucket.owned_start : self.stop - self.bucket.owned_start]
        return flat.view(self.master.shape)

    def pieces(self) -> Iterator[tuple[Slot, int, int]]:
        """(slot, start, stop) of every parameter's part of the segment, in elements of the flat buffer."""
        for slot in self.run.slots:
            start, stop = max(slot.start, self.start), min(slot.stop, self.stop)
            if start < stop:
                yield slot, start, stop

    def shards(self, prefix: str, values: Tensor, replica: int) -> Iterator[TensorShard]:
        """`values` (one per element of the segment) as rectangles of the logical tensors `prefix + name`."""
        flat = values.view(-1)
        for slot, start, stop in self.pieces():
            part = flat[start - self.start : stop - self.start]
            entry = slot.entry
            yield from shards_of_range(
                prefix + entry.name, entry.placement, entry.shape, part, start - slot.start, replica=replica
            )


class ShardedOptimizer:
    """Any optimizer, any ZeRO stage.

    Args:
        buffers: the stages (model chunks) of this rank.
        make_optimizer: builds the update rule from parameter groups (see `ParamGroup`).
        model_axis: all ranks that hold one copy of the model (tp x pp); the norm is summed over it.
    """

    def __init__(
        self,
        buffers: Sequence[ParameterBuffers],
        *,
        make_optimizer: Callable[[list[ParamGroup]], torch.optim.Optimizer],
        model_axis: Axis,
    ) -> None:
        self.buffers = list(buffers)
        self.model_axis = model_axis
        self.segments = [s for b in self.buffers for s in self._segments_of(b)]
        groups: dict[tuple[bool, bool], list[Segment]] = {}
        for segment in self.segments:
            groups.setdefault((segment.run.kind.no_decay, segment.run.whole), []).append(segment)
        self.optimizer = make_optimizer(
            [
                {
                    "params": [s.master for s in members],
                    "decay": not no_decay,
                    "whole": whole,
                    "placements": [s.run.slots[0].entry.placement for s in members] if whole else [],
                }
                for (no_decay, whole), members in groups.items()
            ]
        )
        self.step_count = torch.zeros((), dtype=torch.float32)
        self._create_state()

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _segments_of(self, buffers: ParameterBuffers) -> list[Segment]:
        separate = buffers.main_dtype != buffers.dtype or buffers.num_versions > 1
        segments = []
        for bucket in buffers.buckets:
            shard = bucket.weights[0].shard
            master = shard.to(buffers.main_dtype, copy=True) if separate else shard
            for run in bucket.plan.runs:
                start, stop = max(run.start, bucket.owned_start), min(run.stop, bucket.owned_stop)
                if start >= stop:
                    continue
                flat = master[start - bucket.owned_start : stop - bucket.owned_start]
                if run.whole:
                    entry = run.slots[0].entry
                    stop = start + entry.numel
                    flat = flat[: entry.numel].view(entry.shape)
                segments.append(Segment(buffers, bucket, run, start, stop, flat))
        return segments

    def _create_state(self) -> None:
        """Makes the optimizer allocate its moments, so that a checkpoint can be loaded before the first step.

        A step of zero gradients at learning rate 0 leaves every weight as it is and every moment zero; its count is
        taken back.
        """
        for segment in self.segments:
            segment.master.grad = torch.zeros_like(segment.master)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        self.optimizer.step()
        for segment in self.segments:
            segment.master.grad = None
        self._set_step_count(0.0)

    def memory(self) -> dict[str, int]:
        """Bytes of separate master weights and of optimizer state that this rank holds."""
        masters = {s.master.untyped_storage().data_ptr(): s.master.untyped_storage().nbytes() for s in self.segments}
        for segment in self.segments:
            masters.pop(segment.bucket.weights[0].shard.untyped_storage().data_ptr(), None)
        states = [t for s in self.segments for t in self._state_tensors(s).values()]
        return {"master": sum(masters.values()), "state": sum(t.numel() * t.element_size() for t in states)}

    def _state_tensors(self, segment: Segment) -> dict[str, Tensor]:
        """The optimizer's tensors with one value per element of the segment."""
        state = self.optimizer.state.get(segment.master, {})
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
        device = self.buffers[0].device if self.buffers else torch.device("cpu")
        sharded = any(b.options.stage for b in self.buffers)
        norms = [torch.linalg.vector_norm(s.gradient) for s in self.segments if self._counts(s)]
        total = torch.zeros((), dtype=torch.float64, device=device)
        if norms:
            total = torch.stack(norms).to(torch.float64).square().sum()
        all_reduce_(total, self.model_axis)
        if sharded:
            all_reduce_(total, self.buffers[0].dp_shard)
        return total.sqrt()

    def _counts(self, segment: Segment) -> bool:
        if segment.bucket.plan.tied and not segment.buffers.counts_tied:
            return False
        if segment.buffers.replica:
            return False
        return segment.buffers.tp.is_first or not segment.run.kind.tp_replicated

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, grad_scale: float | Tensor = 1.0, version: int = 0) -> None:
        """Updates the masters with `grad_scale` x gradient and writes the new weights into the compute weights of
        `version`.

        lr: learning rate (a group's `lr_scale`, if it has one, multiplies it). weight_decay: of the groups that decay.
        grad_scale: 1 / loss scale x clip coefficient.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        for segment in self.segments:
            gradient = segment.gradient
            if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
                gradient.mul_(grad_scale)
            segment.master.grad = gradient.to(segment.master.dtype)
        self.optimizer.step()
        self.step_count += 1
        for segment in self.segments:
            segment.master.grad = None
        self.write_weights(version)

    @torch.no_grad()
    def write_weights(self, version: int = 0) -> None:
        """Masters -> compute weights of one version, on every rank."""
        for segment in self.segments:
            target = segment.weights(version)
            if target.data_ptr() != segment.master.data_ptr():
                target.copy_(segment.master)
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
            shards += segment.shards("", segment.master, replica)
            for name, value in self._state_tensors(segment).items():
                shards += segment.shards(f"optimizer/{name}/", value, replica)
        return [*shards, TensorShard("optimizer/step", (), (), self.step_count, self._rank_of_copy())]

    def version_shards(self, version: int) -> list[TensorShard]:
        """The owned compute weights of a version as `previous/<name>`: what 2BW's next batch will use."""
        return [
            shard
            for segment in self.segments
            for shard in segment.shards("previous/", segment.weights(version), self._replica(segment))
        ]

    def after_load(self, version: int = 0) -> None:
        """Values have been written through `shards`: refreshes step counters and the compute weights of `version`."""
        self._set_step_count(float(self.step_count))
        self.write_weights(version)

    def _replica(self, segment: Segment) -> int:
        buffers = segment.buffers
        copies = buffers.dp_replicate.rank
        if not buffers.options.stage:
            copies = copies * buffers.dp_shard.size + buffers.dp_shard.rank
        if segment.run.kind.tp_replicated:
            copies = copies * buffers.tp.size + buffers.tp.rank
        if segment.bucket.plan.tied and not buffers.counts_tied:
            copies += 1
        return copies + buffers.replica

    def _rank_of_copy(self) -> int:
        if not self.buffers:
            return self.model_axis.rank
        shard, replicate = self.buffers[0].dp_shard, self.buffers[0].dp_replicate
        return self.model_axis.rank + self.model_axis.size * (shard.rank + shard.size * replicate.rank)

    def _set_step_count(self, count: float) -> None:
        self.step_count.fill_(count)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].fill_(count) if isinstance(state["step"], Tensor) else count
        for group in self.optimizer.param_groups:
            if "step" in group:  # apex counts per group
                group["step"] = int(count)
