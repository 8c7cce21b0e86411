"""The update rule over masters and moments on the device of their gradients.

    gradient --scale--> rule.step()

A step is `begin_step`, `rule.step()`, `end_step`. `host_optimizer.py` has those of masters that are elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from megalite.comm import Statistic
from megalite.parallel.zero.master_shards import (
    BucketParameter,
    MakeOptimizer,
    MasterShard,
    bucket_parameters,
    make_param_groups,
)


class SteppedOptimizer(Protocol):
    """An update rule as a step needs it, ours or a `torch.optim.Optimizer` (see `optim.UpdateRule`; a torch
    optimizer that does not know the last three ignores them)."""

    param_groups: list[dict[str, Any]]
    found_inf: Tensor | None
    grad_scale: Tensor | None
    steps: int

    @property
    def state(self) -> Mapping[Tensor, Any]: ...

    def step(self) -> Any: ...


def known(number: float | Tensor | None) -> float | None:
    """A number that the host knows, else None: it would have to wait for one on a device."""
    if isinstance(number, Tensor):
        return float(number.numpy()) if number.device.type == "cpu" else None
    return number


class DeviceOptimizer:
    """Masters on the device of their gradients."""

    def __init__(self, masters: Sequence[MasterShard], make_optimizer: MakeOptimizer) -> None:
        self.masters = masters
        self.parameters = bucket_parameters(masters)
        self.rule: SteppedOptimizer = make_optimizer(make_param_groups(masters, self.parameters))

    def fetch_gradients(self, **numbers: Any) -> None:
        """Starts to copy the gradients, and the tensors among the arguments of `begin_step`, to the masters' device."""

    def begin_step(
        self,
        *,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        grad_scale: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        """Sets the rule's learning rate and weight decay, and every master's `.grad` to `grad_scale` x gradient.

        weight_decay: of groups that decay. decoupled_lr: of those that are `decoupled`; None: `lr`.
        grad_scale: clip coefficient / loss scale.
        found_inf: 0-dim, on the device; 1 leaves masters and moments as they are.
        steps: number of steps taken before this one.
        """
        own = lr if decoupled_lr is None else decoupled_lr
        for group in self.rule.param_groups:
            rates = group["rates"]
            group["lr"] = (own if rates.decoupled else lr) * rates.lr
            group["weight_decay"] = weight_decay * rates.decay if group["decay"] else 0.0
        self.rule.found_inf, self.rule.steps = None if known(found_inf) == 0.0 else found_inf, steps
        if isinstance(grad_scale, Tensor) and getattr(self.rule, "divides", False):
            self.rule.grad_scale, grad_scale = grad_scale.reciprocal().float(), 1.0
        scales = known(grad_scale) != 1.0
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

    def write_weights(self, version: int, *, as_masters: bool = False) -> None:
        """Masters -> compute weights. The rule may correct them for delayed gradients, unless `as_masters`."""
        for master in self.masters:
            self._write(master, version, as_masters=as_masters)

    def _write(self, master: MasterShard, version: int, *, as_masters: bool) -> None:
        target = master.weights(version)
        if target.data_ptr() == master.tensor.data_ptr():
            return
        write = None if as_masters else getattr(self.rule, "write_compute_weights", None)
        if write is None:
            target.copy_(master.tensor, non_blocking=True)
        else:
            write(master.tensor, target)

    def finish_writes(self) -> None:
        """Returns when the device's next work finds what `write_weights` has written."""

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
        return master.gradient.to(master.tensor.device)
