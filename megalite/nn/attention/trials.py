"""Whether a library's kernel of attention gives what tiles give here, in this dtype: a small case, tried once.
FlashAttention 3 takes the place of torch's own kernel on Hopper GPUs where it is installed and does."""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megalite.nn.attention.flash import FlashKernel
from megalite.nn.attention.masked import FLEX, MASKED, Attend
from megalite.nn.attention.parts import FlexKernel
from megalite.nn.attention.tiles import TileKernel, WeightDropout, tiled_attention
from megalite.parallel.context import empty_result
from megalite.visibility import Visibility

logger = logging.getLogger(__name__)

CLOSE = 0.02
"""Largest difference from tiles, as a part of the largest value; rounding to 16 bits stays below it."""
NEWER, PACKAGE, HOPPER = "FA3", "flash_attn_interface", 9


def apart(trial: Callable[..., bool]) -> Callable[..., bool]:
    """The trial in a thread of its own: its caller may be in recomputation, whose hooks take what autograd saves, or
    compute without gradients."""

    @functools.wraps(trial)
    def run(*given: Any, **named: Any) -> bool:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(trial, *given, **named).result()

    return run


@functools.cache
def flash_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Tries the kernel on parts, squares on the diagonal and whole rectangles, merged."""
    return _parts_work(FlashKernel(2), TileKernel(2), device, dtype, None)


@functools.cache
def flex_parts_work(device: torch.device, dtype: torch.dtype, drops: bool = False) -> bool:
    """Tries the kernel on parts with a cap, documents and a window; some queries see nothing of a part."""
    at = torch.arange(256)
    starts = torch.stack((at // 100 * 100, at * 0))
    drop = _half(128, device) if drops else None
    return _parts_work(FlexKernel(2, drop, 2.0), TileKernel(2, drop, 2.0), device, dtype, starts)


@apart
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
        logger.warning("attention to parts of a sequence without %s, which fails: %s", type(kernel).__name__, error)
        return False
    return fits


@functools.cache
@apart
def masked_works(name: str, device: torch.device, dtype: torch.dtype, drops: bool = False) -> bool:
    """Tries a kernel on documents in a window, varlen without one, too, flex with caps and sinks. drops: with
    dropout."""
    q, k, v, dy = _drawn(((256, 2, 2, 2, 64), (256, 2, 2, 64), (256, 2, 2, 64), (256, 2, 256)), device, dtype)
    at = torch.arange(256, device=device)
    starts = torch.stack((at // 100 * 100, at * 0))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.linspace(-2, 2, 4, device=device).requires_grad_()

    def result(attend: Attend, sight: Visibility, **bends: Any) -> tuple[Tensor, ...]:
        y = attend(q, k, v, sight, **bends)
        return y, *torch.autograd.grad(y, [*inputs, *([sinks] if "sinks" in bends else [])], dy)

    try:
        more: dict[str, Any] = {"drop": _half(256, device)} if drops else {}
        # Flex attention is compiled for each case: it is asked for all things at once.
        bends = {"softcap": 2.0, "sinks": sinks, **more} if name == FLEX else more
        sights = (
            Visibility.of(at, at, window=window, document_starts=starts, at=0)
            for window in (70, *(() if name == FLEX else (None,)))
        )
        worst = max(
            _worst(result(MASKED[name], sight, **bends), result(tiled_attention, sight, **bends)) for sight in sights
        )
    except Exception as error:  # whatever a library that cannot do it raises
        logger.warning("attention without %s, which fails on %s: %s", name, device, error)
        return False
    what = "with dropout" if drops else "to documents and windows"
    if worst >= CLOSE:
        logger.warning("attention %s without %s, whose results differ from those of tiles: %.3f", what, name, worst)
        return False
    logger.info("attention %s in %s on %s: %s", what, str(dtype)[6:], device, name)
    return True


def _half(queries: int, device: torch.device) -> WeightDropout:
    """Drops every second weight of so many queries, of two samples with two groups of two heads."""
    words = torch.randint(1 << 32, (4, 2 * queries), generator=torch.Generator().manual_seed(0))
    return WeightDropout(0.5, words.to(device))


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


def use_newer_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Activates FlashAttention 3 for the rest of this process, if torch can, it is installed and its results are right;
    says so. Not for sums of one order (`--deterministic-mode`), which its backward does not have."""
    library: Any = torch.nn.attention
    listed = getattr(library, "list_flash_attention_impls", list)
    if device.type != "cuda" or NEWER not in listed() or find_spec(PACKAGE) is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != HOPPER or torch.are_deterministic_algorithms_enabled():
        return False
    try:
        library.activate_flash_attention_impl(NEWER)
    except Exception as error:  # whatever a package of another version raises
        logger.warning("attention without FlashAttention 3, which cannot be activated: %s", error)
        return False
    flash_works.cache_clear()
    if flash_works(device, dtype):
        logger.info("attention by FlashAttention 3 (%s) on %s", PACKAGE, device)
        return True
    library.restore_flash_attention_impl()
    flash_works.cache_clear()
    logger.warning("attention without FlashAttention 3, whose results differ from those of tiles")
    return False
