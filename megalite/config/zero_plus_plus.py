"""ZeRO++ in the parallel section."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option


@dataclass(frozen=True, kw_only=True)
class ZeroPlusPlus(Spelled):
    """What ZeRO-3 sends less of (arXiv:2306.10209)."""

    zero_quantized_weights: bool = option(
        False, "weights travel in 8 bits, blocks of 64 between their least and largest: what computes is rounded"
    )
    zero_quantized_gradients: bool = option(
        False, "gradients travel in 4 bits, blocks of 64 by their largest: within a partition, then between partitions"
    )
    zero_hpz_partition_size: int = option(
        1,
        "neighbours among the ranks that ZeRO shards over (those of a node) that keep all weights from a step's "
        "first gather on, so that later ones stay among them",
        ge=1,
    )

    def __str__(self) -> str:
        """As the table of a start has it: `weights in 8 bits, partitions of 8`."""
        parts = {
            "weights in 8 bits": self.zero_quantized_weights,
            "gradients in 4 bits": self.zero_quantized_gradients,
            f"partitions of {self.zero_hpz_partition_size}": self.zero_hpz_partition_size > 1,
        }
        return ", ".join(part for part, on in parts.items() if on)

    @property
    def rounds(self) -> bool:
        """Whether numbers are other ones than those of plain ZeRO-3."""
        return self.zero_quantized_weights or self.zero_quantized_gradients

    @property
    def changes_gathers(self) -> bool:
        """Whether weights are gathered otherwise."""
        return self.zero_quantized_weights or self.zero_hpz_partition_size > 1

    @property
    def on(self) -> bool:
        """Whether any of it is asked for."""
        return self != ZeroPlusPlus()
