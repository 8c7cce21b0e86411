"""Where a parameter's gradient goes: between the layers, which compute it, and the buckets, which own the memory.

A trained parameter may carry a `GradSink` in `param.sink`: a view of a flat main-gradient buffer (fp32, or fp64 in fp64
mode). A layer that computes a weight gradient itself adds it straight into the sink (`addmm`: one pass over memory
instead of three); a gradient that autograd computes arrives through a post-accumulate hook. When a sink has received
everything that the last micro-batch contributes, it reports so, and its bucket can be reduced while the rest of the
backward is still running.

`WeightGradQueue` splits a backward in two (Zero Bubble Pipeline Parallelism, arXiv 2401.10241): while it collects,
layers hand over the computation of their weight gradient instead of running it, and the executor runs it later as the
action `W`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Node(Function):
    """`torch.autograd.Function` with a type for `apply`, which torch's lacks. Its backward is not differentiated."""

    apply: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls) -> None:
        setattr(cls, "backward", staticmethod(once_differentiable(cls.backward)))  # noqa: B010


# Elements that are widened at a time. A CPU kernel that adds or sums in a wider dtype first makes a wide copy of its
# whole operand; this copy stays in the processor's cache.
WIDENED_ELEMENTS = 1 << 18
NORM_ROW = 256
"""Elements of which a sum of squares is added up in fp32."""


