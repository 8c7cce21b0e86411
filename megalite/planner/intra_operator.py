"""How the ranks of one mesh share each operation of a block: Alpa's intra-operator choice (Zheng et al. 2022,
arXiv:2201.12023) for the chain of a dense block, by Viterbi's algorithm.

    norm > qkv > core > proj > norm > fc1 > fc2          every operation has some ways, every way a layout of its input
                                                         and of its output
    whole     every rank has all of a tensor             tokens    a part of the sequence
    channels  a part of the last dimension               sums      a summand of all of it

A product may be replicated (whole > whole), cut by columns (whole > channels), by rows (channels > sums) or by tokens
(tokens > tokens, with whole weights, whose gradients are then summed). Between two ways lies a change of layout, with a
message forward and its conjugate backward. What a way keeps for backward, and the states of its weights, cost
`price` seconds a byte; the price is found by bisection as the least at which the block fits into its memory. Where
memory is ample that gives Megatron-LM's column and row with two all-reduces in each direction; where it is not,
sequence parallelism. Norms count by what they keep; their time goes with the products that they are merged into, as in
Alpa. Of all ways the engine runs two chains, which the search for layouts tries.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from megalite.config import Config
from megalite.inventory import ElementBytes, Layer, micro_tokens, model_layers
from megalite.planner.communication import CommGroup
from megalite.planner.hardware import Hardware

WHOLE, TOKENS, CHANNELS, SUMS = "whole", "tokens", "channels", "sums"
PRICES = 2**40  # of a byte, among which the least is found
REDUCE, GATHER, EXCHANGE = ("all_reduce",), ("gather",), ("exchange",)
MESSAGES = {
    (SUMS, WHOLE): (REDUCE, ()),
    (TOKENS, WHOLE): (GATHER, ()),
    (CHANNELS, WHOLE): (GATHER, ()),
    (WHOLE, TOKENS): ((), GATHER),
    (WHOLE, CHANNELS): ((), GATHER),
    (SUMS, TOKENS): (GATHER, GATHER),
    (SUMS, CHANNELS): (GATHER, GATHER),
    (CHANNELS, TOKENS): (EXCHANGE, EXCHANGE),
    (TOKENS, CHANNELS): (EXCHANGE, EXCHANGE),
}
"""(Layout before, behind) -> messages forward and backward. A reduce-scatter counts as a gather: the same bytes."""


class Way(NamedTuple):
    """One way of an operation."""

    name: str
    before: str
    behind: str
    seconds: float  # of forward and backward
    kept: float  # bytes, states of weights included
    partial: bool = False  # whether each rank computes a summand of its input's gradient
    again: bool = False  # whether an input of tokens, which alone is kept, is gathered once more backward


class Operation(NamedTuple):
    """One operation of a block."""

    name: str
    nbytes: float  # of its whole input
    ways: list[Way]


class BlockPlan(NamedTuple):
    """How a block's operations are shared."""

    ways: tuple[tuple[str, str], ...] = ()  # (operation, how)
    forward: tuple[str, ...] = ()  # the block's messages in order
    backward: tuple[str, ...] = ()
    seconds: float = 0.0
    kept: float = 0.0  # bytes of a rank

    def priced(self, price: float) -> float:
        """Seconds, with those that the bytes are worth."""
        return self.seconds + price * self.kept

    def __str__(self) -> str:
        how = ", ".join(f"{operation} {way}" for operation, way in self.ways)
        sent = " + ".join(f"{self.forward.count(kind)} {kind}" for kind in dict.fromkeys(self.forward)) or "none"
        return f"{how}; messages forward: {sent}"


def plan_block(chains: Sequence[Sequence[Operation]], group: CommGroup, room: float) -> BlockPlan | None:
    """The fastest ways of a dense block, of these chains, that keep at most `room` bytes a rank; None: none does."""

    def at(price: float) -> BlockPlan:
        return min((cheapest(chain, group, price) for chain in chains), key=lambda plan: plan.priced(price))

    if (fastest := at(0.0)).kept <= room:
        return fastest
    step = 1e-3 / PRICES  # up to what a link of a kilobyte per second takes
    price = bisect_left(range(PRICES), True, key=lambda number: at(number * step).kept <= room)
    return plan if (plan := at(price * step)).kept <= room else None


