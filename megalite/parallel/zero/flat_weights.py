"""The parameters of one family in flat, contiguous memory, bucket after bucket.

Every parameter becomes a view of a flat compute buffer and shares its version counter. So an update in place between a
forward and its backward is an error that autograd reports, not a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megalite.comm import FamilyAxes
from megalite.inventory import ParameterRange
from megalite.parallel.zero.bucket import Bucket
from megalite.parallel.zero.options import Fill, ZeroOptions
from megalite.parallel.zero.rank_memory import RankMemory
from megalite.parallel.zero.rounded_weights import RoundedWeights
from megalite.parallel.zero.unshard import ComingWeights
from megalite.schedule import StageKey


class FlatWeights:
    """Owns the memory of a family's parameters; gathers and frees the parts that other ranks own.

    versions: for each weight version the parameters in forward order, of `dtype`.
    fill: initialises parameters that came without memory ('meta') once they have memory: bucket after bucket, so that
        sharded weights are never whole on a rank.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        versions: Sequence[Sequence[nn.Parameter]],
        *,
        axes: FamilyAxes,
        options: ZeroOptions,
        memory: RankMemory,
        fill: Fill | None,
        dtype: torch.dtype,
    ) -> None:
        self._buckets, self._axes, self._axis, self._options = buckets, axes, axes.shard, options
        self._memory, self._fill, self._dtype = memory, fill, dtype
        self.unsharder = memory.unsharder
        self._cut = options.stage == 3 and axes.shard.size > 1  # other ranks have the rest of each bucket
        self._together = 0 if self._cut or not buckets else buckets[-1].plan.stop  # elements of one tensor
        self._of_parameter: dict[int, ComingWeights] = {}
        self._gathered: list[ComingWeights] = []
        self._attached = False
        for parameters in versions:
            self._flatten(parameters)

    def _flatten(self, parameters: Sequence[nn.Parameter]) -> None:
        """Moves one version into flat memory: one tensor, or in stage 3 one per bucket, which is gathered and freed."""
        flat = self._zeros(self._together)
        for bucket in self._buckets:
            plan = bucket.plan
            full = self._zeros(bucket.numel) if self._cut else flat[plan.start : plan.stop]
            for range_ in plan.ranges:
                self._move(parameters, range_, full[range_.start - plan.start : range_.stop - plan.start])
            weights = self._options.weights(full, bucket.owned, axes=self._axes, plan=plan)
            if self._cut and any(hasattr(parameters[range_.entry.index], "float8") for range_ in plan.ranges):
                weights = RoundedWeights(weights, plan, parameters)
            weights.free()
            bucket.weights.append(weights)
            self._gathered.append(weights)
            self._of_parameter.update({id(parameters[range_.entry.index]): weights for range_ in plan.ranges})

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self._dtype, device=self._memory.device)

    def _move(self, parameters: Sequence[nn.Parameter], range_: ParameterRange, flat: Tensor) -> None:
        """Turns a parameter into a view of `flat`; fills it, if it had no memory."""
        parameter = parameters[range_.entry.index]
        empty = parameter.is_meta
        move_parameter(parameter, flat)
        if empty and self._fill is not None:
            self._fill(range_.entry.name, parameter)

    def attach(self, layers: Sequence[nn.Module], *others: FlatWeights, stage: StageKey = (0, 0)) -> None:
        """Hooks the stage's layers (forward order; once per weight version), so that weights are gathered before use.

        Needed for stage 3, and for stages 1 and 2 if gathers overlap the next forward. others: the weights of the
        stage's other families. stage: which one it is, in a plan.
        """
        families = (self, *others)
        known = {key: weights for family in families for key, weights in family._of_parameter.items()}
        used = [dict.fromkeys(known[id(p)] for p in layer.parameters() if id(p) in known) for layer in layers]
        self.unsharder.attach(layers, [list(weights) for weights in used], stage)
        for family in families:
            family._attached = True

    def gather(self, version: int = 0) -> None:
        """Gathers every rank's slice of the updated weights (stages 1 and 2); in stage 3 frees the old ones."""
        overlap = self._options.overlap_param_gather and self._attached
        for bucket in reversed(self._buckets):  # the first layers are needed first
            bucket.weights_of(version).updated(async_op=overlap)

    def wait(self) -> None:
        """Returns when no gather is in flight, so that parameters may be read and slices written outside of layers."""
        for weights in self.coming:
            weights.wait()

    @property
    def coming(self) -> Iterator[ComingWeights]:
        """Weights that are gathered, or come from the host; the first layers first."""
        return reversed(self._gathered)

    def unshard(self) -> None:
        """Gathers all weights and keeps them until `reshard` (breadth-first schedules: once per chunk and batch)."""
        for weights in self.coming:
            weights.pinned = True
            if not weights.resident:
                weights.start_gather(async_op=False)
            weights.wait()

    def reshard(self) -> None:
        """Ends `unshard`."""
        for weights in self.coming:
            weights.pinned = False
            weights.free()
        self.unsharder.free_all()


@torch.no_grad()
def move_parameter(parameter: nn.Parameter, flat: Tensor) -> None:
    """Turns the parameter, which stays the same object, into a view of `flat`, with its values and the version counter
    of `flat`."""
    if not parameter.is_meta:
        flat.copy_(parameter.reshape(-1))
    view = nn.Parameter(flat.view(parameter.shape), requires_grad=parameter.requires_grad)
    view.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, view)
