"""Page-locked memory of activations: little larger than they are, and lent again only when nobody uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.parallel.tiers import Mover, mover
from megalite.rehearsal import DEVICE, watched_gpu


@pytest.mark.parametrize("numel", [1, 1000, 2049, 5000, (1 << 20) + 1, 3 << 20, (1 << 22) - 1])
def test_a_block_is_at_most_an_eighth_too_large(numel: int) -> None:
    asked: list[tuple[int, bool]] = []

    def host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
        asked.append((nbytes, pinned))
        return torch.zeros(nbytes, dtype=torch.uint8)

    x = torch.empty(numel, 1, dtype=torch.bfloat16)
    with patch.object(mover, "host_bytes", host_bytes):
        one = Mover(torch.device("cpu"))
        first, second = one._lent(x), one._lent(x)
        assert first.shape == x.shape and first.dtype == x.dtype and first.data_ptr() != second.data_ptr()
        place, holder = first.data_ptr(), [first]  # as the mover holds the host's end of a copy in flight
        del first
        third = one._lent(x)
        assert len(asked) == 3 and third.data_ptr() != place
        holder.clear()
        assert one._lent(x).data_ptr() == place and len(asked) == 3
    assert all(pinned and 0 <= size - x.nbytes <= max(4096, x.nbytes // 8) for size, pinned in asked)


def test_what_goes_there_and_back_at_once_is_staged_in_the_same_memory() -> None:
    """Of the mover's own, exactly pinned blocks: torch's allocator would round each up to a power of two."""
    sizes, pinned = [], []
    right, numbers = mover.host_bytes, torch.arange(3000.0)

    def counting(nbytes: int, *, pinned: bool) -> torch.Tensor:
        sizes.append(nbytes)
        return right(nbytes, pinned=pinned)

    with watched_gpu() as gpu, patch.object(mover, "host_bytes", counting):
        one, own = Mover(DEVICE), mover.host_bytes(12000, pinned=True).view(torch.float32)

        def noticing(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def made(*given: Any, **named: Any) -> torch.Tensor:
                pinned.extend([given] if named.get("pin_memory") else [])
                return make(*given, **named)

            return made

        with patch.multiple(torch, empty=noticing(torch.empty), empty_like=noticing(torch.empty_like)):
            for turn in range(6):
                there = one.upload((numbers + turn).view(50, 60).T)
                there += 1
                assert torch.equal(one.download(there.contiguous()), (numbers + turn + 1).view(50, 60).T)
            one.upload(own)  # where it is
        assert gpu.races == [] and pinned == []
    assert len(sizes) <= 4, "the caller's, and what copies that the host has not yet seen end hold"


def test_a_block_is_not_lent_again_while_a_copy_reads_it() -> None:
    """Uploads that nobody waits for: the host fills the next block while the device still reads the last."""
    numbers = torch.arange(3000.0)
    with watched_gpu() as gpu:
        one = Mover(DEVICE)
        there = [one.upload(numbers + turn) for turn in range(4)]
        for turn, x in enumerate(there):
            assert torch.equal(one.download(x), numbers + turn)
    assert gpu.races == []
