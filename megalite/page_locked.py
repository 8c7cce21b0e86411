"""Host memory of exactly the size that is asked for, page-locked where a GPU copies to it or from it."""

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def host_bytes(nbytes: int, *, pinned: bool) -> Tensor:
    """`[nbytes]` of zeros, uint8. pinned: page-locked, which needs CUDA."""
    memory = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):  # first touch costs one fault for 2 MiB, not for 4 KiB
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    space = torch.frombuffer(memory, dtype=torch.uint8)
    if pinned:  # as it is: torch's allocator of page-locked memory rounds up to a power of two
        driver: Any = torch.cuda.cudart()
        if int(driver.cudaHostRegister(space.data_ptr(), len(memory), 0)) == 0:
            weakref.finalize(memory, driver.cudaHostUnregister, space.data_ptr())
    return space[:nbytes]
