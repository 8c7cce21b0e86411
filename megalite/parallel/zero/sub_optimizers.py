"""Sub-optimizers: each applies the update rule to masters and moments that are stored in the same way.

    DeviceOptimizer       gradient ------------------------> rule.step()
    RemainderOptimizer    weights, 16 bits --> masters ----> rule.step() ----> weights, 16 bits      a bucket at a time
    HostOptimizer         gradient --copy to the host -----> rule.step()                             a bucket at a time

A step of each is `begin_step`, `rule.step()`, `end_step`. Copies to the host run on a stream of their own, so that they
overlap the device's update.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.comm import Statistic
from megalite.parallel.zero.master_shards import MasterShard
from megalite.parallel.zero.param_groups import BucketParameter, MakeOptimizer, bucket_parameters, make_param_groups


class SteppedOptimizer(Protocol):
    """What a step needs of an update rule, ours or a `torch.optim.Optimizer` (see `optim.UpdateRule`; a torch
    optimizer that does not know the last three ignores them)."""

    param_groups: list[dict[str, Any]]
    found_inf: Tensor | None
    grad_scale: Tensor | None
    steps: int

    @property
    def state(self) -> Mapping[Tensor, Any]: ...

    def step(self) -> Any: ...


def is_one(scale: float | Tensor) -> bool:
    """Whether a factor is known to be 1. A tensor on a device is not read: the host would have to wait for it."""
    if isinstance(scale, Tensor):
        return scale.device.type == "cpu" and bool(scale.numpy() == 1.0)
    return scale == 1.0


def is_zero(found_inf: Tensor) -> bool:
    """Whether a step is known to be taken; a device is not asked."""
    return found_inf.device.type == "cpu" and bool(found_inf.numpy() == 0.0)


def host_scalar(value: Any) -> Any:
    """Starts an asynchronous copy of a tensor to page-locked memory and returns it; other values are returned as is."""
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value, non_blocking=True)


class DeviceOptimizer:
    """Masters on the device of their gradients."""

    def __init__(self, masters: Sequence[MasterShard], make_optimizer: MakeOptimizer) -> None:
        self.masters = masters
        self.parameters = bucket_parameters(masters)
        self.rule: SteppedOptimizer = make_optimizer(make_param_groups(masters, self.parameters))

    def fetch_gradients(self, grad_scale: float | Tensor = 1.0, found_inf: Tensor | None = None) -> None:
        """Starts to copy the gradients, and these arguments of `begin_step`, to the masters' device."""

    def begin_step(
        self,
        *,
        lr: float,
        weight_decay: float,
        grad_scale: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        """Sets the rule's learning rate and weight decay, and every master's `.grad` to `grad_scale` x gradient.

        steps: number of steps taken before this one.
        """
        for group in self.rule.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        taken = found_inf is not None and is_zero(found_inf)
        self.rule.found_inf, self.rule.steps = None if taken else found_inf, steps
        if isinstance(grad_scale, Tensor) and getattr(self.rule, "divides", False):
            self.rule.grad_scale, grad_scale = grad_scale.reciprocal().float(), 1.0
        scales = not is_one(grad_scale)
        for master in self.masters:
            gradient = self._gradient(master)
            if scales:
                gradient.mul_(grad_scale)
            master.tensor.grad = gradient.to(master.tensor.dtype)

    def takes_step(self) -> bool:
        """Whether to call the rule. If the rule cannot skip a step on the device, the host waits for the decision."""
        knows = getattr(self.rule, "_step_supports_amp_scaling", False)
        return self.rule.found_inf is None or knows or not self.rule.found_inf.item()

    def end_step(self) -> None:
        """Forgets the gradients."""
        for master in self.masters:
            master.tensor.grad = None
        self.rule.found_inf = self.rule.grad_scale = None

    @property
    def corrects(self) -> bool:
        """Whether compute weights are more than copies of the masters (the rule corrects for delayed gradients)."""
        return hasattr(self.rule, "write_compute_weights")

    def write_weights(self, master: MasterShard, version: int, *, as_masters: bool) -> None:
        """Master -> compute weights. The rule may correct them for delayed gradients, unless `as_masters`."""
        target = master.weights(version)
        if target.data_ptr() == master.tensor.data_ptr():
            return
        write = None if as_masters else getattr(self.rule, "write_compute_weights", None)
        if write is None:
            target.copy_(master.tensor, non_blocking=True)
        else:
            write(master.tensor, target)

    def moments(self, master: MasterShard) -> dict[str, Tensor]:
        """The rule's tensors with one value per element of the master."""
        state = self.rule.state[master.tensor] if master.tensor in self.rule.state else {}
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step" and value.numel() == master.tensor.numel()
        }

    def statistics(self) -> Iterator[tuple[Statistic, BucketParameter]]:
        """State that is not one number per element: tensors of the rule that all ranks of the shard axis hold."""
        if hasattr(self.rule, "statistics"):
            for statistic in self.rule.statistics():
                yield statistic, self.parameters[statistic.parameter]

    def set_step_count(self, count: float) -> None:
        """Sets the number of steps that the rule has made."""
        for state in self.rule.state.values():
            if "step" in state:
                state["step"] = state["step"].fill_(count) if isinstance(state["step"], Tensor) else count
        for group in self.rule.param_groups:
            if "step" in group:  # apex counts per group
                group["step"] = int(count)

    def _gradient(self, master: MasterShard) -> Tensor:
        """The gradient on the master's device, in any float dtype; it may be overwritten."""
        return master.gradient


