"""Tensor parallelism for a traced module, by a table of names (Megatron-LM, arXiv 1909.08053).

    col     a linear layer's rows over the ranks: each computes a part of the outputs
    row     a linear layer's columns: each reads its part of the inputs, the results are summed
    vocab   the rows of an embedding or of an output layer; logits are gathered

What lies between a `col` and its `row` works on parts. Where anything else comes in there (a norm's weight, a
residual), its gradient is summed over the ranks. A dimension is cut into contiguous parts: heads one after
the other are right, fused queries, keys and values are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from megalite.comm import Axis, all_gather, conjugates, copy_to_axis, own_slice, reduce_from_axis
from megalite.errors import ConfigError
from megalite.inventory import ParameterPlacement, placement_of

COL, ROW, VOCAB = "col", "row", "vocab"
Table = Mapping[str, str | Sequence[str]]
LINEAR, EMBEDDING = torch.ops.aten.linear.default, torch.ops.aten.embedding.default


@dataclass(frozen=True)
class CutParameter:
    """This rank's part of a parameter, and the shape that it is traced with."""

    kind: str
    local: nn.Parameter
    traced_as: tuple[int, ...]


def cut_parameters(module: nn.Module, table: Table, axis: Axis) -> dict[str, CutParameter]:
    """By name, the parameters that the table cuts. Raises ConfigError for a glob that fits nothing, or does not fit."""
    found: dict[str, CutParameter] = {}
    for kind, globs in table.items():
        if kind not in (COL, ROW, VOCAB):
            raise ConfigError(f"tensor_parallel: {kind!r}; {COL!r}, {ROW!r} and {VOCAB!r} are known")
        for glob in [globs] if isinstance(globs, str) else globs:
            owners = [(name, child) for name, child in module.named_modules() if fnmatchcase(name, glob)]
            if not owners:
                raise ConfigError(f"tensor_parallel: {kind}: {glob}: no module has such a name")
            for name, child in owners:
                if not isinstance(child, (nn.Linear, nn.Embedding) if kind == VOCAB else nn.Linear):
                    raise ConfigError(f"tensor_parallel: {kind}: {name} is {type(child).__name__}, no nn.Linear")
                for leaf, parameter in child.named_parameters(recurse=False):
                    if not (kind == ROW and leaf == "bias"):
                        found[f"{name}.{leaf}"] = _cut(f"{name}.{leaf}", parameter, kind, axis)
    return {name: cut for name, cut in found.items() if name in dict(module.named_parameters())}


def _cut(name: str, parameter: nn.Parameter, kind: str, axis: Axis) -> CutParameter:
    dim, shape = int(kind == ROW), tuple(parameter.shape)
    if shape[dim] % axis.size and kind != VOCAB:
        raise ConfigError(f"tensor_parallel: {kind}: {name} is {shape}, not divisible by {axis.size} along {dim}")
    size = -(-shape[dim] // axis.size)
    begin = axis.rank * size
    part = parameter.detach().narrow(dim, min(begin, shape[dim]), max(0, min(size, shape[dim] - begin)))
    local_shape = tuple(size if i == dim else extent for i, extent in enumerate(shape))
    local = torch.zeros(local_shape, dtype=parameter.dtype, device=parameter.device)
    local.narrow(dim, 0, part.shape[dim]).copy_(part)
    made = nn.Parameter(local, requires_grad=parameter.requires_grad)
    offset = tuple(begin if i == dim else 0 for i in range(len(shape)))
    placement = ParameterPlacement(shape, offset, axis.names, decay=len(shape) > 1)
    made.placement = placement  # type: ignore[attr-defined]  # ours, on a tensor of torch's
    return CutParameter(kind, made, shape if kind == VOCAB else local_shape)


def whole(tensor: Tensor, axis: Axis) -> Tensor:
    """The logical tensor of a parameter, gathered where it is cut. Collective over the axis."""
    place = placement_of(tensor)
    if not place.sharded:
        return tensor
    dim = next(i for i, (a, b) in enumerate(zip(tensor.shape, place.global_shape, strict=True)) if a != b)
    parts = all_gather(tensor.movedim(dim, 0).contiguous(), axis).movedim(0, dim)
    return parts.narrow(dim, 0, place.global_shape[dim])


@dataclass(frozen=True)
class TensorCut:
    """What a traced graph needs in order to compute with parts.

    kinds: placeholder of a parameter that is cut -> col, row or vocab.
    parts: values of which each rank has a part of its own.
    entries: (operation, argument): gradients of the argument are summed over the axis there.
    """

    axis: Axis
    kinds: dict[fx.Node, str] = field(default_factory=dict)
    parts: set[fx.Node] = field(default_factory=set)
    entries: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)

    def kind(self, node: fx.Node) -> str:
        """How the operation's weight is cut, if it is."""
        weight = node.args[1] if node.target is LINEAR else node.args[0] if node.target is EMBEDDING else None
        return self.kinds.get(weight, "") if isinstance(weight, fx.Node) else ""

    def follow(self, graph: fx.Graph, states: Mapping[fx.Node, tuple[str, Tensor]], everywhere: set[fx.Node]) -> None:
        """Finds `parts` and `entries`. Raises ConfigError where the table does not make sense."""
        for node in graph.nodes:
            if node.op != "call_function" or node in everywhere:
                continue
            kind, arguments = self.kind(node), node.all_input_nodes
            name = next((states[arg][0] for arg in arguments if arg in self.kinds), str(node.target))
            if not kind:
                if any(arg in self.kinds for arg in arguments):
                    raise ConfigError(f"tensor_parallel: {name} is used by {node.target}; linear layers are cut")
                if any(arg in self.parts for arg in arguments):
                    self._inside(node, arguments, everywhere)
                continue
            x = node.args[1 - (node.target is LINEAR)]
            if (x in self.parts) != (kind == ROW):
                told = "its input is whole, no col is before it" if kind == ROW else "its input is cut already"
                raise ConfigError(f"tensor_parallel: {kind}: {name}: {told}")
            if kind == COL:
                self.parts.add(node)
            if kind != ROW and node.target is LINEAR:
                self.entries.add((node, x))

    def _inside(self, node: fx.Node, arguments: Sequence[fx.Node], everywhere: set[fx.Node]) -> None:
        self.parts.add(node)
        schema = getattr(node.target, "_schema", None)
        values = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs if schema else {}
        chance = values.get("dropout_p") or ("dropout" in str(node.target) and values.get("p"))
        if chance:
            raise ConfigError(f"tensor_parallel: dropout of {chance} between col and row is alike on all ranks; set 0")
        for arg in arguments:
            if arg not in self.parts and arg not in everywhere and arg.op != "get_attr":
                self.entries.add((node, arg))


