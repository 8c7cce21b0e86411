"""Time of collectives: alpha-beta over the topology. Which ranks hold the same parameters, and so talk to each other.

A group of n ranks with stride k (tensor 1, data t, pipeline t*d: the order of ranks) has g = min(n, node/k) members in
a node. Inside a node a ring runs at the link of a device; over nodes it may use the network of its g members there, and
the other groups of the node use theirs: no link is shared. A ring pays its latency n times, a tree log2(nodes) times;
the faster one counts, as the libraries choose. Inside a node a profile's measured rates come first.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megalite.config import Config
from megalite.inventory import ElementBytes, Parameter, bucket_limit, stage_parameters
from megalite.planner.hardware import Hardware, Link


@dataclass(frozen=True)
class CommGroup:
    """`size` ranks, neighbours `stride` apart in the order of ranks."""

    hardware: Hardware
    size: int
    stride: int = 1

    @cached_property
    def per_node(self) -> int:
        """Members in one node."""
        return max(1, min(self.size, self.hardware.devices_per_node // self.stride))

    @cached_property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)

    @property
    def link(self) -> Link:
        """That of its slowest message."""
        return self.hardware.intra_node if self.nodes == 1 else self.hardware.inter_node

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a ring."""
        inside, between = self.hardware.intra_node.bandwidth, self.hardware.inter_node.bandwidth
        return inside if self.nodes == 1 else min(inside, self.per_node * between)

    def _ring_latency(self) -> float:
        inside, between = self.hardware.intra_node.latency, self.hardware.inter_node.latency
        return (self.size - self.nodes) * inside + (self.nodes if self.nodes > 1 else 0) * between

    def _tree_latency(self) -> float:
        inside, between = self.hardware.intra_node.latency, self.hardware.inter_node.latency
        return (self.per_node - 1) * inside + math.ceil(math.log2(max(1, self.nodes))) * between

    def _seconds(self, operation: str, nbytes: float, modelled: float, messages: int = 1) -> float:
        """What a profile found inside a node, else `modelled`. nbytes: what one rank sends."""
        if self.size == 1 or nbytes == 0:
            return 0.0
        link = self.hardware.measured.get(operation) if self.nodes == 1 else None
        return messages * link.latency + nbytes / link.bandwidth if link is not None else modelled

    def gather(self, nbytes: float, messages: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter of whole tensors of `nbytes` together, in so many messages."""
        sent = nbytes * (self.size - 1) / self.size
        return self._seconds("gather", sent, messages * self._ring_latency() + sent / self.bandwidth, messages)

    def all_reduce(self, nbytes: float, messages: int = 1) -> float:
        """Seconds of an all-reduce of `nbytes`, in so many messages."""
        sent = 2 * nbytes * (self.size - 1) / self.size
        ring = 2 * messages * self._ring_latency() + sent / self.bandwidth
        tree = 2 * messages * self._tree_latency() + 2 * nbytes / self.bandwidth
        return self._seconds("all_reduce", sent, min(ring, tree), messages)

    def exchange(self, nbytes: float) -> float:
        """Seconds in which each rank sends `nbytes` to the others together."""
        return self.gather(nbytes * self.size / (self.size - 1)) if self.size > 1 else 0.0

    def all_to_all(self, nbytes: float) -> float:
        """Seconds in which each rank sends `nbytes` to the others together, as much to each: what stays in the node by
        the device's link, at the same time what leaves it by the device's own network card."""
        others = max(1, self.size - 1)
        inside = nbytes * (self.per_node - 1) / others / self.hardware.intra_node.bandwidth
        between = nbytes * (self.size - self.per_node) / others / self.hardware.inter_node.bandwidth
        return self._seconds("gather", nbytes, self._tree_latency() + max(inside, between))

    def send(self, nbytes: float) -> float:
        """Seconds of a message to the next member; the slowest of the hops counts."""
        return self._seconds("send", nbytes, self.link.latency + nbytes / self.link.bandwidth)


def held_parameters(config: Config, items: range) -> list[tuple[str, Parameter]]:
    """(Logical name, parameter) of a stage. Where all parameters are as wide as their masters, those that are wide in
    any case lie in one buffer with the others."""
    size, found = ElementBytes.of(config), stage_parameters(config.model, items)
    return [(name, replace(p, wide=p.wide and size.compute != size.wide)) for name, p in found]


def stage_elements(config: Config, items: range, family: str | None = None) -> int:
    """Parameters of a stage that a rank trains, or those of a family; of the family `frozen` those that it does not.
    items: indices into [embedding, block 0, ..., head]."""
    kinds = [("frozen" if p.frozen else p.family, p) for _, p in stage_parameters(config.model, items)]
    held = (p for kind, p in kinds if kind == family or (family is None and not p.frozen))
    return sum(math.prod(p.local(config.parallel)) for p in held)


class Copies(NamedTuple):
    """The ranks that hold the same parameters of a family, `stride` apart in the order of ranks, and sum their
    gradients; `shards` of them, one of `instances` times the same, share what ZeRO shards."""

    family: str
    ranks: int
    stride: int
    instances: int = 1

    @property
    def shards(self) -> int:
        return max(1, self.ranks // self.instances)

    def buckets(self, config: Config, elements: float, *, on_cpu: bool) -> int:
        """Messages that so many parameters of a rank take."""
        overlap = config.parallel.overlap_grad_reduce
        limit = bucket_limit(config.parallel.ddp_bucket_size, self.shards, on_cpu=on_cpu, overlap=overlap)
        return math.ceil(elements / limit) if limit else int(elements > 0)

    def owners(self, zero_stage: int) -> int:
        """Ranks among which the optimizer's states are divided."""
        return self.shards if zero_stage else 1


def families_of(config: Config, world_size: int) -> tuple[Copies, ...]:
    """The families of a model: of experts, which are cut over etp x ep, there are edp copies; of the rest dp x cp."""
    parallel, instances = config.parallel, config.parallel.num_distributed_optimizer_instances
    dense = config.gradient_ranks(world_size), parallel.tensor_model_parallel_size
    found = [Copies("dense", *dense, instances)]
    if config.model.lora.lora_rank is not None:
        found.append(Copies("adapter", *dense, instances))
    if config.model.experts.num_experts is not None:
        stride = parallel.expert_tensor_size * parallel.experts.expert_model_parallel_size
        found.append(Copies("expert", config.expert_copies(world_size), stride, instances))
    return tuple(found)


def shards_of(config: Config, world_size: int, family: str) -> int:
    """Ranks that share what ZeRO shards of a family."""
    copies = config.expert_copies(world_size) if family == "expert" else config.gradient_ranks(world_size)
    return max(1, copies // config.parallel.num_distributed_optimizer_instances)