def widened(x: Tensor) -> Tensor:
    """In fp32, or in fp64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def add_widened(target: Tensor, x: Tensor) -> Tensor:
    """target += x of the same shape and any float dtype."""
    if x.dtype == target.dtype or x.device.type != "cpu" or x.numel() <= WIDENED_ELEMENTS:
        return target.add_(x)
    rows = max(1, WIDENED_ELEMENTS * len(x) // x.numel())
    for part, addend in zip(target.split(rows), x.split(rows), strict=True):
        part.add_(addend)
    return target


def accumulates_wide(a: Tensor, target: Tensor) -> bool:
    """Whether a GEMM with 16-bit operands can accumulate into fp32 directly: without rounding, in one pass."""
    can = a.is_cuda and target.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16)
    return can and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")


def add_product(target: Tensor, a: Tensor, b: Tensor, *, fresh: bool, scratch: Tensor | None = None) -> None:
    """target += a @ b, `[n, k] @ [k, m]`, in the target's dtype where the backend can.

    fresh: target is uninitialised and taken for 0. scratch: memory for a @ b in the operands' dtype.
    """
    if a.dtype != target.dtype and accumulates_wide(a, target):
        wide: Any = {"out_dtype": target.dtype, "out": target}  # torch's stubs do not know it yet
        torch.mm(a, b, **wide) if fresh else torch.addmm(target, a, b, **wide)
    elif a.dtype != target.dtype:
        product = torch.mm(a, b, out=scratch)
        target.copy_(product) if fresh else add_widened(target, product)
    elif fresh:
        torch.mm(a, b, out=target)
    else:
        target.addmm_(a, b)


def sum_widened(x: Tensor) -> Tensor:
    """Sum of `[n, h]` over n in the wider of fp32 and its dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dtype == dtype or x.device.type != "cpu" or x.numel() <= WIDENED_ELEMENTS:
        return x.sum(0, dtype=dtype)
    parts = [part.sum(0, dtype=dtype) for part in x.split(max(1, WIDENED_ELEMENTS // x.shape[1]))]
    return torch.stack(parts).sum(0)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of contiguous tensors of one device: fp64, 0-dim, on that device.

    A CPU kernel adds up a norm one by one in the dtype of its result: in fp32 1e-5 is lost of 1e6 elements, 4e-3 of
    5e7. Here only rows of 256 elements are summed in fp32, 32 additions to each lane of the processor, and the rows'
    norms in fp64. Each rounding is of 2^-24, so the norm is right to 1e-6 whatever the numbers (32 * 2^-24 / 2;
    measured: 2e-7 of equal ones, 1e-9 of random ones), however long the tensors; as fast, and with 1/256 of their
    memory on top.
    """
    norms = [part for x in tensors for part in _row_norms(x.view(-1))]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    together = torch.cat(norms)
    if together.numel() > WIDENED_ELEMENTS:  # which a CPU kernel would copy to fp64 as a whole
        return sum_of_squares([together])
    norm: Tensor = torch.linalg.vector_norm(together, dtype=torch.float64)
    return norm.square()


def _row_norms(x: Tensor) -> Iterator[Tensor]:
    """Numbers with the same norm as `x`, 1/256 as many: the norm of each row, and what the last row leaves."""
    wide = torch.promote_types(x.dtype, torch.float32)
    for part in x.split(WIDENED_ELEMENTS) if x.dtype != wide and x.device.type == "cpu" else (x,):
        whole = part.numel() // NORM_ROW * NORM_ROW
        if whole:
            yield torch.linalg.vector_norm(part[:whole].view(-1, NORM_ROW), dim=-1, dtype=wide)
        if whole < part.numel():
            yield part[whole:].to(wide)


@dataclass(slots=True, eq=False, repr=False)
class GradSink:
    """Accumulates one parameter's gradient into `grad`, a view of the parameter's shape in the main-gradient dtype.

    The first contribution of a batch overwrites what the buffer held (`reopen` marks the beginning of a batch), which
    saves the pass over memory that zeroes it. To accumulate by hand, read `grad`, which is zero if nothing
    has arrived yet, write into it, and call `done`.

    After `expect(n)` the n-th contribution is the last one of the batch and calls `on_ready`. A further contribution
    raises, since the reduction may have begun without it.

    uses: contributions of one micro-batch (2 for an embedding whose weight is also the output layer of the same stage).
    on_ready: called when the last contribution of a batch has arrived.
    on_open: called before the first contribution. A buffer that exists only while it is needed is allocated there and
        handed over by `use_buffer`.
    tap: gets what `TappedProducts` multiply, `[n, out]` and `[n, in]`.
    """

    buffer: Tensor = field(default_factory=lambda: torch.empty(0))
    _: KW_ONLY
    uses: int = 1
    on_ready: Callable[[], None] | None = None
    on_open: Callable[[], None] | None = None
    fresh: bool = field(default=True, init=False)
    remaining: int | None = field(default=None, init=False)
    tap: Callable[[Tensor, Tensor], None] | None = field(default=None, init=False)

    @property
    def grad(self) -> Tensor:
        """The gradient so far, ready to be accumulated into."""
        if self._opens():
            self.buffer.zero_()
        return self.buffer

    def use_buffer(self, buffer: Tensor) -> None:
        """From now on the gradient is accumulated in `buffer`, which is uninitialised."""
        self.buffer = buffer

    def reopen(self) -> None:
        """A batch begins: the next contribution overwrites, and any number of them may follow."""
        self.fresh, self.remaining = True, None

    def expect(self, contributions: int) -> None:
        """This batch has `contributions` more, perhaps none."""
        self.remaining = contributions
        if contributions == 0 and self.on_ready is not None:
            self.on_ready()

    def add(self, gradient: Tensor) -> None:
        """grad += gradient (any float dtype, as many elements)."""
        if self._opens():
            self.buffer.copy_(gradient.view(self.buffer.shape))
        else:
            add_widened(self.buffer, gradient.view(self.buffer.shape))
        self.done()

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        """grad += gradient * scale (0-dim), on a device in one pass if it can; may overwrite `gradient`."""
        if gradient.device.type == "cpu" or not (self.fresh or self.buffer.dtype == gradient.dtype):
            return self.add(gradient.mul_(scale))
        fresh = self._opens()
        addend = gradient.view(self.buffer.shape)
        torch.mul(addend, scale, out=self.buffer) if fresh else self.buffer.addcmul_(addend, scale)
        return self.done()

    def addmm(self, a: Tensor, b: Tensor) -> None:
        """grad += a @ b: `[n, k] @ [k, m]`, accumulated in the main-gradient dtype where the backend can."""
        fresh = self._opens()
        add_product(self.buffer.view(a.shape[0], b.shape[1]), a, b, fresh=fresh)
        self.done()

    def addmm_each(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """grad[i] += a_i @ b_i, `[n, k_i] @ [k_i, m]`, for every i along the first dimension; k_i may be 0."""
        fresh = self._opens()
        for target, (a, b) in zip(self.buffer.view(len(pairs), -1), pairs, strict=True):
            matrix = target.view(a.shape[0], b.shape[1])
            if a.shape[1]:
                add_product(matrix, a, b, fresh=fresh)
            elif fresh:
                matrix.zero_()
        self.done()

    def done(self) -> None:
        """Counts one contribution; called by hand after writing into `grad`."""
        if self.remaining is None:
            return
        assert self.remaining > 0, (
            "a gradient arrived after the last one of its batch: wrong number of uses or micro-batches"
        )
        self.remaining -= 1
        if self.remaining == 0 and self.on_ready is not None:
            self.on_ready()

    def _opens(self) -> bool:
        """Whether this is the first contribution, for which the buffer is opened."""
        fresh, self.fresh = self.fresh, False
        if fresh and self.on_open is not None:
            self.on_open()
        return fresh


def sink_of(parameter: Tensor) -> GradSink | None:
    """The parameter's sink, or None if its gradient goes to `.grad` as usual."""
    return getattr(parameter, "sink", None)


def into_sink(weight: Tensor) -> Tensor:
    """The weight; what autograd finds as gradient of the result is one contribution to the sink, where it has one."""
    return _IntoSink.apply(weight)


class _IntoSink(Node):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.sink = sink_of(weight)
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        if ctx.sink is None:
            return gradient
        ctx.sink.add(gradient.contiguous())
        return None


def attach_sink(parameter: nn.Parameter, sink: GradSink) -> None:
    """Routes all of the parameter's gradient into `sink`, whether a layer adds it itself or autograd accumulates it."""
    if sink_of(parameter) is None:
        parameter.register_post_accumulate_grad_hook(_move_into_sink)
    parameter.sink = sink  # type: ignore[attr-defined]  # ours, on a tensor of torch's


def _move_into_sink(parameter: Tensor) -> None:
    sink = sink_of(parameter)
    gradient = parameter.grad
    assert sink is not None
    if gradient is None:  # a layer has put it into the sink itself; autograd's accumulation node runs anyway
        return
    parameter.grad = None
    sink.add(gradient)


class Postponed(NamedTuple):
    """A weight gradient that is computed later. sink: to which it adds; None: one that nobody waits for."""

    compute: Callable[[], None]
    sink: GradSink | None = None

    def __call__(self) -> None:
        self.compute()


class WeightGradQueue:
    """Postpones weight-gradient computations while they are collected; one per stage."""

    def __init__(self) -> None:
        self._items: list[Postponed] | None = None

    @property
    def collecting(self) -> bool:
        """Whether what is put now runs later."""
        return self._items is not None

    def put(self, compute: Callable[[], None], sink: GradSink | None = None) -> None:
        """Runs `compute` now, or keeps it for later while collecting. sink: to which it adds."""
        if self._items is None:
            compute()
        else:
            self._items.append(Postponed(compute, sink))

    def give(
        self, sink: GradSink | None, add: Callable[[GradSink], None], alone: Callable[[], Tensor]
    ) -> Tensor | None:
        """A weight gradient: runs `add(sink)`, now or later, and returns None; without a sink returns `alone()`, which
        is autograd's."""
        if sink is None:
            return alone()
        self.put(lambda: add(sink), sink)
        return None

    @contextmanager
    def collect(self) -> Iterator[list[Postponed]]:
        """Computations put inside the `with` are not run but appended to the yielded list."""
        assert self._items is None, "weight gradients are being collected already"
        self._items = items = list[Postponed]()
        try:
            yield items
        finally:
            self._items = None
