"""Choice of an attention kernel: the first of the table that can do what is needed and works on this device.

    kernel     where      what it can                                          limits
    flash      anywhere   parts of a ring, causal, with the queries' log-sums  heads of 8 n <= 256 channels; tried
    blocked    CPU        plain causal attention; keeps half of the weights    as many queries as keys, not too many
    fused      anywhere   plain causal attention; keeps nothing of size s x s  all queries, or the last one
    varlen     GPU        documents and windows                                as many queries as keys; 16 bits; tried
    flex       GPU        documents, windows, caps and sinks; compiled         as many queries as keys, or parts of a
                                                                               ring; heads of >= 16 channels; tried
    tiled      anywhere   everything: dropout of weights, fp32 scores

What is `tried` depends on device, dtype and the library: a small case and its gradient are computed once and compared
with tiles. The choice is logged.

Adding one: its file in this room, a row of `KERNELS` before those that it is faster than, and its call in `core.py`
(`context.py`, where parts of a ring are meant); without it the assertion there fails. What it keeps:
`inventory/activation_bytes.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.inventory import BLOCKED_FROM, BLOCKED_UP_TO
from megalite.nn.attention.flash import FlashKernel
from megalite.nn.attention.masked import MASKED, Attend
from megalite.nn.attention.parts import FlexKernel
from megalite.nn.attention.tiles import TileKernel, tiled_attention
from megalite.parallel.context import empty_result
from megalite.visibility import Visibility

logger = logging.getLogger(__name__)

FLASH, BLOCKED, FUSED, VARLEN, FLEX, TILED = "flash", "blocked", "fused", "varlen", "flex", "tiled"
WIDEST_HEAD, NARROWEST_HEAD = 256, 16
CLOSE = 0.02
"""Largest difference from tiles, as a part of the largest value; rounding to 16 bits stays below it."""


@dataclass(frozen=True)
class Need:
    """Requirements of one attention.

    dtype: of the matrix products.
    queries, keys: tokens. channels: of a head.
    hides: documents or a window hide keys that causality shows.
    bends: scores have a cap, or softmaxes sinks (in parts, a ring's caller adds them).
    rewrites: weights are dropped, or wanted in fp32 where the kernels narrow them.
    in_parts: the keys come in parts, whose log-sums are wanted.
    keeps_weights: what is of size s x s may be kept for the backward.
    """

    device: torch.device
    dtype: torch.dtype
    queries: int
    keys: int
    channels: int
    hides: bool
    rewrites: bool
    bends: bool = False
    in_parts: bool = False
    keeps_weights: bool = True

    @property
    def plain(self) -> bool:
        """Causal attention and nothing else, to keys that are all there."""
        return not (self.hides or self.bends or self.rewrites or self.in_parts)


class Kernel(NamedTuple):
    """can: whether it does what is needed. works: (device, dtype) -> whether the library has it there."""

    name: str
    can: Callable[[Need], bool]
    works: Callable[[torch.device, torch.dtype], bool] | None = None


def choose(need: Need) -> str:
    """The name of the kernel."""
    for kernel in KERNELS:
        if kernel.can(need) and (kernel.works is None or kernel.works(need.device, need.dtype)):
            return kernel.name
    raise AssertionError("tiles can do everything")


def _in_blocks(need: Need) -> bool:
    fits = need.queries == need.keys and BLOCKED_FROM <= need.keys <= BLOCKED_UP_TO
    return need.plain and need.device.type == "cpu" and fits and need.keeps_weights


def _fused(need: Need) -> bool:
    # Before torch 2.13 the compiler took the CPU kernel's log-sums for fp32 in fp64 too, and its backward failed.
    doubles = need.dtype == torch.float64 and need.device.type == "cpu"
    narrowed = doubles and torch.compiler.is_compiling() and torch.__version__ < "2.13"  # compared as versions
    return need.plain and need.queries in (1, need.keys) and not narrowed


def _masked(need: Need) -> bool:
    return need.hides and not need.bends and _flexible(need)


def _flexible(need: Need) -> bool:
    alone = (need.hides or need.bends) and not need.in_parts
    return alone and _compiled(need) and need.queries == need.keys


def _in_flexible_parts(need: Need) -> bool:
    return need.in_parts and _compiled(need)


def _compiled(need: Need) -> bool:
    """Flex attention keeps its scores in fp32."""
    return not need.rewrites and need.device.type != "cpu" and need.channels >= NARROWEST_HEAD


def _by_flash(need: Need) -> bool:
    plain = need.in_parts and not (need.hides or need.bends or need.rewrites)
    return plain and need.channels % 8 == 0 and need.channels <= WIDEST_HEAD


@functools.cache
def flash_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Tries the kernel on parts, squares on the diagonal and whole rectangles, merged."""
    return _parts_work(FlashKernel(2), TileKernel(2), device, dtype, None)


@functools.cache
def flex_parts_work(device: torch.device, dtype: torch.dtype) -> bool:
    """Tries the kernel on parts with a cap, documents and a window; some queries see nothing of a part."""
    at = torch.arange(256)
    starts = torch.stack((at // 100 * 100, at * 0))
    return _parts_work(FlexKernel(2, softcap=2.0), TileKernel(2, softcap=2.0), device, dtype, starts)


def _parts_work(
    kernel: TileKernel, tiles: TileKernel, device: torch.device, dtype: torch.dtype, starts: Tensor | None
) -> bool:
    """Of the second and last quarters of a sequence, whose keys come in two parts. starts: None for a kernel that takes
    positions on the host."""
    at = torch.arange(256)
    rows = torch.cat((at[64:128], at[192:]))
    case = _drawn(((128, 2, 2, 2, 64), (256, 2, 2, 64), (256, 2, 2, 64), (128, 2, 256)), device, dtype)

    def result(kernel: TileKernel, place: torch.device) -> tuple[Tensor, ...]:
        window, begins = (None, None) if starts is None else (70, starts[:, rows].to(place))
        return _gradients(
            kernel, Visibility.of(rows.to(place), at.to(place), window=window, document_starts=begins), *case
        )

    try:
        found = result(kernel, at.device if starts is None else device)
        fits = _worst(found, result(tiles, device)) < CLOSE
    except Exception as error:  # whatever a library that cannot do it raises
        logger.info("attention to parts of a sequence without %s, which fails: %s", type(kernel).__name__, error)
        return False
    return fits


@functools.cache
def masked_works(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Tries a kernel on documents, with and without a window; flex with caps and sinks, too."""
    q, k, v, dy = _drawn(((256, 2, 2, 2, 64), (256, 2, 2, 64), (256, 2, 2, 64), (256, 2, 256)), device, dtype)
    at = torch.arange(256, device=device)
    starts = torch.stack((at // 100 * 100, at * 0))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.linspace(-2, 2, 4, device=device).requires_grad_()

    def result(attend: Attend, sight: Visibility, **bends: Any) -> tuple[Tensor, ...]:
        y = attend(q, k, v, sight, **bends)
        return y, *torch.autograd.grad(y, [*inputs, *([sinks] if bends else [])], dy)

    try:
        cases: list[tuple[Visibility, dict[str, Any]]] = [
            (Visibility.of(at, at, window=window, document_starts=starts, at=0), {}) for window in (None, 70)
        ]
        if name == FLEX:
            cases += [
                (Visibility.of(at, at, window=window, document_starts=None, at=0), {"softcap": 2.0, "sinks": sinks})
                for window in (None, 70)
            ]
        fits = all(
            _worst(result(MASKED[name], sight, **bends), result(tiled_attention, sight, **bends)) < CLOSE
            for sight, bends in cases
        )
    except Exception as error:  # whatever a library that cannot do it raises
        logger.info("attention without %s, which fails on %s: %s", name, device, error)
        return False
    if fits:
        logger.info("attention to documents and windows in %s on %s: %s", str(dtype)[6:], device, name)
    return fits


def _drawn(shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


def _worst(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest difference, in those of each tensor's largest value; a difference that is no number is infinite."""
    each = [float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(found, expected, strict=True)]
    return max(x if x == x else float("inf") for x in each)


@torch.no_grad()
def _gradients(
    kernel: TileKernel, sight: Visibility, q: Tensor, k: Tensor, v: Tensor, dy: Tensor
) -> tuple[Tensor, ...]:
    """(result, dq, dk, dv), of keys that come in two parts."""
    operands = kernel.operands(q, k, v)
    out, lse = empty_result(operands[0])
    half = len(sight.keys) // 2
    parts = [
        (replace(sight, keys=sight.keys[at]), (operands[0], operands[1][:, at], operands[2][:, at]), at)
        for at in (slice(0, half), slice(half, None))
    ]
    for seen, part, _ in parts:
        kernel.forward(out, lse, part, seen)
    y = kernel.result(out, q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in operands)
    given = kernel.output_gradient(dy, y, q)
    for seen, part, at in parts:
        kernel.backward((dq, dk[:, at], dv[:, at]), *given, lse, part, seen)
    return y, *kernel.input_gradients((dq, dk, dv), (q, k, v))


KERNELS = (
    Kernel(FLASH, _by_flash, flash_works),
    Kernel(BLOCKED, _in_blocks),
    Kernel(FUSED, _fused),
    Kernel(VARLEN, _masked, functools.partial(masked_works, VARLEN)),
    Kernel(FLEX, _flexible, functools.partial(masked_works, FLEX)),
    Kernel(FLEX, _in_flexible_parts, flex_parts_work),
    Kernel(TILED, lambda need: True),
)
