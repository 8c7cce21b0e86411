"""Collectives over an `Axis`.

The branch on axes of size 1 is here and nowhere else: over such an axis every function is the identity and touches no
process group. Names that end in `_` work in place; the others return new tensors. `async_op=True` returns
a handle whose `wait()` must be called before the result is read.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm import exchange
from megalite.comm.axis import Axis

ReduceOp = Literal["sum", "max", "min"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these two; 2.11 has only the older names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle(Protocol):
    """Something to wait for."""

    def wait(self) -> Any: ...


class Done:
    """The handle of work that is already complete."""

    def wait(self) -> None:
        return None


class _Timed:
    """A handle that counts the time spent waiting. Afterwards it holds no memory, and waiting again costs nothing."""

    def __init__(self, work: Handle, axis: Axis) -> None:
        self._work: Handle | None = work
        self._axis = axis

    def wait(self) -> None:
        if self._work is not None:
            with self._axis.waits:
                self._work.wait()
            self._work = None


def _handle(work: Handle, axis: Axis, *, async_op: bool) -> Handle:
    timed = _Timed(work, axis)
    if async_op:
        return timed
    timed.wait()
    return Done()


def _through_memory(x: Tensor, axis: Axis) -> bool:
    return axis.shared is not None and (x.device.type != "cuda" or axis.group is None)


def all_reduce_(x: Tensor, axis: Axis, *, op: ReduceOp = "sum", async_op: bool = False) -> Handle:
    """x = op over the axis of x, in place."""
    if axis.size == 1:
        return Done()
    if _through_memory(x, axis):
        return _handle(axis.shared.all_reduce_(x, op), axis, async_op=async_op)
    with axis.waits:
        work = dist.all_reduce(x, op=_OPS[op], group=axis.group, async_op=async_op)
    return _Timed(work, axis) if async_op else Done()


def all_reduce(x: Tensor, axis: Axis, *, op: ReduceOp = "sum") -> Tensor:
    """op over the axis of x; a new tensor (x itself over an axis of size 1)."""
    if axis.size == 1:
        return x
    result = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(result, axis, op=op)
    return result


def all_gather_into(
    out: Tensor, x: Tensor, axis: Axis, *, sizes: Sequence[int] | None = None, async_op: bool = False
) -> Handle:
    """out = the ranks' x one after the other along dim 0. `x` may be this rank's part of `out`.

    sizes: of the ranks' parts of dim 0 (None: equal).
    """
    return _move_into(out, x, axis, sizes, gathers=True, async_op=async_op)


def reduce_scatter_into(
    out: Tensor, x: Tensor, axis: Axis, *, sizes: Sequence[int] | None = None, async_op: bool = False
) -> Handle:
    """out = this rank's part along dim 0 of the sum over the axis of x. sizes: as in `all_gather_into`."""
    return _move_into(out, x, axis, sizes, gathers=False, async_op=async_op)


def _move_into(
    out: Tensor, x: Tensor, axis: Axis, sizes: Sequence[int] | None, *, gathers: bool, async_op: bool
) -> Handle:
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done()
    parts = None if sizes is None or len(set(sizes)) == 1 else list(sizes)  # not equal, perhaps empty
    if parts is None and _through_memory(x, axis):
        shared = axis.shared
        work = (shared.all_gather_into if gathers else shared.reduce_scatter_into)(out, x)
        return _handle(work, axis, async_op=async_op)
    whole = out if gathers else x
    large = whole.numel() * whole.element_size() >= 1 << 20 and whole.device.type == "cpu"
    if (large or parts is not None) and dist.get_backend(axis.group) == "gloo":
        # which scatters and gathers large tensors more slowly than direct messages do, and knows no unequal parts
        start = exchange.start_all_gather if gathers else exchange.start_reduce_scatter
        return _handle(start(out, x, axis, parts), axis, async_op=async_op)
    source = x.contiguous()
    how = {"group": axis.group, "async_op": async_op}
    with axis.waits:
        if parts is None:
            work = _all_gather_single(out, source, **how) if gathers else _reduce_scatter_single(out, source, **how)
        elif gathers:  # NCCL broadcasts or reduces parts in one group
            work = dist.all_gather(list(out.split(parts)), source, **how)
        else:
            work = dist.reduce_scatter(out, list(source.split(parts)), **how)
    return _Timed(work, axis) if async_op else Done()


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """`[n, ...]` -> `[size * n, ...]`: the ranks' x one after the other along dim 0."""
    if axis.size == 1:
        return x
    out = torch.empty((axis.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    all_gather_into(out, x, axis)
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """`[n, ...]` -> `[n / size, ...]`: this rank's part along dim 0 of the sum over the axis."""
    if axis.size == 1:
        return x
    out = torch.empty((x.shape[0] // axis.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    reduce_scatter_into(out, x, axis)
    return out


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """`[size, ...]` -> `[size, ...]`: part j is sent to rank j, part i of the result is from rank i."""
    if axis.size == 1:
        return x
    out, source = torch.empty_like(x), x.contiguous()
    if axis.group is None:  # nobody is there (`make_axis`)
        return out
    with axis.waits:
        dist.all_to_all_single(out, source, group=axis.group)
    return out


def start_all_to_all_rows(x: Tensor, traffic: Sequence[Sequence[int]], axis: Axis) -> tuple[Tensor, Handle]:
    """`[sent, ...]` -> `[received, ...]`, rank after rank: traffic[i][j] rows go from rank i to rank j. Valid once
    the handle has been waited for."""
    if axis.size == 1:
        return x, Done()
    sent, received = list(traffic[axis.rank]), [row[axis.rank] for row in traffic]
    out = x.new_empty((sum(received), *x.shape[1:]))
    if _through_memory(x, axis):
        return out, _Timed(axis.shared.all_to_all_rows(out, x, traffic), axis)
    with axis.waits:
        work = dist.all_to_all_single(out, x.contiguous(), received, sent, group=axis.group, async_op=True)
    return out, _Timed(work, axis)


def barrier(axis: Axis) -> None:
    """Returns when every rank of the axis has called it: the host waits, not only its device's stream."""
    if axis.size > 1:
        token = torch.zeros(1, device=device_of(axis))
        all_reduce_(token, axis)
        token.item()


def agree_max(value: float, axis: Axis) -> float:
    """The largest of the ranks' numbers: the same decision everywhere."""
    if axis.size == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64, device=device_of(axis))
    all_reduce_(box, axis, op="max")
    return float((box.cpu() if box.is_cuda else box).numpy()[0])


def device_of(axis: Axis) -> torch.device:
    """The device that tensors must be on to be sent over the axis."""
    if axis.size == 1:
        return torch.device("cpu")
    if axis.group is None:  # nobody's
        return torch.device("meta")
    backend = dist.get_backend(axis.group)
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