class OverRanks(nn.Module):
    """An operation over an axis, for a traced graph. Not copied with a layer: communicators cannot be. given: its first
    arguments."""

    def __init__(self, operation: Callable[..., Tensor], *given: Any) -> None:
        super().__init__()
        self.operation, self.given = operation, given

    def __deepcopy__(self, memo: Any) -> OverRanks:
        return self

    def forward(self, *x: Tensor) -> Tensor:
        return self.operation(*self.given, *x)


def has_no_values(x: Tensor) -> bool:
    """Whether it is there for its shape: no rank has anything to send."""
    return x.is_meta or isinstance(x, FakeTensor)


def _enter(axis: Axis, x: Tensor) -> Tensor:
    """Whole on all ranks, before operations on parts."""
    return copy_to_axis(x, axis) if x.is_floating_point() else x


def _sum(axis: Axis, x: Tensor) -> Tensor:
    """Of the ranks' shares."""
    return x if has_no_values(x) else reduce_from_axis(x, axis)


def _lookup(axis: Axis, padding: int, weight: Tensor, ids: Tensor) -> Tensor:
    """An embedding whose rows are cut: each rank looks up the ids that it has."""
    rows = weight.shape[0]
    begin = axis.rank * rows
    own = (ids >= begin) & (ids < begin + rows)
    of_rank = padding - begin if begin <= padding < begin + rows else None
    return _sum(axis, F.embedding((ids - begin).clamp(0, rows - 1), weight, of_rank) * own[..., None])


def _logits(axis: Axis, columns: int, x: Tensor) -> Tensor:
    """The ranks' columns side by side, without padding."""
    if has_no_values(x):
        out = x.new_empty((*x.shape[:-1], x.shape[-1] * axis.size))
    else:
        out = conjugates(x.movedim(-1, 0).contiguous(), axis, all_gather, own_slice).movedim(0, -1)
    return out.narrow(-1, 0, columns)


def rewritten(graph: fx.Graph, node: fx.Node, made: fx.Node, cut: TensorCut, held: dict[str, Any]) -> fx.Node:
    """`made`, the copy of an operation with a weight that is cut, followed by what its parts need."""
    kind = cut.kind(node)
    if kind == VOCAB and node.target is EMBEDDING:
        padding: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
        with graph.inserting_before(made):
            found = _call(graph, held, f"lookup_{padding}", OverRanks(_lookup, cut.axis, padding), *made.args[:2])
        graph.erase_node(made)
        return found
    if kind == VOCAB:
        columns = node.meta["val"].shape[-1]
        return _call(graph, held, f"logits_{columns}", OverRanks(_logits, cut.axis, columns), made)
    if kind == ROW:
        bias = made.args[2] if len(made.args) > 2 else None
        made.args = made.args[:2]  # each rank would add the bias
        total = _call(graph, held, "sum", OverRanks(_sum, cut.axis), made)
        return total if bias is None else graph.call_function(torch.ops.aten.add.Tensor, (total, bias))
    return made


def entered(graph: fx.Graph, value: fx.Node, cut: TensorCut, held: dict[str, Any]) -> fx.Node:
    """A whole value for an operation on parts."""
    return _call(graph, held, "enter", OverRanks(_enter, cut.axis), value)


def _call(graph: fx.Graph, held: dict[str, Any], name: str, module: nn.Module, *args: Any) -> fx.Node:
    name = f"over_ranks_{name}".replace("-", "minus_")
    held.setdefault(name, module)
    return graph.call_module(name, args)
