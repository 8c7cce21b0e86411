"""Rows that a traced module looks up: are there as many as its ids reach? A table that is too short fails in the first
step, with a stack of torch's frames, or on a GPU with a device that is lost; here it is one line before the start."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from megalite.errors import ConfigError
from megalite.library.tracing import Traced, is_random, needed_by, with_devices

EMBEDDING, INDEX = torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor
#: Operations that hand ids on as they are.
SAME_IDS = frozenset({
    "view", "reshape", "_unsafe_view", "to", "_to_copy", "clone", "contiguous", "unsqueeze", "squeeze", "expand",
    "detach", "alias", "slice", "select", "transpose", "permute", "t", "flatten", "lift_fresh_copy", "flip",
})  # fmt: skip
MOST_ELEMENTS = 1 << 24
"""Ids that do not depend on the input (positions) are worked out up to so many."""


def check_tables(traced: Traced, rows: Mapping[str, int], ids: int) -> None:
    """Raises ConfigError. rows: of each parameter, by its name. ids: those of the input are below it."""
    for name, index in lookups(traced):
        have = rows.get(name)
        if have is None:
            continue
        if _source(index) in traced.inputs and have < ids:
            raise ConfigError(f"{name} has {have:,} rows, the tokenizer {ids:,} ids; let the factory take vocab_size")
        found = None if _source(index) in traced.inputs else worked_out(index, traced, MOST_ELEMENTS)
        if found is not None and not found.is_floating_point() and found.numel() and (last := int(found.max())) >= have:
            raise ConfigError(
                f"{name} has {have:,} rows, and row {last:,} is looked up; let the factory take seq_length"
            )


def lookups(traced: Traced) -> Iterator[tuple[str, fx.Node]]:
    """(Name of the table, ids) of every look-up in a parameter."""
    for node in traced.graph.nodes:
        table, index = None, None
        if node.target is EMBEDDING:
            table, index = node.args[:2]
        elif node.target is INDEX and len(node.args[1]) == 1:
            table, index = node.args[0], node.args[1][0]
        if table in traced.states and isinstance(index, fx.Node):
            yield traced.states[table][0], index


def _source(node: fx.Node) -> fx.Node:
    """Where ids come from that only change their form."""
    while node.op == "call_function" and str(node.target).partition(".")[2].partition(".")[0] in SAME_IDS:
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            break
        node = first
    return node


def worked_out(node: fx.Node, traced: Traced, most: int) -> Tensor | None:
    """The value of a node that depends on no input and no parameter, on the CPU. most: elements of any value on the
    way."""
    known: dict[fx.Node, Any] = {}
    needed = needed_by([node])
    try:
        with torch.no_grad():
            for each in (each for each in traced.graph.nodes if each in needed):
                value = known[each] = _computed(each, known, traced, most)
                if value is None:
                    return None
    except Exception:  # an operation that a graph may hold and we cannot repeat; the run itself will
        return None
    return known[node] if isinstance(known[node], Tensor) else None


def _computed(node: fx.Node, known: Mapping[fx.Node, Any], traced: Traced, most: int) -> Any:
    """The value of a node by those that it reads, None where it has none. most: elements."""
    shape = node.meta.get("val")
    if isinstance(shape, Tensor) and shape.numel() > most:
        return None
    if node in traced.states:
        tensor = traced.states[node][1]
        return None if isinstance(tensor, torch.nn.Parameter) or tensor.is_meta else tensor.cpu()
    if node.op == "get_attr":
        return getattr(traced.root, str(node.target))
    if node.op != "call_function" or is_random(node):
        return None
    put = fx.node.map_aggregate((node.args, node.kwargs), lambda a: known[a] if isinstance(a, fx.Node) else a)
    args, kwargs = with_devices(put, torch.device("cpu"))
    operation: Any = node.target
    return operation(*args, **kwargs)
