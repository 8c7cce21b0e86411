"""Masters and moments in a file of this rank's, mapped into memory (`--optimizer-offload-path`).

    [ masters of bucket 0 | masters of bucket 1 | ... | moments | ... ]

Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857. The file is memory that is larger than the host's, not a
checkpoint: it is made anew by every start and has no name, so that the system frees its space however the process ends.
Pages of the bucket that is being stepped are in memory, those of the next one are on their way, and the rest the system
may write out and drop whenever it needs room.
"""

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megalite.errors import ConfigError


class StateFile:
    """Memory for tensors in a file on the disk of `folder`, with space reserved: a write can never find it full.

    Raises ConfigError where the folder cannot take such a file.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.nbytes = 0
        self._regions: dict[int, mmap.mmap] = {}
        if not Path(folder).is_dir():
            raise ConfigError(f"`optimizer_offload_path`={folder}: no such folder; make it first")
        try:
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed with this object)
        except OSError as error:
            raise ConfigError(
                f"`optimizer_offload_path`={folder}: no file can be written there ({error.strerror}); give another "
                "folder"
            ) from error
        self.descriptor = file.fileno()
        self.close = weakref.finalize(self, file.close)

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in the file. Raises ConfigError where the disk is full."""
        shape = torch.Size(shape)
        size = math.ceil(shape.numel() * dtype.itemsize / mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if not size:
            return torch.empty(shape, dtype=dtype)
        try:
            _reserve(self.descriptor, self.nbytes, size)
            region = mmap.mmap(self.descriptor, size, offset=self.nbytes)
        except OSError as error:
            free = os.statvfs(self.folder)
            raise ConfigError(
                f"`optimizer_offload_path`={self.folder}: no room for {size / 1e6:,.1f} MB more of masters and moments "
                f"({error.strerror}): this rank's file has {self.nbytes / 1e6:,.1f} MB, "
                f"{free.f_bavail * free.f_frsize / 1e6:,.1f} MB are free; give a folder on a larger disk"
            ) from error
        self.nbytes += size
        tensor = torch.frombuffer(region, dtype=dtype, count=shape.numel()).view(shape)
        self._regions[tensor.data_ptr()] = region
        return tensor

    def take_in(self, x: Tensor) -> None:
        """Moves `x` into the file; it stays the same object, and its views stay where they are."""
        if self.region_of(x) is None:
            moved = self.empty(x.shape, x.dtype).copy_(x)
            x.set_(moved.untyped_storage(), 0, moved.size(), moved.stride())

    def region_of(self, x: Tensor) -> mmap.mmap | None:
        """The mapped region that holds the storage of `x`; None where that is not in the file."""
        return self._regions.get(x.untyped_storage().data_ptr())

    def announce(self, regions: Iterable[mmap.mmap]) -> None:
        """Says that these will be read soon: the system begins to read them."""
        _advise(regions, "MADV_WILLNEED")

    def let_go(self, regions: Iterable[mmap.mmap]) -> None:
        """Says that these are not needed for now. What has been written stays: the mapping is shared with the file."""
        _advise(regions, "MADV_DONTNEED")


def _reserve(descriptor: int, begin: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, begin, size)
    else:
        os.ftruncate(descriptor, begin + size)


def _advise(regions: Iterable[mmap.mmap], advice: str) -> None:
    if hasattr(mmap, advice):
        for region in regions:
            region.madvise(getattr(mmap, advice))
