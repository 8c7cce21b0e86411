"""Freed memory of a CPU rank, given back to the system.

On a CPU the peak of the process is what counts, and glibc keeps what has been freed between pieces that live: a third
of what a rank of ZeRO-3 would take. Two requests change that, at the price of touching pages for the first time more
often: pieces of 8 MiB and more (gathered layers, scratch, logits) get pages of their own, which leave when they are
freed; and the activations' memory is given back once a batch, before the last gradients ask for more. Nothing happens
on a GPU, or where the C library is another one.
"""

import ctypes
import functools
from typing import Any

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
OWN_PAGES_FROM = 8 << 20
KEPT_AT_THE_TOP = 32 << 20


@functools.cache
def _glibc() -> Any:
    """The process's C library, set up as above; None if it is not glibc."""
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim, library.mallopt  # noqa: B018 (whether they exist)
    except (AttributeError, OSError, TypeError):
        return None
    library.mallopt(M_MMAP_THRESHOLD, OWN_PAGES_FROM)
    library.mallopt(M_TRIM_THRESHOLD, KEPT_AT_THE_TOP)  # setting one stops glibc from adapting both
    return library


def prefer_own_pages(device: torch.device) -> None:
    """Large pieces get pages of their own from here on."""
    if device.type == "cpu":
        _glibc()


def give_back_freed_memory(device: torch.device) -> None:
    """Returns the pages of all that has been freed."""
    if device.type == "cpu" and (library := _glibc()) is not None:
        library.malloc_trim(0)
