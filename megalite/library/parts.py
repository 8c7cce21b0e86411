"""Layers cut over the stages of a placement: what each stage holds, in which shapes things cross, what it weighs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megalite.comm import TensorSpec
from megalite.engine import Ties
from megalite.gradient import WeightGradQueue
from megalite.library.cutting import Boundary, Ranges, Tensors, crossings, cut
from megalite.library.given import OPERATIONS
from megalite.library.modules import LossFunction, StageModule, count_calls, split_backwards
from megalite.library.names import Names
from megalite.parallel.pipeline import Stage, stage_type
from megalite.parallel.tiers import ActivationOffload, Mover, SavedTensors
from megalite.schedule import Program, StageKey


class Parts:
    """The list of layers, the same on all ranks, and those of this rank's stages.

    example: what the first layer takes; its shape is every micro-batch's. device: where stages compute.
    balance, sizes: as in `Pipeline`.

    cuts: the layers of each stage. found: what leaves each layer, its operations and parameters.
    names: of all their parameters. tied: names of those that several stages hold; ties: with the ranks that hold them.
    mover: copies between device and host.
    held: this rank's stages as they are made, in their first weight version. stages: in that order.
    Raises ConfigError.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        example: Tensors,
        program: Program,
        device: torch.device,
        *,
        balance: str | Sequence[float] = OPERATIONS,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.layers, self.program, self.device = list(layers), program, device
        placement = program.placement
        self.mover = Mover(device)
        self._calls: Counter[int] = Counter()
        counting = count_calls(layers, self._calls)
        self.found = crossings(layers, example, device)
        for handle in counting:
            handle.remove()
        if isinstance(balance, str):
            costs = [layer.flops if balance == OPERATIONS else float(layer.parameters) for layer in self.found]
        else:
            costs = list(balance)
        self.cuts, self.names = cut(placement, costs, sizes), Names(layers)
        self.tied, stages = self.names.tied(self.cuts)
        ranks = sorted({placement.rank_of(s, replica) for s in stages for replica in range(placement.num_replicas)})
        self.ties = Ties(self.tied, ranks, (min(stages), 0)) if stages else Ties()
        self.given = Boundary(tuple(TensorSpec(tuple(x.shape), x.dtype, device) for x in example))
        self.held: dict[StageKey, StageModule] = {}
        self.stages: list[Stage] = []
        self._saved = SavedTensors(self.mover)
        self._taken: set[int] = set()  # parameters of these stages

    def stage(
        self, key: StageKey, loss: LossFunction, ranges: Ranges, kind: type[StageModule], offloaded: int
    ) -> tuple[Stage, list[StageModule]]:
        """A stage of this rank and its modules, one for each weight version of the program. What learns is apart in
        each version; everything else is one. offloaded: first layers, whose activations wait on the host."""
        items, queue = self.cuts[key[0]], WeightGradQueue()
        versions = self.program.weight_versions[self.program.placement.rank_of(*key)]
        given = {index: self.layers[index] for index in items}
        shared = {i: layer for i, layer in given.items() if any(id(p) in self._taken for p in layer.parameters())}
        kept = [p for index in given.keys() - shared for p in given[index].parameters()]
        own = given | self.names.copied(shared, {id(p): p for p in kept})
        own = {index: layer.to(self.device) for index, layer in own.items()}
        self._taken |= {id(p) for layer in own.values() for p in layer.parameters()}
        more = [self._version(own) for _ in range(versions - 1)]  # before their forwards are replaced
        first, last = key[0] == 0, key[0] == self.program.placement.num_stages - 1
        arrives = self.found[items.start - 1].boundary if items.start else self.given
        leaves = self.found[items.stop - 1].boundary
        begins = {0, *(begin for begin, _, again in ranges if again)}
        copies = frozenset(begin for begin in begins if self.found[items.start + begin].writes)
        modules = []
        for layers in ([*each.values()] for each in [own, *more]):
            module = kind(layers, loss if last else None, arrives, leaves, items.start, copies=copies, ranges=ranges)
            split_backwards(module, queue, self.device, self._calls)
            module.trained = self._trained(module)
            if offloaded:
                ActivationOffload(list(module.layers[:offloaded]), self._saved)
            modules.append(module)
        self.held[key] = modules[0]
        make = stage_type(self.program, key, self.stages, self.mover)
        spec, out_spec = arrives.message, leaves.message
        self.stages.append(make(modules, queue, spec=spec, out_spec=out_spec, is_first=first, is_last=last))
        return self.stages[-1], modules

    def _trained(self, module: StageModule) -> list[tuple[str, nn.Parameter]]:
        """Tied ones come first, in an order that is the same on all stages: their gradients are summed together."""
        found = dict.fromkeys(p for layer in module.layers for p in layer.parameters() if p.requires_grad)
        named = [(self.names.of(parameter), parameter) for parameter in found]
        return sorted(named, key=lambda pair: (pair[0] not in self.tied, pair[0] if pair[0] in self.tied else ""))

    def _version(self, own: dict[int, nn.Module]) -> dict[int, nn.Module]:
        """The layers with other parameters to train, and with all other tensors that they have."""
        tensors = [tensor for layer in own.values() for tensor in [*layer.parameters(), *layer.buffers()]]
        memo: dict[int, Any] = {id(t): t for t in tensors if not (isinstance(t, nn.Parameter) and t.requires_grad)}
        copies = self.names.copied(own, memo)
        self._calls.update({id(memo[old]): count for old, count in [*self._calls.items()] if old in memo})
        return copies
