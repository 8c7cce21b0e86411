"""An fp32 master in 16 bits: the bf16 weight is its upper half already.

    fp32 master     s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
    kept            bf16 weight          int16 remainder        2 + 2 bytes instead of 2 + 4

The weight is the master rounded to the nearest bf16 (halves away from zero), the remainder is the difference of the two
bit patterns, so the master comes back bit for bit. It exists only while its bucket is being stepped or saved.

Halves cannot go to even: every even weight would then have 2^16 + 1 masters, which 16 bits cannot tell apart.
"""

import torch
from torch import Tensor


class ParamRemainders:
    """The fp32 masters of a bucket's owned slice, in memory between `join` (or the start) and `split` only."""

    def __init__(self, weights: Tensor) -> None:
        assert weights.dtype == torch.bfloat16, "only a bf16 weight is the upper half of an fp32 number"
        self.weights = weights
        self.remainder = torch.zeros(weights.shape, dtype=torch.int16, device=weights.device)
        self.masters = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
        self.resident = True
        join_bits(self.weights, self.remainder, self.masters)

    def join(self) -> None:
        """Makes `masters` readable and writable."""
        if not self.resident:
            self.masters.untyped_storage().resize_(4 * self.masters.numel())
            self.resident = True
            join_bits(self.weights, self.remainder, self.masters)

    def split(self) -> None:
        """Writes `masters` into weights and remainder, and gives their memory back."""
        if self.resident:
            split_bits(self.masters, self.weights, self.remainder)
            self.masters.untyped_storage().resize_(0)
            self.resident = False


def split_bits(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """weights (bf16), remainder (int16) = the two parts of master (fp32)."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    weights.view(torch.int16).copy_(upper)
    remainder.copy_(bits - (upper << 16))


def join_bits(weights: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Undoes `split_bits`, exactly."""
    bits = master.view(torch.int32)
    bits.copy_(weights.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(remainder)
