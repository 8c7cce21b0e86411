"""Page-locked memory of activations: little larger than they are, and lent again only when nobody uses it."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megalite.parallel.tiers import Mover, mover


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
