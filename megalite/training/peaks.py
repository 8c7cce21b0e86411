"""Peak rates of known devices: what MFU, the share of the possible that a run reaches, is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megalite.config import TrainingConfig

__all__ = ["peak_flops"]

#: Dense bf16/fp16 rate with fp32 accumulation in FLOP/s from the vendors' data sheets, by a part of the device's name.
#: The first match counts, so longer names stand before shorter ones.
_HALF_PRECISION_PEAKS: Final[Mapping[str, float]] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
}


def peak_flops(device_name: str, config: TrainingConfig) -> float | None:
    """FLOP/s that one device could do at best at this configuration's precision; None where that is not known.

    Only the half-precision peaks of data-centre and common desktop GPUs are listed: a CPU's peak depends on clocks and
    instruction sets that its name does not tell.
    """
    if not config.precision.half:
        return None
    return next((peak for name, peak in _HALF_PRECISION_PEAKS.items() if name in device_name), None)