def block_chain(config: Config, layer: Layer, hardware: Hardware, stream: str, in_flight: int) -> list[Operation]:
    """The operations of a block whose residual stream lies as `stream`, with their ways, at the configuration's
    tensor-parallel size; memory is counted for `in_flight` micro-batches."""
    model, t, size = layer.model, config.parallel.tensor_model_parallel_size, ElementBytes.of(config)
    tokens, e, rate = micro_tokens(config), size.compute, hardware.matrix_flops[config.training.precision.name]
    speed, states = rate * hardware.matrix_efficiency, size.compute + size.gradient + 3.0 * size.wide
    reduce = CommGroup(hardware, t)
    part = tokens * model.hidden_size * e / (t if stream == TOKENS else 1)
    norm = [Way(stream, stream, stream, 0.0, 2 * in_flight * part)]  # its input, and the stream's

    def matrix(name: str) -> list[Way]:
        sizes = layer.product(name)
        weights, inputs = sizes.n * sizes.k, in_flight * tokens * sizes.k * e
        whole, shared = 6 * tokens * weights / speed, weights * states
        split = whole / t
        summed = split + reduce.all_reduce(weights * size.gradient)
        return [
            Way("replicated", WHOLE, WHOLE, whole, shared + inputs),
            Way("column", WHOLE, CHANNELS, split, shared / t + inputs, partial=True),
            Way("column of gathered", TOKENS, CHANNELS, split, shared / t + inputs / t, partial=True, again=True),
            Way("row", CHANNELS, SUMS, split, shared / t + inputs / t),
            Way(TOKENS, TOKENS, TOKENS, summed, shared + inputs / t),
        ]

    work = 3.5 * tokens * layer.flops(core=True) / (rate * hardware.attention_efficiency)
    kept = in_flight * tokens * e * (2 * model.query_size + 2 * model.kv_size)
    keys = 3 * reduce.gather(tokens * 2 * model.kv_size * e)
    core = [
        Way("replicated", WHOLE, WHOLE, work, kept),
        Way("heads", CHANNELS, CHANNELS, work / t, kept / t),
        Way(TOKENS, TOKENS, TOKENS, work / t + keys, kept / t),
    ]
    ways = {
        **{"norm": norm, "qkv": matrix("qkv"), "core": core, "proj": matrix("proj")},
        **{"norm of the MLP": norm, "fc1": matrix("fc1"), "fc2": matrix("fc2")},
        "stream": [Way(stream, stream, stream, 0.0, 0.0)],
    }
    width = {"core": model.query_size + 2 * model.kv_size, "proj": model.query_size, "fc2": model.ffn_size}
    return [Operation(name, tokens * width.get(name, model.hidden_size) * e, its) for name, its in ways.items()]


def follows(before: Way, way: Way) -> bool:
    """An input that is gathered once more lies by tokens."""
    return not way.again or before.behind == TOKENS


def extended(plan: BlockPlan, before: Way, operation: Operation, way: Way, group: CommGroup) -> BlockPlan:
    """One operation more, and the messages in front of it."""
    forward, backward = MESSAGES.get((before.behind, WHOLE if way.again else way.before), ((), ()))
    if way.partial:  # the gradient of the whole input is a sum
        backward = GATHER if before.behind == TOKENS else REDUCE
    backward += GATHER if way.again else ()
    gather = group.gather(operation.nbytes)
    one = {"all_reduce": group.all_reduce(operation.nbytes), "gather": gather, "exchange": gather / group.size}
    return BlockPlan(
        (*plan.ways, (operation.name, way.name)),
        plan.forward + forward,
        plan.backward + backward,
        plan.seconds + way.seconds + sum(one[kind] for kind in forward + backward),
        plan.kept + way.kept,
    )


def cheapest(chain: Sequence[Operation], group: CommGroup, price: float) -> BlockPlan:
    """Viterbi: the least of seconds + price * bytes over all choices."""
    best = {chain[-1].ways[0]: BlockPlan()}  # the stream comes as it goes
    for operation in chain:
        found: dict[Way, BlockPlan] = {}
        for way, (before, plan) in product(operation.ways, best.items()):
            if follows(before, way):
                plan = extended(plan, before, operation, way, group)
                found[way] = min(found.get(way, plan), plan, key=lambda plan: plan.priced(price))
        best = found
    return min(best.values(), key=lambda plan: plan.priced(price))


def block_text(config: Config, world_size: int, hardware: Hardware) -> str:
    """A line about the blocks of a plan's first rank; empty where nothing is shared or blocks are no dense ones."""
    parallel, layers = config.parallel, model_layers(config.model)
    blocks = [each for each in layers if each.is_block and each.model.mixer == "attention" and not each.is_sparse]
    stages = parallel.pipeline_model_parallel_size
    if parallel.tensor_model_parallel_size == 1 or not blocks:
        return ""
    room = hardware.usable_bytes * stages / config.model.num_layers
    flying = min(stages, config.num_microbatches(world_size))
    chains = [block_chain(config, blocks[0], hardware, stream, flying) for stream in (WHOLE, TOKENS)]
    found = plan_block(chains, CommGroup(hardware, parallel.tensor_model_parallel_size), room)
    return f"inside a block: {found or 'no way of its operations fits by itself'}"
