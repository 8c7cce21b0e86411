"""What a layout costs by the closed form of Gholami et al., "Integrated Model, Batch and Domain Parallelism in Training
Neural Networks" (arXiv 1712.04432): computation divided by the ranks, and a sum of messages for each way of dividing.

With t tensor-, c context- and d data-parallel ranks, n tokens of a rank and step, message times alpha + beta bytes and
nothing hidden (their equations 3 to 9, for transformers)::

    model    4 L_stage m (2 alpha ceil(log2 t) + 2 beta (t - 1) / t  n/m h e)      sums of activations, t ranks
    data     2 alpha ceil(log2 cd) + 2 beta (cd - 1) / cd  |W| / (t p) w           sum of gradients, c d ranks
    domain   L_stage m (hops alpha + beta (keys and values that travel))           c ranks; their halo of a convolution
    experts  4 L_sparse m (alpha (x - 1) + beta (x - 1) / x  n/m k h e)            x ranks of ep; k rows of a token

The halo of causal attention is everything before a token, so `domain` sends keys and values c - 1 times where a
convolution sends a few rows to each neighbour. Pipelines are not in the paper: their stages only divide the layers.
Nor are experts: their gradients are summed over the ranks that hold the same ones, and tokens of even loads travel to
the x ranks that share them and back, forward and backward: four all-to-alls, each as long as in the plan (over several
nodes by `CommGroup.all_to_all`).
"""

import math
from typing import NamedTuple

from megalite.config import Config
from megalite.inventory import ElementBytes, context_bytes, expert_rows, micro_tokens, model_layers, stage_layer_ranges
from megalite.planner.communication import CommGroup, families_of, stage_elements
from megalite.planner.hardware import Hardware
from megalite.planner.predict import program_of


class ClosedForm(NamedTuple):
    """Seconds of a step of the slowest pipeline rank, each dimension's messages in the open."""

    computation: float
    model: float
    data: float
    domain: float
    experts: float

    @property
    def total(self) -> float:
        return self.computation + sum(self[1:])

    @property
    def dominant(self) -> str:
        """The dimension whose messages take longest; "" where nothing is divided."""
        seconds, name = max(zip(self[1:], self._fields[1:], strict=True), key=lambda pair: pair[0])
        return name if seconds > 0 else ""


def closed_form(config: Config, world_size: int, hardware: Hardware) -> ClosedForm:
    """Of a legal configuration with its vocabulary resolved: of the pipeline rank that takes longest, over all of its
    stages."""
    program = program_of(config, world_size)
    cuts, placement = stage_layer_ranges(config, program), program.placement
    turns = placement.workers or (1,) * placement.num_stages
    ranks = (
        [
            _stage(config, world_size, hardware, cuts[stage], placement.num_replicas * turns[stage])
            for stage, _ in placement.stages_of(rank)
        ]
        for rank in range(placement.num_ranks)
    )
    summed = (ClosedForm(*map(sum, zip(*stages, strict=True))) for stages in ranks)
    return max(summed, key=lambda terms: terms.total)


def _stage(config: Config, world_size: int, hardware: Hardware, cut: range, sharers: int) -> ClosedForm:
    """sharers: pipeline ranks that take micro-batches of this stage in turn."""
    parallel, size = config.parallel, ElementBytes.of(config)
    given, tp = parallel.context, parallel.tensor_model_parallel_size
    m = config.num_microbatches(world_size) / sharers
    whole = model_layers(config.model)
    layers = [whole[item] for item in cut]
    rate = hardware.matrix_flops[config.training.precision.name] * hardware.matrix_efficiency
    computation = 3 * m * micro_tokens(config) * sum(layer.flops() for layer in layers) / (tp * rate)
    activations = micro_tokens(config) * config.model.hidden_size * size.compute
    sums = m * sum(layer.sums + layer.gathers for layer in layers)
    tensor = CommGroup(hardware, tp)
    data = sum(
        _all_reduce(
            CommGroup(hardware, each.ranks, each.stride), stage_elements(config, cut, each.family) * size.gradient
        )
        for each in families_of(config, world_size)
    )
    trade = CommGroup(hardware, given.traders, tp)
    ring = CommGroup(hardware, given.ring, tp * given.traders)
    hops = math.ceil(math.log2(given.ring)) if given.cp_comm_type == "all_gather" else given.ring - 1
    domain = 0.0
    for layer in layers if given.context_parallel_size > 1 else ():
        if layer.is_block:
            sent = context_bytes(config, layer)
            domain += 4 * trade.link.latency * math.ceil(math.log2(given.traders)) + 2 * sent.traded / trade.bandwidth
            domain += 3 * hops * ring.link.latency + (sent.forward + sent.backward) / ring.bandwidth
    axes = parallel.experts
    traders = CommGroup(hardware, axes.expert_model_parallel_size, parallel.expert_tensor_size)
    leaving = config.model.hidden_size * size.compute * (traders.size - 1) / traders.size
    experts = sum(4 * traders.all_to_all(expert_rows(config, layer) * leaving) for layer in layers if layer.is_sparse)
    return ClosedForm(computation, sums * _all_reduce(tensor, activations), data, m * domain, m * experts)


def _all_reduce(group: CommGroup, nbytes: float) -> float:
    steps = math.ceil(math.log2(group.size)) * group.link.latency
    return 2 * (steps + (group.size - 1) / group.size * nbytes / group.bandwidth)


def explain_terms(config: Config, world_size: int, hardware: Hardware) -> str:
    """The terms of a layout for people, and which of them dominates."""
    terms, parallel = closed_form(config, world_size, hardware), config.parallel
    context, dp = parallel.context, config.gradient_ranks(world_size)
    shown = {
        "model": f"sums of activations over tensor-parallel ranks: {parallel.tensor_model_parallel_size}",
        "data": f"sum of gradients over data- and context-parallel ranks: {dp}",
        "domain": f"keys and values over context-parallel ranks ({context.cp_comm_type}): "
        f"{context.context_parallel_size}",
    }
    if config.model.experts.num_experts is not None:
        ep = parallel.experts.expert_model_parallel_size
        shown["experts"] = f"all-to-all of tokens, to their experts and back, over expert-parallel ranks: {ep}"
    lines = ["closed form (Gholami et al., arXiv 1712.04432), nothing hidden behind anything, ms a step:"]
    lines.append(f"  computation {1e3 * terms.computation:12,.2f}")
    lines += [f"  {name:11s} {1e3 * getattr(terms, name):12,.2f}   {what}" for name, what in shown.items()]
    if not terms.dominant:
        return "\n".join([*lines, "  nothing is divided: no messages"])
    share = getattr(terms, terms.dominant) / terms.total
    lines.append(f"  of the messages {terms.dominant} dominates: {share:.0%} of {1e3 * terms.total:,.2f} ms")
    return "\n".join(lines)
