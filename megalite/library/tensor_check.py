"""Does a cut module compute the module's numbers? Where ranks hold parts of a dimension, nothing may work along it.

The module is traced twice, whole and cut. The graphs have the same operations; a dimension whose extent is not the same
in both is cut there. A norm, a softmax or a product along such a dimension would see its part alone; halves of a part
are not the parts of halves; and a view may not put the cut behind another dimension (fused queries, keys and values).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from megalite.errors import ConfigError
from megalite.library.tensor_cut import ROW, TensorCut
from megalite.library.tracing import Traced

ALL_OF_IT = ("mean", "sum", "var", "std", "norm", "max", "min", "amax", "amin", "prod", "logsumexp", "argmax", "argmin")
"""Operations that without a dimension reduce over all of them."""
WHOLE = 2**62
"""The end of a slice that ends nowhere."""
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
HARMLESS = ("cat", "stack", "transpose", "squeeze", "unsqueeze", "repeat_interleave", "sym_size")
"""... whose `dim` names a place, not values that belong together."""


def check_parts(cut: TensorCut, traced: Traced, whole: Traced) -> None:
    """Raises ConfigError for an operation that would see a part of what it works along.

    whole: the same module, with nothing cut.
    """
    ours, theirs = ([n for n in t.graph.nodes if n.op == "call_function"] for t in (traced, whole))
    if [str(node.target) for node in ours] != [str(node.target) for node in theirs]:
        raise ConfigError("tensor_parallel: with parts of its layers the module computes other operations; cut none")
    inside: dict[fx.Node, int] = {}  # of a value, how many whole blocks its cut dimension consists of
    for node, other in zip(ours, theirs, strict=True):
        if cut.kind(node) == ROW:
            continue
        for dims, argument, uncut in _reduced(node, other):
            have, want = _shape(argument), _shape(uncut)
            lost = [dim for dim in dims if have[dim] != want[dim]]
            if argument in cut.parts and lost:
                raise ConfigError(
                    f"tensor_parallel: {_where(node)}{_name(node)} works along {want[lost[0]]} values, of which each "
                    f"rank has {have[lost[0]]}; end the cut before it by a row, or cut heads only"
                )
        if node in cut.parts:
            _follow_view(node, other, inside)


def _follow_view(node: fx.Node, other: fx.Node, inside: dict[fx.Node, int]) -> None:
    """Keeps `inside`; raises ConfigError for a view after which other elements are cut than before."""
    x, old = (n.args[0] if n.args and isinstance(n.args[0], fx.Node) else None for n in (node, other))
    if x is None or old is None or not all(isinstance(n.meta.get("val"), Tensor) for n in (x, old, node, other)):
        return
    before, after = _cut_dim(x, old), _cut_dim(node, other)
    if before is None or after is None:
        return
    blocks = inside.get(x, 1)
    if _name(node) in VIEWS:
        outer, now = math.prod(_shape(old)[:before]) * blocks, math.prod(_shape(other)[:after])
        if outer % now:
            raise ConfigError(
                f"tensor_parallel: {_where(node)}{_name(node)} of {list(_shape(old))} as {list(_shape(other))} puts a "
                "dimension before the one that is cut (fused layers?); each of its parts must be cut by itself"
            )
        blocks = outer // now
    inside[node] = blocks


def _cut_dim(node: fx.Node, whole: fx.Node) -> int | None:
    pairs = enumerate(zip(_shape(node), _shape(whole), strict=True))
    return next((dim for dim, (have, want) in pairs if have != want), None)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _reduced(node: fx.Node, other: fx.Node) -> Iterator[tuple[list[int], fx.Node, fx.Node]]:
    """(Dimensions that are reduced, argument, the same of the whole module) for the tensors of an operation."""
    pairs = [
        (a, b)
        for a, b in zip(node.args, other.args, strict=True)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and isinstance(a.meta.get("val"), Tensor)
    ]
    if not pairs:
        return
    name, given = _name(node), _arguments(node)
    first, rank = pairs[0], pairs[0][0].meta["val"].dim()
    if "normalized_shape" in given:
        yield list(range(rank - len(given["normalized_shape"]), rank)), *first
    elif name in ("group_norm", "native_group_norm"):
        yield list(range(1, rank)), *first
    elif name in ("matmul", "bmm", "mm") and len(pairs) == 2:
        yield [-1], *first
    elif name in ("addmm", "baddbmm") and len(pairs) == 3:
        yield [-1], *pairs[1]
    elif name == "scaled_dot_product_attention":
        yield [-1], *first
        yield [-2], *pairs[1]
    elif name == "linear":
        yield [-1], *first
    elif name == "slice" and not given.get("start") and (given.get("end") or WHOLE) >= WHOLE:
        return
    elif "dim" in given and name not in HARMLESS:
        dims = given["dim"] if isinstance(given["dim"], list | tuple) else [given["dim"]]
        yield [dim for dim in dims if isinstance(dim, int)] or list(range(rank)), *first
    elif name in ALL_OF_IT and len(pairs) == 1:
        yield list(range(rank)), *first


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(node.kwargs)
    missing = {argument.name: argument.default_value for argument in schema.arguments if argument.name == "dim"}
    return missing | dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def _where(node: fx.Node) -> str:
    """The module that the operation belongs to."""
    owners = list((node.meta.get("nn_module_stack") or {}).values())
    return f"{owners[-1][0].removeprefix('L__self__.')}: " if owners and owners[-1][0] else ""
