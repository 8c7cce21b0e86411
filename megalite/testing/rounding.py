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
SOAP and Adafactor into more. How much is not argued but measured, in one process: `permuted_sums` runs the oracle with
the terms of every product permuted and summed in two parts, each rounded as a rank's partial sum is, and samples in
another order. The largest distance of `DRAWS` such runs from the plain one is the spread, `FACTOR` times it the bound
of every step but the first. In bf16 it is the first one's too: partial sums are rounded to 2^-9.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.gradient import GradSink
from megalite.microbatch import Microbatch
from megalite.parallel.tensor.products import PlainProducts
from megalite.testing.oracle import Pupil, Trajectory, pipedream_reference, reference

FP32 = 1e-6
"""Relative: of losses and norms in fp32 wherever weights are the same; the least bound of any."""
FACTOR = 4.0
DRAWS = 3


@contextmanager
def permuted_sums(seed: int) -> Iterator[None]:
    """Within the context, one process adds up in another order, different for each seed: see the module's text."""
    generator, order = torch.Generator().manual_seed(seed), random.Random(seed)
    forward, input_gradient = PlainProducts.forward, PlainProducts.input_gradient
    add_weight_gradient, gradients = PlainProducts.add_weight_gradient, Pupil.gradients

    def halves(length: int) -> Sequence[Tensor]:
        return [part for part in torch.randperm(length, generator=generator).chunk(2) if len(part)]

    def in_parts(self: PlainProducts, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
        first, *others = halves(x.shape[-1])
        y, kept = forward(self, x[..., first], weight[..., first], bias)
        for part in others:
            y = y + forward(self, x[..., part], weight[..., part], None)[0]
        return y, kept

    def back_in_parts(self: PlainProducts, dy: Tensor, weight: Tensor, kept: Any) -> Tensor:
        weight = weight.flatten(0, -2)
        first, *others = halves(dy.shape[-1])
        dx = input_gradient(self, dy[..., first], weight[first], kept)
        for part in others:
            dx = dx + input_gradient(self, dy[..., part], weight[part], kept)
        return dx

    def tokens_in_parts(self: PlainProducts, sink: GradSink, dy: Tensor, x: Tensor, kept: Any) -> None:
        tokens = torch.randperm(len(x), generator=generator)
        add_weight_gradient(self, sink, dy[tokens], x[tokens], kept)

    def samples_permuted(
        self: Pupil, weights: dict[str, Tensor], samples: Sequence[Microbatch]
    ) -> tuple[float, dict[str, Tensor]]:
        return gradients(self, weights, order.sample(list(samples), len(samples)))

    with ExitStack() as stack:
        for owner, name, replacement in (
            (PlainProducts, "forward", in_parts),
            (PlainProducts, "input_gradient", back_in_parts),
            (PlainProducts, "add_weight_gradient", tokens_in_parts),
            (Pupil, "gradients", samples_permuted),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
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