class HostOptimizer(DeviceOptimizer):
    """Masters and moments of one bucket in host memory."""

    def __init__(self, masters: Sequence[MasterShard], make_optimizer: MakeOptimizer) -> None:
        super().__init__(masters, make_optimizer)
        device = masters[0].buffers.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: Any = None
        self._received: dict[int, Tensor] = {}
        self._staging: dict[int, Tensor] = {}
        self._numbers: dict[str, Any] = {}

    def fetch_gradients(self, grad_scale: float | Tensor = 1.0, found_inf: Tensor | None = None) -> None:
        # A gradient that is not in memory is allocated here: inside the `with` it would belong to the other stream.
        sources = [master.gradient for master in self.masters]
        numbers = {"grad_scale": grad_scale, "found_inf": found_inf}
        if self._stream is None:
            self._copy(sources)
            self._numbers = numbers
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(sources)
            self._numbers = {name: host_scalar(value) for name, value in numbers.items()}
            self._arrived = self._stream.record_event()

    def begin_step(self, **numbers: Any) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()
        super().begin_step(**numbers | self._numbers)

    def end_step(self) -> None:
        super().end_step()
        if self._stream is None:
            self._received.clear()

    def write_weights(self, master: MasterShard, version: int, *, as_masters: bool) -> None:
        """Casts into a page-locked staging buffer, which is copied to the device asynchronously. The next step's
        gradients are queued behind that copy, so the buffer is free before it is overwritten."""
        target = master.weights(version)
        if not target.is_cuda or self.corrects:
            super().write_weights(master, version, as_masters=as_masters)
            return
        if id(master) not in self._staging:
            self._staging[id(master)] = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        target.copy_(self._staging[id(master)].copy_(master.tensor), non_blocking=True)

    def _gradient(self, master: MasterShard) -> Tensor:
        return self._received[id(master)]

    def _copy(self, sources: Sequence[Tensor]) -> None:
        for master, source in zip(self.masters, sources, strict=True):
            if id(master) not in self._received:
                pinned = source.is_cuda
                self._received[id(master)] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            self._received[id(master)].copy_(source, non_blocking=True)


class RemainderOptimizer(DeviceOptimizer):
    """Masters of one bucket, joined from weights and remainders for the step only (`ParamRemainders`)."""

    def begin_step(self, **numbers: Any) -> None:
        self.masters[0].join()
        super().begin_step(**numbers)

    def end_step(self) -> None:
        super().end_step()
        self.masters[0].split()


def make_sub_optimizers(masters: Sequence[MasterShard], make_optimizer: MakeOptimizer) -> list[DeviceOptimizer]:
    """The sub-optimizers in the order in which they step, those on the device before those on the host.

    On the device there is one per family and dtype, or one per bucket if something exists only for the step (joined
    masters, widened gradients); on the host there is one per bucket.
    """
    groups: dict[tuple[int, type[DeviceOptimizer], Hashable], list[MasterShard]] = {}
    for master in masters:
        groups.setdefault(_place(master), []).append(master)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [kind(group, make_optimizer) for (_, kind, _), group in ordered]


def _place(master: MasterShard) -> tuple[int, type[DeviceOptimizer], Hashable]:
    """(Order of the step, class, group) of the sub-optimizer that a master belongs to."""
    if master.offloaded:
        return 3, HostOptimizer, id(master.bucket)
    if master.remainders is not None:
        return 2, RemainderOptimizer, id(master.bucket)
    if master.bucket.gradient_dtype != master.tensor.dtype:
        return 1, DeviceOptimizer, id(master.bucket)
    return 0, DeviceOptimizer, (master.buffers.axes.name, master.tensor.dtype)
