"""Does a cut module compute the module's numbers? Where ranks hold parts of a dimension, nothing may work along it.

The module is traced twice, whole and cut. The graphs have the same operations; a dimension whose extent is not the same
in both is cut there. A norm, a softmax or a product along such a dimension would see its part alone; halves of a part
are not the parts of halves; and a view may not put the cut behind another dimension (fused queries, keys and values).
"""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from megalite.errors import ConfigError
from megalite.library.tensor_cut import ROW, TensorCut
from megalite.library.tracing import Traced, arguments

ALL_OF_IT = ("mean", "sum", "var", "std", "norm", "max", "min", "amax", "amin", "prod", "logsumexp", "argmax", "argmin")
"""Operations that without a dimension reduce over all of them."""
WHOLE = 2**62
"""The end of a slice that ends nowhere."""
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
HARMLESS = ("cat", "stack", "transpose", "permute", "squeeze", "unsqueeze", "repeat_interleave", "sym_size")
"""... whose `dim` names a place, not values that belong together."""


def check_parts(cut: TensorCut, traced: Traced, whole: Traced) -> None:
    """Raises ConfigError for an operation that would see a part of what it works along.

    whole: the same module, with nothing cut.
    """
    views, what = Views("tensor_parallel"), "with parts of its layers the module computes other operations; cut none"
    for node, other in side_by_side(traced, whole, f"tensor_parallel: {what}"):
        if cut.kind(node) == ROW:
            continue
        for dims, argument, uncut in reduced(node, other):
            have, want = shape_of(argument), shape_of(uncut)
            lost = [dim for dim in dims if have[dim] != want[dim]]
            if argument in cut.parts and lost:
                raise ConfigError(
                    f"tensor_parallel: {where(node)}{name_of(node)} works along {want[lost[0]]} values, of which each "
                    f"rank has {have[lost[0]]}; end the cut before it by a row, or cut heads only"
                )
        if node in cut.parts:
            views.follow(node, other)


def side_by_side(part: Traced, whole: Traced, problem: str) -> list[tuple[fx.Node, fx.Node]]:
    """The operations of both. Raises ConfigError where they are not the same."""
    ours, theirs = ([n for n in t.graph.nodes if n.op == "call_function"] for t in (part, whole))
    if [str(node.target) for node in ours] != [str(node.target) for node in theirs]:
        raise ConfigError(problem)
    return list(zip(ours, theirs, strict=True))


class Views:
    """Of every value, how many whole blocks its cut dimension consists of. what: cuts it, for messages."""

    def __init__(self, what: str) -> None:
        self._what, self._inside = what, dict[fx.Node, int]()

    def follow(self, node: fx.Node, other: fx.Node) -> None:
        """Raises ConfigError for a view after which other elements are cut than before."""
        blocks = max([1, *(self._inside.get(each, 1) for each in node.all_input_nodes)])
        if not isinstance(node.meta.get("val"), Tensor) or name_of(node) == "getitem":  # a tuple, and what is in it
            self._inside[node] = blocks
            return
        old, before, after = cut_before(node, other)
        if before is None or after is None:
            return
        if name_of(node) in VIEWS:
            outer, now = math.prod(shape_of(old)[:before]) * blocks, math.prod(shape_of(other)[:after])
            if outer % now:
                raise ConfigError(
                    f"{self._what}: {where(node)}{name_of(node)} of {list(shape_of(old))} as "
                    f"{list(shape_of(other))} puts a dimension before the one that is cut (fused layers?); each of its "
                    "parts must be cut by itself"
                )
            blocks = outer // now
        self._inside[node] = blocks


def cut_dim(node: fx.Node, whole: fx.Node) -> int | None:
    """The dimension along which the value of `node` is a part of that of `whole`, None: it is not."""
    if not all(isinstance(each.meta.get("val"), Tensor) for each in (node, whole)):
        return None
    pairs = enumerate(zip(shape_of(node), shape_of(whole), strict=True))
    return next((dim for dim, (have, want) in pairs if have != want), None)


def cut_before(node: fx.Node, whole: fx.Node) -> tuple[fx.Node, int | None, int | None]:
    """(The first input that is cut, in the whole module, where it is cut, where `node` is)."""
    pairs = zip(node.all_input_nodes, whole.all_input_nodes, strict=True)
    found = next(((b, dim) for a, b in pairs if (dim := cut_dim(a, b)) is not None), (whole, None))
    return *found, cut_dim(node, whole)


def shape_of(node: Any) -> tuple[int, ...]:
    """Of the value of a node."""
    return tuple(node.meta["val"].shape)


def reduced(node: fx.Node, other: fx.Node) -> Iterator[tuple[list[int], fx.Node, fx.Node]]:
    """(Dimensions that are reduced, argument, the same of the whole module) for the tensors of an operation."""
    pairs = [
        (a, b)
        for a, b in zip(node.args, other.args, strict=True)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and isinstance(a.meta.get("val"), Tensor)
    ]
    if not pairs:
        return
    name, given = name_of(node), arguments(node)
    first, rank = pairs[0], pairs[0][0].meta["val"].dim()
    if "normalized_shape" in given:
        yield list(range(rank - len(given["normalized_shape"]), rank)), *first
    elif name in ("group_norm", "native_group_norm"):
        yield list(range(1, rank)), *first
    elif name == "linear" or name in ("matmul", "bmm", "mm") and len(pairs) == 2:
        yield [-1], *first
    elif name in ("addmm", "baddbmm") and len(pairs) == 3:
        yield [-1], *pairs[1]
    elif name == "scaled_dot_product_attention":
        yield [-1], *first
        yield [-2], *pairs[1]
    elif name == "slice" and not given.get("start") and (given.get("end") or WHOLE) >= shape_of(first[0])[given["dim"]]:
        return
    elif ("dim" in given or "dims" in given) and name not in HARMLESS:
        along = given.get("dims", given.get("dim"))
        dims = along if isinstance(along, list | tuple) else [along]
        yield [dim for dim in dims if isinstance(dim, int)] or list(range(rank)), *first
    elif name in ALL_OF_IT and len(pairs) == 1:
        yield list(range(rank)), *first


def name_of(node: fx.Node) -> str:
    """Of the operation, without its overload."""
    operation: Any = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(operation, "__name__", operation))


def where(node: fx.Node) -> str:
    """The module that the operation belongs to."""
    owners = list((node.meta.get("nn_module_stack") or {}).values())
    return f"{owners[-1][0].removeprefix('L__self__.')}: " if owners and owners[-1][0] else ""
