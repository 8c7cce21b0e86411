"""One optimizer over the slices that this rank owns.

    reduced gradient --scale--> update of the fp32 masters --cast--> compute weights of one version --all-gather--> all

There is one master per element; the compute weights are the masters where they have the main dtype and one version.
The update rule sees a few long flat tensors, so any `torch.optim.Optimizer` with an elementwise update works.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.comm import Axis, Handle, TensorShard, all_gather_into
from megalite.gradient import sum_of_squares
from megalite.parallel.zero.bucket import Bucket
from megalite.parallel.zero.host_optimizer import make_sub_optimizers
from megalite.parallel.zero.master_shards import MakeOptimizer, MasterShard, cut_master_shards
from megalite.parallel.zero.parameter_buffers import ParameterBuffers
from megalite.parallel.zero.sub_optimizers import DeviceOptimizer


@dataclass(frozen=True)
class PendingNorm:
    """A global norm in flight.

    squares: the sums of squares, `[ranks of the norm axis]`.
    work: the all-gather that fills `squares`.
    num_shards, stride: size of the shard axis, and the distance of its neighbours on the norm axis. Sums run over the
        shards first, then over everything else, so that their order is the same at every ZeRO stage.
    """

    squares: Tensor
    work: Handle
    num_shards: int
    stride: int

    def wait(self) -> Tensor:
        """The norm (fp64, 0-dim)."""
        self.work.wait()
        return _sum(_sum(self.squares.view(-1, self.num_shards, self.stride), 1).flatten(), 0).sqrt()


def _sum(x: Tensor, dim: int) -> Tensor:
    """The sum along `dim`, accumulated one by one from the last element."""
    return x.flip(dim).cumsum(dim).select(dim, -1)


class ShardedOptimizer:
    """Any optimizer, any ZeRO stage.

    buffers: of this rank's stages (model chunks), family by family.
    make_optimizer: builds the update rule from parameter groups (see `ParamGroup`).
    norm_axis: all ranks that hold parts of one copy of the model and its optimizer state, over which the norm is
        summed; it consists of whole axes of every family.
    offload_fraction: part of the masters and moments that is kept and updated in host memory (ZeRO-Offload, arXiv
        2101.06840).
    offload_path: a folder; of that part `file_fraction` (None: all) is in a file there (ZeRO-Infinity, arXiv
        2104.07857).
    store_param_remainders: store the masters of bf16 weights as the 16 bits that the weights lack (exact).
    """

    def __init__(
        self,
        buffers: Sequence[ParameterBuffers],
        *,
        make_optimizer: MakeOptimizer,
        norm_axis: Axis,
        offload_fraction: float = 0.0,
        offload_path: str | None = None,
        file_fraction: float | None = None,
        store_param_remainders: bool = False,
    ) -> None:
        self.buffers = list(buffers)
        self.norm_axis = norm_axis
        places = self.buffers[:1] if offload_path is not None else ()
        self.file = next((each.rank_memory.mover.file_in(str(offload_path)) for each in places), None)
        filed = 0.0 if self.file is None else offload_fraction if file_fraction is None else file_fraction
        how = offload_fraction, store_param_remainders, self.file, filed
        self.masters = [master for family in self.buffers for master in cut_master_shards(family, *how)]
        self.sub_optimizers = make_sub_optimizers(self.masters, make_optimizer)
        self._sub_optimizer_of = {id(m): sub for sub in self.sub_optimizers for m in sub.masters}
        self._counted = [m for m in self.masters if self._counts(m)]
        self._steps = 0
        self.step_count = torch.zeros((), dtype=torch.float32)
        # The optimizer allocates its moments, for a checkpoint to be loaded into: a step with zero gradients and
        # learning rate 0 leaves every weight as it is and every moment zero.
        self._fetch_gradients({})
        self._update(self.sub_optimizers, {"lr": 0.0, "weight_decay": 0.0, "steps": -1})
        self._set_step_count(0.0)
        for family in self.buffers:
            family.gradients.begin_batch()

    # ---- memory ------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes of master weights (if they are not the compute weights) and of optimizer state on the device, and of
        both off it (`offloaded`): in host memory, or in the file (`file`)."""
        weights = {m.bucket.weights[0].shard.untyped_storage()._cdata for m in self.masters}
        held = {"master": 0, "state": 0, "offloaded": 0, "file": 0}
        for master in self.masters:
            moments = sum(t.nbytes for t in self._moments(master).values())
            if master.offloaded:
                held["offloaded"] += master.tensor.nbytes + moments
                held["file"] += (master.tensor.nbytes + moments) * (master.file is not None)
                continue
            held["state"] += moments
            if master.remainders is not None:
                held["master"] += 2 * master.tensor.numel()
            elif master.tensor.untyped_storage()._cdata not in weights:
                held["master"] += master.tensor.nbytes
        for sub in self.sub_optimizers:
            beside = sum(statistic.values.nbytes for statistic, _ in sub.statistics())
            beside += sum(values.nbytes for values in getattr(sub.rule, "scratch", ()))
            held["offloaded" if sub.masters[0].offloaded else "state"] += beside
            held["file"] += beside * (sub.masters[0].file is not None)
        return held

    def _moments(self, master: MasterShard) -> dict[str, Tensor]:
        return self._sub_optimizer_of[id(master)].moments(master)

    # ---- step --------------------------------------------------------------------------------------------------------

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the reduced gradients (fp64, 0-dim), each element of the model counted once; the same on
        every rank, and not finite if any gradient of any rank is not."""
        return self.start_grad_norm().wait()

    def start_grad_norm(self) -> PendingNorm:
        """Sends this rank's share of `grad_norm`; `wait` returns the norm. Gradients may be scaled in between."""
        total = self.squares(self.buffers[0].device if self.buffers else torch.device("cpu"))
        squares = total.new_empty(self.norm_axis.size)
        work = all_gather_into(squares, total, self.norm_axis, async_op=True)
        num_shards, stride = 1, 1
        shard = self.buffers[0].axes.shard if self.buffers and self.norm_axis.even else None
        if shard is not None and shard.size > 1 and _within(shard, self.norm_axis):
            first, second, *_ = (self.norm_axis.ranks.index(rank) for rank in shard.ranks)
            num_shards, stride = shard.size, second - first
        return PendingNorm(squares, work, num_shards, stride)

    def squares(self, device: torch.device) -> Tensor:
        """Sum of squares of the gradients that this rank counts, fp64 `[1]`."""
        gradients = [master.gradient for master in self._counted]
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for where in dict.fromkeys(gradient.device for gradient in gradients):
            total += sum_of_squares([g for g in gradients if g.device == where]).to(device)
        return total

    def _counts(self, master: MasterShard) -> bool:
        """Whether this rank counts the gradient: of the ranks on the norm axis that hold it, the first one does."""
        buffers = master.buffers
        if buffers.pipeline_stage.replica or (master.bucket.plan.tied and not buffers.pipeline_stage.counts_tied):
            return False
        alike = buffers.axes.alike(master.segment.kind.sharded, everywhere=not buffers.options.stage)
        return all(axis.is_first for axis in alike if _within(axis, self.norm_axis))

    @torch.no_grad()
    def step(self, *, version: int = 0, **numbers: Any) -> None:
        """Updates the masters with `grad_scale` x gradient, and writes them into the compute weights of `version`, the
        number of updates that these have seen then.

        numbers: arguments of `DeviceOptimizer.begin_step`. After `found_inf`, `count_step` comes before the next step.
        """
        self.wait_for_weights()  # an all-gather that no forward has waited for may still read them
        self._fetch_gradients(numbers)  # copies to the host overlap the device's update, which comes first
        self._update(self.sub_optimizers, numbers | {"steps": self._steps}, version)
        if numbers.get("found_inf") is None:
            self.count_step(skipped=False)
        self._gather(version)

    def finish_step(self) -> None:
        """Waits for what `step` has left unfinished: nothing, unless updates are delayed."""

    def count_step(self, *, skipped: bool) -> None:
        """Counts the latest step, unless it was skipped."""
        self._steps += not skipped
        self.step_count.fill_(self._steps)

    def _fetch_gradients(self, numbers: dict[str, Any]) -> None:
        for sub in self.sub_optimizers:
            sub.fetch_gradients(**numbers)

    def _update(self, subs: Sequence[DeviceOptimizer], numbers: dict[str, Any], version: int | None = None) -> None:
        for sub in subs:
            sub.begin_step(**numbers)
            if sub.takes_step():
                sub.rule.step()
                if hasattr(sub.rule, "average"):
                    sub.rule.average(numbers["steps"])
            sub.end_step()
            if version is not None:
                sub.write_weights(version)

    def close(self) -> None:
        """Removes the file of masters and moments, if there is one. Local."""
        if self.file is not None:
            self.file.close()

    @torch.no_grad()
    def write_weights(self, version: int = 0, *, as_masters: bool = False) -> None:
        """Masters -> compute weights of one version, on every rank. The rule may correct them for delayed gradients,
        unless `as_masters`."""
        for sub in self.sub_optimizers:
            sub.write_weights(version, as_masters=as_masters)
        self._gather(version)

    def _gather(self, version: int) -> None:
        for sub in self.sub_optimizers:
            sub.finish_writes()
        for buffers in (family for family in self.buffers if not family.frozen):
            buffers.weights.gather(version)

    def wait_for_weights(self) -> None:
        """Returns when no gather is in flight, which may still read what the masters are written into."""
        for buffers in self.buffers:
            buffers.weights.wait()

    @contextmanager
    def masters_as_weights(self, version: int) -> Iterator[None]:
        """Within the context, the compute weights of `version` are uncorrected copies of the masters."""
        corrects = any(sub.corrects for sub in self.sub_optimizers)
        if corrects:
            self.wait_for_weights()
            self.write_weights(version, as_masters=True)
        yield
        if corrects:
            self.wait_for_weights()
            self.write_weights(version)

    # ---- checkpoint --------------------------------------------------------------------------------------------------

    def shards(self) -> list[TensorShard]:
        """Masters (`<name>`), moments (`optimizer/<moment>/<name>`) and the step count (`optimizer/step`), as views of
        rectangles, through which a checkpoint is loaded; then call `after_load`."""
        shards: list[TensorShard] = []
        for master in self.masters:
            replica = self._replica(master)
            master.join()  # until the next step or `after_load`
            shards += master.shards("", master.tensor, replica)
            for name, value in self._moments(master).items():
                shards += master.shards(f"optimizer/{name}/", value, replica)
        for sub in self.sub_optimizers:
            for statistic, where in sub.statistics():
                everywhere = not (statistic.whole and where.buffers.options.stage)
                replica = replica_of(where.buffers, where.bucket, statistic.sharded, everywhere=everywhere)
                shards.append(statistic.shard(where.parameter, replica))
        return [
            *shards,
            TensorShard("optimizer/step", (), (), self.step_count, self.norm_axis.ranks[self.norm_axis.rank]),
        ]

    def version_shards(self, version: int, prefix: str) -> list[TensorShard]:
        """The owned compute weights of a version as `<prefix><name>`: an asynchronous schedule still needs them."""
        return [
            shard
            for master in self.masters
            for shard in master.shards(prefix, master.weights(version), self._replica(master))
        ]

    def after_load(self, version: int = 0) -> None:
        """Refreshes step counters and the compute weights of `version` after values were written through `shards`.
        (After a step without a forward, call `weights.wait` of the buffers before writing.)"""
        self._set_step_count(float(self.step_count))
        self.write_weights(version)

    def _replica(self, master: MasterShard) -> int:
        buffers = master.buffers
        return replica_of(buffers, master.bucket, master.segment.kind.sharded, everywhere=not buffers.options.stage)

    def _set_step_count(self, count: float) -> None:
        self._steps = int(count)
        self.step_count.fill_(count)
        for sub in self.sub_optimizers:
            sub.set_step_count(count)


def replica_of(buffers: ParameterBuffers, bucket: Bucket, sharded: frozenset[str], *, everywhere: bool) -> int:
    """Which copy of a tensor this rank holds; copy 0 is the one that checkpoints write.

    sharded: the axes that cut the tensor.
    everywhere: whether every rank of the shard axis holds it.
    """
    copies, stage = 0, buffers.pipeline_stage
    for axis in buffers.axes.alike(sharded, everywhere=everywhere):
        copies = copies * axis.size + axis.rank
    return copies + (bucket.plan.tied and not stage.counts_tied) + stage.replica


def _within(axis: Axis, other: Axis) -> bool:
    return set(axis.ranks) <= set(other.ranks)
