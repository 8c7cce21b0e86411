"""Sequences of a traced module: packed documents, and ranks that share a sequence.

torch's `scaled_dot_product_attention` becomes our core, which knows documents and rings. Its mask must be causal, with
a sliding window at most: it is worked out and looked at. Everything else must work token by token: what does not (a
softmax along tokens, a convolution) is refused. The module is traced twice, with all tokens and with a part of them; an
operation mixes tokens where it works along a dimension that differs. What depends on the length alone (rotary angles,
indices of a table) is computed for all tokens, and a rank that shares a sequence has the rows of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megalite.comm import ContextAxes
from megalite.errors import ConfigError
from megalite.library.tables import worked_out
from megalite.library.tensor_check import (
    VIEWS,
    Views,
    cut_before,
    cut_dim,
    name_of,
    reduced,
    shape_of,
    side_by_side,
    where,
)
from megalite.library.tensor_cut import has_no_values
from megalite.library.tracing import Traced, arguments, needed_by, repeatable
from megalite.microbatch import Microbatch
from megalite.nn import AttentionCore, context_attention
from megalite.parallel.context import SequenceCut, sequence_order

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MOST_OF_A_MASK = 1 << 28
"""Elements of a mask that is looked at: 16,384 tokens."""
HIDDEN = -1e4
"""A number that is added to scores hides a key from here down."""
#: Operations, beside pointwise ones, that work token by token where they do not work along tokens.
BY_TOKEN = frozenset({
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "expand", "contiguous", "clone", "alias", "detach", "to", "_to_copy", "type_as", "linear", "matmul", "bmm", "mm",
    "addmm", "baddbmm", "embedding", "cat", "stack", "split", "chunk", "split_with_sizes", "slice", "select", "unbind",
    "getitem", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "softmax", "_softmax", "log_softmax",
    "mean", "sum", "var", "std", "norm", "max", "min", "amax", "amin", "topk", "sort", "argmax", "cumsum", "logsumexp",
    "dropout", "native_dropout", "roll", "flip", "repeat_interleave", "gather", "scatter",
    "zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_zeros", "new_ones", "new_full", "copy",
})  # fmt: skip


@dataclass(frozen=True)
class Sequences:
    """What attention has to know beside causality.

    documents: each micro-batch says where its documents begin. cp: the ranks that share each sequence.
    """

    documents: bool = False
    cp: ContextAxes = ContextAxes()

    def __bool__(self) -> bool:
        return self.documents or self.cp.size > 1

    def __str__(self) -> str:
        return "context parallelism" if self.cp.size > 1 else "documents"

    def share(self, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What a rank has of inputs `[b, s]`. Raises ConfigError."""
        size, parts = self.cp.size, 2 * self.cp.ring.size * self.cp.heads.size
        if size == 1:
            return example
        for tensor in example:
            if tensor.dim() != 2 or tensor.shape[1] % parts:
                raise ConfigError(
                    f"context parallelism of {size}: an input {list(tensor.shape)} is no [b, s] with s a multiple of "
                    f"{parts}"
                )
        return tuple(tensor[:, : tensor.shape[1] // size] for tensor in example)

    def part(self, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A part of the tokens, to be traced beside all of them. Raises ConfigError."""
        if self.cp.size > 1:
            return self.share(example)
        for tensor in example:
            if tensor.dim() != 2 or tensor.shape[1] < 2:
                raise ConfigError(f"documents: an input {list(tensor.shape)} is no [b, s] with s above 1")
        return tuple(tensor[:, : tensor.shape[1] // 2] for tensor in example)

    def cut(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Microbatch | None]:
        """(What a rank has of the inputs `[b, s]`, what its attention is told). Of documents the last input says
        where they begin."""
        if not self:
            return inputs, None
        *given, starts = inputs if self.documents else (*inputs, None)
        tokens = inputs[0]
        ids, weights = torch.arange(len(tokens), device=tokens.device), torch.ones_like(tokens, dtype=torch.float32)
        whole = Microbatch(tokens, tokens, tokens, weights, ids, document_starts=starts)
        own = SequenceCut(self._rank, self.cp.size, self.cp.ring.size)(whole)
        return tuple(x if own.places is None else x[:, own.places] for x in given if x is not None), own

    def places(self, length: int) -> Tensor:
        """Positions of this rank's tokens."""
        return sequence_order(length, self.cp.ring.size).chunk(self.cp.size)[self._rank]

    @property
    def _rank(self) -> int:
        return self.cp.ring.rank * self.cp.heads.size + self.cp.heads.rank


class Attend(nn.Module):
    """Attention to the earlier tokens of a document. Not copied with a layer: communicators cannot be.

    scale: of the scores. window: as `AttentionCore`. strides: of torch's result, whose views the graph takes.
    """

    def __init__(
        self, cp: ContextAxes, scale: float | None, window: int | None, strides: tuple[int, ...] = (4, 3, 2, 1)
    ) -> None:
        super().__init__()
        self.cp, self.scale, self.core = cp, scale, AttentionCore(window=window, axes=cp)
        self._order = sorted(range(4), key=lambda dim: -strides[dim])

    def __deepcopy__(self, memo: Any) -> Attend:
        return self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, microbatch: Microbatch | None) -> Tensor:
        """q `[b, a, s, d]`, k `[b, g, s, d]`, v `[b, g, s, e]` -> `[b, a, s, e]`."""
        if has_no_values(q):
            k, v = (x.repeat(1, 1, self.cp.size, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        assert microbatch is not None, "attention in a pipeline is told of its micro-batch"
        channels, groups, out = q.shape[-1], k.shape[1], v.shape[-1]
        width = max(channels, out)
        scale = channels**-0.5 if self.scale is None else self.scale
        if scale != width**-0.5:
            q = q * (scale * width**0.5)  # the core divides by it
        q, k, v = (F.pad(x, (0, width - x.shape[-1])).permute(2, 0, 1, 3) for x in (q, k, v))
        q = q.unflatten(2, (groups, q.shape[2] // groups))
        if self.cp.size > 1:
            y: Tensor = context_attention(self.core, q, k, v, microbatch, None, training=False)
        else:
            y = self.core(q, k, v, document_starts=microbatch.document_starts, shared=microbatch.shared)
        y = y.unflatten(2, (-1, width))[..., :out].permute(1, 2, 0, 3)
        return y.permute(self._order).contiguous().permute([self._order.index(dim) for dim in range(4)])


def follow_sequences(part: Traced, whole: Traced, sequences: Sequences) -> Traced:
    """The graph of a rank's tokens, with attention that knows documents and ranks. part, whole: graphs of a part of the
    tokens and of all of them. Raises ConfigError, with the place, for what has no such form."""
    traced = part if sequences.cp.size > 1 else whole
    windows = [_window(node, whole) for node in _attention(whole)]
    scales = [arguments(node).get("scale") for node in _attention(whole)]
    if not windows and sequences.documents:
        raise ConfigError("documents: nothing calls torch's scaled_dot_product_attention, which knows them here")
    for graph in (part, whole):
        without_masks(graph)
    for node in _attention(traced):
        groups, traders = shape_of(node.args[1])[1], sequences.cp.heads.size
        if groups % traders:
            raise ConfigError(f"attention {where(node)}has {groups} key heads, which {traders} ranks cannot trade")
    _split(part, whole, sequences)
    for node, window, scale in zip(_attention(traced), windows, scales, strict=True):
        traced.attention[node] = Attend(sequences.cp, scale, window, node.meta["val"].stride())
    return traced


def without_masks(traced: Traced) -> None:
    """Attention of (q, k, v) alone; what made masks is dead."""
    for node in _attention(traced):
        node.args, node.kwargs = node.args[:3], {}


def _attention(traced: Traced) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.target is ATTENTION]


def _window(node: fx.Node, traced: Traced) -> int | None:
    """The sliding window of a causal attention, None: it has none. Raises ConfigError for another attention."""
    given, at = arguments(node), f"attention {where(node)}"
    queries, keys = shape_of(node.args[0])[-2], shape_of(node.args[1])[-2]
    if given.get("dropout_p"):
        raise ConfigError(f"{at}drops weights ({given['dropout_p']}), which draws otherwise with documents or ranks")
    if not queries == keys == shape_of(traced.inputs[0])[1]:
        raise ConfigError(f"{at}of {queries} tokens to {keys} is not a whole sequence's to itself")
    mask = given.get("attn_mask")
    if mask is None:
        if not given.get("is_causal"):
            raise ConfigError(f"{at}sees later tokens: give it is_causal=True")
        return None
    value = worked_out(mask, traced, MOST_OF_A_MASK)
    if value is None:
        if _without_values(traced):
            return None
        raise ConfigError(f"{at}has a mask that depends on the input, on parameters, or on over 16,384 tokens")
    if value.is_floating_point():
        if not bool(((value == 0) | (value < HIDDEN)).all()):
            raise ConfigError(f"{at}adds numbers to its scores (a bias of positions), which our core does not")
        value = value == 0
    value = value.expand(*value.shape[:-2], queries, keys).reshape(-1, queries, keys)
    seen, at_keys = int(value[0, -1].sum()), torch.arange(keys)
    behind = at_keys[:, None] - at_keys
    if not bool((value == ((behind >= 0) & (behind < seen))).all()):
        raise ConfigError(f"{at}has a mask that is neither causal nor a sliding window")
    return seen if seen < keys else None


def _without_values(traced: Traced) -> bool:
    """Whether the module is only looked at."""
    return any(tensor.is_meta for _, tensor in traced.states.values())


def _split(part: Traced, whole: Traced, sequences: Sequences) -> None:
    """Checks that tokens are computed one by one; gives a rank that shares sequences its own rows of what depends on
    the length."""
    constants = {node for node, (_, tensor) in part.states.items() if not isinstance(tensor, nn.Parameter)}
    fixed = constants | repeatable(part.graph, constants)  # what depends on no input and on no parameter
    live, shared = needed_by([part.result]), sequences.cp.size > 1
    problem = f"{sequences}: with a part of the tokens the module computes other operations"
    pairs = [(node, other) for node, other in side_by_side(part, whole, problem) if node in live]
    for node, other in pairs if shared else ():
        if node in fixed and any(user in live and user not in fixed for user in node.users):
            _pick(node, other, part, whole, sequences)
    views, rows = Views(str(sequences)), dict[fx.Node, int]()
    for node, other in pairs:
        if node not in fixed and node.target is not ATTENTION:
            at = f"{sequences}: {where(node)}{name_of(node)}"
            _check_by_token(node, other, at, shared=shared)
            _check_rows(node, other, at, rows)
            views.follow(node, other)


def _pick(node: fx.Node, other: fx.Node, traced: Traced, whole: Traced, sequences: Sequences) -> None:
    """Replaces a value that depends on the length by the rows of it that belong to the rank's tokens."""
    have, want = shape_of(node), shape_of(other)
    differ = [dim for dim, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
    if len(differ) > 1 or any(want[dim] != have[dim] * sequences.cp.size for dim in differ):
        raise ConfigError(
            f"context parallelism: {where(node)}{name_of(node)} makes {list(want)} for all tokens and {list(have)} for "
            "a rank's; one dimension of tokens is wanted (is there a mask outside scaled_dot_product_attention?)"
        )
    value, part = worked_out(other, whole, MOST_OF_A_MASK), worked_out(node, traced, MOST_OF_A_MASK)
    if (value is None or part is None) and not _without_values(traced):
        raise ConfigError(f"context parallelism: {where(node)}{name_of(node)} has no value for {list(want)} tokens")
    if value is None or part is None:
        value = torch.empty(have, dtype=node.meta["val"].dtype, device="meta")
    elif differ:
        value = value.index_select(differ[0], sequences.places(want[differ[0]]))
    elif not torch.equal(value, part):
        raise ConfigError(f"context parallelism: {where(node)}{name_of(node)} depends on the number of tokens")
    else:
        return
    with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
        held = traced.graph.placeholder(f"of_own_tokens_{len(traced.states)}")
    held.meta = dict(node.meta)
    traced.states[held] = (held.name, value)
    node.replace_all_uses_with(held)


def _check_by_token(node: fx.Node, other: fx.Node, at: str, *, shared: bool) -> None:
    """Raises ConfigError for an operation of a part of the tokens that mixes them. at: what the message begins with."""
    name = name_of(node).rstrip("_")
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    table = name == "index" and cut_dim(node.all_input_nodes[0], other.all_input_nodes[0]) is None
    if not (pointwise or table or name in BY_TOKEN):
        raise ConfigError(f"{at} may mix tokens; beside attention each must be computed by itself")
    for dims, argument, uncut in reduced(node, other):
        have, want = shape_of(argument), shape_of(uncut)
        lost = next((dim for dim in dims if have[dim] != want[dim]), None)
        if lost is not None:
            raise ConfigError(f"{at} works along {want[lost]} tokens; beside attention each must be computed by itself")
    inputs = zip(node.all_input_nodes, other.all_input_nodes, strict=True)
    new = cut_dim(node, other) is not None and all(cut_dim(a, b) is None for a, b in inputs)
    if new and shared and name not in ("expand", "getitem"):
        raise ConfigError(f"{at} takes rows by the number of tokens; look them up by positions (an embedding)")


def _check_rows(node: fx.Node, other: fx.Node, at: str, rows: dict[fx.Node, int]) -> None:
    """Raises ConfigError where tokens are regrouped. rows: of a value, how many belong to a token, one after the other,
    along the dimension of tokens (1 where it is not in there)."""
    rows[node], name = max([1, *(rows.get(each, 1) for each in node.all_input_nodes)]), name_of(node)
    old, before, after = cut_before(node, other)
    if before is None or after is None:
        return
    if name not in (*VIEWS, "cat", "repeat_interleave"):
        return
    had, has = math.prod(shape_of(old)[: before + 1]), math.prod(shape_of(other)[: after + 1])
    if had != has and (name == "cat" or has % had and (had % has or rows[node] % (had // has))):
        raise ConfigError(f"{at} makes {list(shape_of(other))} of {list(shape_of(old))}, whose tokens it mixes")
    rows[node] = rows[node] * has // had
