"""Multi-token prediction in the model section (DeepSeek-V3, arXiv 2412.19437, 2.2): behind the last block further ones,
each of which predicts one token further.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option


@dataclass(frozen=True, kw_only=True)
class FurtherTokens(Spelled):
    """How many tokens beyond the next one are predicted, and what that counts in the loss."""

    mtp_num_layers: int | None = option(
        None, "tokens beyond the next that are predicted, each by a block of its own; unset: none", ge=1, le=16
    )
    mtp_loss_scaling_factor: float = option(
        0.1, "weight of the mean of their losses beside that of the next token", ge=0, needs="mtp_num_layers"
    )

    @property
    def depth(self) -> int:
        """How many, 0 without."""
        return self.mtp_num_layers or 0
