"""How far two runs may be apart that add up the same numbers in another order: the rounding model of the comparisons in
fp32 and bf16.

What a layout changes is the order of sums: over tokens and samples (data and context parallelism, micro-batches), over
heads, hidden units and vocabulary (tensor parallelism), over elements of gradients (buckets, ZeRO). A sum of n terms is
off by at most (n-1) u sum|t|, u = 2^-24 in fp32, 2^-9 in bf16, and by about sqrt(n) u where roundings are independent
(Higham and Mary, SIAM J. Sci. Comput. 41, 2019). Which of the two decides what a bound can be:

- Sums whose length grows with model or batch and whose terms have one sign (losses over tokens and micro-batches,
  squares over the elements of the global norm) are added in fp64, or in rows of fixed length whose sums are
  (`sum_of_squares`). They are off by some 1e-7, whatever their length; a plain fp32 sum here is what the bounds find.
- The other sums make single elements of activations and gradients: products of k terms of both signs, k a few thousand
  at most. Their roundings are of 2^-24 sqrt(k) and independent between elements, so in a loss and in a norm, which
  average over all of them, they cancel to less than 1e-7.

So in fp32 losses and norms agree within `FP32 = 1e-6` as long as weights do, for sums of any length. Weights that an
update has moved may differ by more: AdamW turns a rounding of a gradient into up to lr / eps times as much of a weight,
SOAP and Adafactor into more. How much is not argued but measured, in one process: `permuted_sums` runs the oracle
with the terms of every sum that a layout can cut permuted and added in two parts, each rounded as a rank's partial sum
is: products of layers and of adapters, forward and backward, gradients of embeddings, biases and norms, the losses'
logarithms of sums, Adafactor's means of rows and columns; samples come in another order. Attention is left: what
context parallelism merges is kept in fp32. The largest distance of `DRAWS` such runs from the plain one is the spread,
`FACTOR` times it the bound of every step but the first. In bf16 it is the first one's too: partial sums are rounded to
2^-9.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.microbatch import Microbatch
from megalite.testing.oracle import Pupil, Trajectory, pipedream_reference, reference
from megalite.testing.update_rules import Adafactor

FP32 = 1e-6
"""Relative: of losses and norms in fp32 wherever weights are the same; the least bound of any."""
FACTOR = 4.0
DRAWS = 3
HALVES = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


class PermutedSums(TorchDispatchMode):
    """Within the context, a process computes every sum in another order: its terms are permuted and added up in two
    parts, each rounded as a rank's partial sum is. Fused attention and a fused norm's forward are left as they are."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.generator = torch.Generator().manual_seed(seed)
        self.ways: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys((aten.mm, aten.bmm), self.product),
            **dict.fromkeys((aten.addmm, aten.baddbmm), self.added_product),
            **dict.fromkeys((aten.addmm_, aten.baddbmm_), self.accumulated_product),
            aten.sum: self.sum,
            aten.mean: self.mean,
            aten.index_add_: self.index_add,
            aten.log_softmax: self.log_softmax,
            aten.native_layer_norm_backward: self.norm_backward,
        }

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way, more = self.ways.get(operation.overloadpacket), dict(kwargs or {})
        if way is None or not args[0].is_floating_point() or operation._overloadname.startswith("dtype"):
            return operation(*args, **more)
        out = more.pop("out", None)
        found = way(operation, *args, **more)
        return found if out is None else out.copy_(found)

    def order(self, x: Tensor, dim: int) -> Tensor:
        return torch.randperm(x.shape[dim], generator=self.generator).to(x.device)

    def product(self, operation: Any, a: Tensor, b: Tensor) -> Tensor:
        """Parts of 16-bit operands that a CPU has widened to multiply them are rounded to what they were."""
        narrow = (dtype for dtype in HALVES if all(torch.equal(x.to(dtype).to(x.dtype), x) for x in (a, b)))
        dtype, parts = next(narrow, a.dtype), self.order(a, -1).tensor_split(2)
        return sum_of([(a[..., part] @ b[..., part, :]).to(dtype) for part in parts]).to(a.dtype)

    def added_product(self, operation: Any, x: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
        found: Tensor = factors.get("beta", 1) * x + factors.get("alpha", 1) * self.product(None, a, b)
        return found

    def accumulated_product(self, operation: Any, x: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
        for part in self.order(a, -1).tensor_split(2):
            operation(x, a[..., part], b[..., part, :], **factors)
            factors["beta"] = 1
        return x

    def sum(self, operation: Any, x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        dims = list(dims or range(x.dim()))
        for dim in dims:
            x = x.index_select(dim, self.order(x, dim))
        halves = x.tensor_split(2, max(dims, key=lambda dim: x.shape[dim])) if dims else [x]
        return sum_of([half.sum(dims, keepdim, dtype=dtype) for half in halves])

    def mean(self, operation: Any, x: Tensor, dims: Any = None, *more: Any, **named: Any) -> Tensor:
        return self.sum(None, x, dims, *more, **named) / math.prod(x.shape[dim] for dim in dims or range(x.dim()))

    def index_add(self, operation: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, **more: Any) -> Tensor:
        order = self.order(index, 0)
        found: Tensor = operation(x, dim, index[order], source.index_select(dim, order), **more)
        return found

    def log_softmax(self, operation: Any, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        order = self.order(x, dim)
        return x.index_select(dim, order).log_softmax(dim, dtype=dtype).index_select(dim, order.argsort())

    def norm_backward(self, operation: Any, dy: Tensor, x: Tensor, shape: Any, *more: Any) -> tuple[Any, ...]:
        """The gradient of the weight and of the bias, sums over tokens."""
        *statistics, weight, bias, mask = more
        first = operation(dy, x, shape, *statistics, weight, bias, [mask[0], False, False])[0]
        rows = [tensor.flatten(0, -1 - len(shape)) for tensor in (dy, x, *statistics)]
        found = []
        for part in self.order(rows[0], 0).tensor_split(2):
            dy, x, *statistics = (tensor[part] for tensor in rows)
            found.append(operation(dy, x, shape, *statistics, weight, bias, [False, *mask[1:]])[1:])
        asked = zip(mask[1:], *found, strict=True)
        return first, *(sum_of(parts) if wanted else None for wanted, *parts in asked)


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


@contextmanager
def permuted_sums(seed: int) -> Iterator[None]:
    """Within the context, the oracle adds up in another order, different for each seed, what a layout can cut: the
    gradients of its samples, Adafactor's rows and columns; the matrices of other rules are whole on a rank."""
    order, sums, gradients, update = random.Random(seed), PermutedSums(seed), Pupil.gradients, Adafactor.update_one

    def permuted_gradients(
        self: Pupil, weights: dict[str, Tensor], samples: Sequence[Microbatch]
    ) -> tuple[float, dict[str, Tensor]]:
        with sums:
            return gradients(self, weights, order.sample(list(samples), len(samples)))

    def permuted_update(*arguments: Any) -> None:
        with sums:
            update(*arguments)

    with patch.object(Pupil, "gradients", permuted_gradients), patch.object(Adafactor, "update_one", permuted_update):
        yield


def rerun(argv: Sequence[str], steps: int, *, delay: int = 0, stages: int = 0, together: int = 1) -> Trajectory:
    """The oracle, not from its cache."""
    if stages:
        return pipedream_reference.__wrapped__(tuple(argv), steps, stages, together)
    return reference.__wrapped__(tuple(argv), steps, delay)


class Bounds:
    """What a run of any layout must be near to: the oracle in the number format that `argv`, a configuration of one
    process, names. more: see `rerun`."""

    def __init__(self, argv: Sequence[str], steps: int, **more: int) -> None:
        self.argv, self.steps, self.more = tuple(argv), steps, more
        self.exact = "--bf16" not in argv and "--fp16" not in argv
        self.expected = rerun(self.argv, steps, **more)

    @cached_property
    def permuted(self) -> list[Trajectory]:
        """The same with permuted sums."""
        found = []
        for seed in range(DRAWS):
            with permuted_sums(seed):
                found.append(rerun(self.argv, self.steps, **self.more))
        return found

    def spread(self, what: str) -> float:
        """How far apart, relative, `losses` or `norms` of one process are at any step."""
        pairs = [zip(getattr(t, what), getattr(self.expected, what), strict=True) for t in self.permuted]
        return max((_distance(a, b) for pair in pairs for a, b in pair), default=0.0)

    def problems(self, losses: Sequence[float | None], norms: Sequence[float | None], *, begin: int = 0) -> list[str]:
        """One line for each number of a run, from step `begin` on, that is too far away. norms: none where an
        asynchronous schedule has none."""
        lines = []
        for what, found in (("losses", losses), ("norms", norms)):
            numbers = getattr(self.expected, what)[begin:]
            for step, (a, b) in enumerate(zip(found, numbers, strict=True), begin):
                distance, bound = _distance(a, b), FP32
                if distance > bound and (step or not self.exact):  # only now: it takes as long as `DRAWS` oracles
                    bound = max(bound, FACTOR * self.spread(what))
                if not distance <= bound:
                    lines.append(
                        f"{what} of step {step}: {a} instead of {b}: {distance:.2g} away, allowed are {bound:.2g}"
                    )
        return lines


def _distance(found: float | None, expected: float) -> float:
    """Relative; infinite where one of the two is no number."""
    distance = math.inf if found is None else abs(found - expected) / abs(expected)
    return math.inf if math.isnan(distance) else distance
