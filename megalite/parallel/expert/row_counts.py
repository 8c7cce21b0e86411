"""How many rows each expert of a rank has, on the device; and on the host, for those who cannot do without."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from megalite.late_reading import LateReading


class RowCounts:
    """Rows of a rank's experts, one expert after the other.

    table: int64 `[ep, ep, E]`, rows from one rank to another's experts. rank: this one.
    reading: of the table, on its way to the host. rows: of all experts.
    """

    def __init__(self, table: Tensor, rank: int, reading: LateReading, rows: int) -> None:
        self._arriving, self._rank, self._reading, self._rows = table[:, rank], rank, reading, rows

    @cached_property
    def on_device(self) -> Tensor:
        """The counts, int64 `[E]`."""
        return self._arriving.sum(0) if len(self._arriving) > 1 else self._arriving[0]

    @cached_property
    def ends(self) -> Tensor:
        """Where each expert's rows end, int32 `[E]`, on the device."""
        return self.on_device.cumsum(0, dtype=torch.int32)

    @cached_property
    def experts(self) -> Tensor:
        """The expert of each row, int64 `[rows]`, on the device, until `forget_experts`."""
        return torch.repeat_interleave(self.on_device, output_size=self._rows)

    def forget_experts(self) -> None:
        """Backward needs none: memory that graphs would keep."""
        vars(self).pop("experts", None)

    @cached_property
    def on_host(self) -> tuple[int, ...]:
        """The counts. Waits for their copy, which was started before the rows were sent."""
        return tuple(map(sum, zip(*(row[self._rank] for row in self._reading.read()), strict=True)))

    @cached_property
    def together(self) -> RowCounts:
        """The rows as those of one matrix that all experts share."""
        return _Together(self)


class _Together(RowCounts):
    def __init__(self, apart: RowCounts) -> None:
        self.on_device, self.ends = apart.on_device.sum(0, keepdim=True), apart.ends[-1:]
        self.on_host = (sum(apart.on_host),)
        self._rows = apart._rows
