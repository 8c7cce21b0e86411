"""Choice of an attention kernel: the first of the table that can do what is needed and works on this device.

    kernel     where      what it can                                          limits
    flash      anywhere   parts of a ring, causal, with the queries' log-sums  heads of 8 n <= 256 channels; tried
    blocked    CPU        plain causal attention; keeps half of the weights    as many queries as keys, not too many
    fused      anywhere   plain causal attention; keeps nothing of size s x s  all queries, or the last one
    varlen     GPU        documents and windows                                as many queries as keys; 16 bits; tried
    flex       GPU        documents, windows, caps, sinks, dropout; compiled   as many queries as keys, or parts of a
                                                                               ring; heads of >= 16 channels; not in
                                                                               inference; tried
    tiled      anywhere   everything: fp32 scores, too

What is `tried` depends on device, dtype and the library: a small case and its gradient are computed once and compared
with tiles (`trials.py`). The choice is logged.

Adding one: its file in this room, a row of `KERNELS` before those that it is faster than, and its call in `core.py`
(`context.py`, where parts of a ring are meant); without it the assertion there fails. What it keeps:
`inventory/activation_bytes.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megalite.inventory import BLOCKED_FROM, BLOCKED_UP_TO
from megalite.nn.attention.masked import FLEX, VARLEN
from megalite.nn.attention.trials import flash_works, flex_parts_work, masked_works

FLASH, BLOCKED, FUSED, TILED = "flash", "blocked", "fused", "tiled"  # beside VARLEN and FLEX
WIDEST_HEAD, NARROWEST_HEAD = 256, 16


@dataclass(frozen=True)
class Need:
    """Requirements of one attention.

    dtype: of the matrix products.
    queries, keys: tokens. channels: of a head.
    hides: documents or a window hide keys that causality shows.
    bends: scores have a cap, or softmaxes sinks (in parts, a ring's caller adds them).
    drops, rewrites: weights are dropped, or wanted in fp32 where the kernels narrow them.
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
    drops: bool = False
    in_parts: bool = False
    keeps_weights: bool = True

    @property
    def plain(self) -> bool:
        """Causal attention and nothing else, to keys that are all there."""
        return not (self.hides or self.bends or self.drops or self.rewrites or self.in_parts)


class Kernel(NamedTuple):
    """can: whether it does what is needed. works: whether the library has it there, and it is right."""

    name: str
    can: Callable[[Need], bool]
    works: Callable[[Need], bool] | None = None


def choose(need: Need) -> str:
    """The name of the kernel."""
    for kernel in KERNELS:
        if kernel.can(need) and (kernel.works is None or kernel.works(need)):
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
    bent = need.bends or need.drops or need.in_parts
    narrow = need.dtype in (torch.bfloat16, torch.float16)
    return need.hides and not bent and narrow and _on_device(need) and need.queries == need.keys


def _flexible(need: Need) -> bool:
    alone = (need.hides or need.bends or need.drops) and not need.in_parts
    return alone and _on_device(need) and need.queries == need.keys and _may_compile()


def _in_flexible_parts(need: Need) -> bool:
    return need.in_parts and _on_device(need) and _may_compile()


def _on_device(need: Need) -> bool:
    """By a kernel that keeps its scores in fp32."""
    return not need.rewrites and need.device.type != "cpu" and need.channels >= NARROWEST_HEAD


def _may_compile() -> bool:
    """A kernel of its own takes longer to compile than tiles take for a text."""
    return not torch.is_inference_mode_enabled()


def _by_flash(need: Need) -> bool:
    plain = need.in_parts and not (need.hides or need.bends or need.drops or need.rewrites)
    return plain and need.channels % 8 == 0 and need.channels <= WIDEST_HEAD


KERNELS = (
    Kernel(FLASH, _by_flash, lambda need: flash_works(need.device, need.dtype)),
    Kernel(BLOCKED, _in_blocks),
    Kernel(FUSED, _fused),
    Kernel(VARLEN, _masked, lambda need: masked_works(VARLEN, need.device, need.dtype)),
    Kernel(FLEX, _flexible, lambda need: masked_works(FLEX, need.device, need.dtype, need.drops)),
    Kernel(FLEX, _in_flexible_parts, lambda need: flex_parts_work(need.device, need.dtype, need.drops)),
    Kernel(TILED, lambda need: True),
)
