"""A graph of operations as a line of layers: where one tensor crosses, or as few as possible.

computed everywhere    what depends on no parameter and on integer inputs at most (masks, rotary angles): each layer
                       computes what it needs of it, from the micro-batch that every rank has
the chain              the rest, in order; cut between two operations where few tensors of one dtype cross
passengers             a tensor of a skip that goes on to a later layer, carried along by the layers between
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import getitem

import torch
from torch import Tensor, fx

from megalite.errors import ConfigError
from megalite.library.tensor_cut import TensorCut
from megalite.library.tracing import Traced, repeatable

MOST_TENSORS = 8
"""A boundary never has more."""
FINEST = 1 / 4
"""A part with less of the parameters than this is not cut where more tensors cross."""


@dataclass(frozen=True)
class Part:
    """Operations of one layer, what arrives for them and what leaves."""

    chain: list[fx.Node]
    arrives: list[fx.Node]
    leaves: list[fx.Node]


def linearise(traced: Traced, cut: TensorCut) -> tuple[list[Part], set[fx.Node]]:
    """(Parts in order, the operations that each of them may repeat.) Cuts the graph where the fewest tensors cross;
    finer only where a part would hold too much of the model. Never where ranks hold parts of a tensor."""
    roots, written = _storages(traced)
    # Operations that any rank can repeat: no parameters, no chance, nothing written, integer inputs at most.
    states = {node for node, (_, t) in traced.states.items() if not isinstance(t, torch.nn.Parameter)}
    free = states - written.keys() | {node for node in traced.inputs if not node.meta["val"].is_floating_point()}
    everywhere = repeatable(traced.graph, free, {node for node, root in roots.items() if root in written})
    cut.follow(traced.graph, traced.states, everywhere)
    if traced.result in cut.parts:
        raise ConfigError("tensor_parallel: each rank would return a part of the result; a row is missing")
    chain = [node for node in traced.graph.nodes if node.op == "call_function" and node not in everywhere]
    crossing = _crossings(traced, chain, everywhere)
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    ends_at = {memory: order[node] for memory, node in written.items()}
    legal = [
        _may_travel(values)
        and cut.parts.isdisjoint(values)
        and all(ends_at.get(roots[value], -1) <= order[chain[i]] for value in values)
        for i, values in enumerate(crossing)
    ]
    numel = {node: t.numel() for node, (_, t) in traced.states.items() if isinstance(t, torch.nn.Parameter)}
    weight = [sum(numel.get(arg, 0) for arg in node.all_input_nodes) for node in chain]
    total = [0, *accumulate(weight)]

    def split(begin: int, end: int, most: int) -> list[int]:
        """Ends of the parts of chain[begin:end], where at most `most` tensors cross."""
        places = [i + 1 for i in range(begin, end - 1) if legal[i] and len(crossing[i]) <= most]
        ends: list[int] = []
        for start, stop in zip([begin, *places], [*places, end], strict=True):
            held = total[stop] - total[start]
            if held > FINEST * total[-1] and max(weight[start:stop]) < held and most < MOST_TENSORS:
                ends += split(start, stop, most + 1)
            else:
                ends.append(stop)
        return ends

    ends = split(0, len(chain), 1)
    # Parts that hold no parameters join the one before them, the first ones that after them.
    ends = [*(end for end, after in pairwise(ends) if 0 < total[end] < total[after]), ends[-1]]
    parts, arrives, start = [], list(traced.inputs), 0
    for end in ends:
        leaves = crossing[end - 1] if end < len(chain) else [traced.result]
        parts.append(Part(chain[start:end], arrives, leaves))
        arrives, start = leaves, end
    return parts, everywhere


def _storages(traced: Traced) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """(Of each value the one whose memory it is a view of, of each memory the last operation that writes it)."""
    roots: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        roots[node] = node
        if node.op != "call_function" or not node.args:
            continue
        first = node.args[0]
        if node.target is getitem and isinstance(first, fx.Node):
            roots[node] = roots[first]
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and isinstance(value, fx.Node):
                roots[node] = roots[value]
                if argument.alias_info.is_write:
                    written[roots[value]] = node
        if "norm" in str(node.target) and "running_mean" in str(schema):  # which batch norm's does not declare
            written |= {roots[value]: node for value in node.args[3:5] if isinstance(value, fx.Node)}
    return roots, written


def _crossings(traced: Traced, chain: Sequence[fx.Node], everywhere: set[fx.Node]) -> list[list[fx.Node]]:
    """After each operation of the chain, the values that later ones need."""
    place = {node: i for i, node in enumerate(chain)}
    last: Counter[fx.Node] = Counter()
    for node in chain:
        for arg in node.all_input_nodes:
            if arg not in everywhere and arg not in traced.states:
                last[arg] = max(last[arg], place[node])
    last[traced.result] = len(chain)
    floating = [node for node in traced.inputs if node.meta["val"].is_floating_point()]
    alive, found = floating, []
    for i, node in enumerate(chain):
        alive = [value for value in [*alive, node] if last[value] > i]
        found.append(alive)
    return found


def _may_travel(nodes: Sequence[fx.Node]) -> bool:
    """Whether these are floating tensors of one dtype."""
    values = [node.meta["val"] for node in nodes]
    if not values or not all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return False
    return len({value.dtype for value in values}) == 1
