"""Latent attention in the model section (MLA, DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of
one small vector a token, which is all that generation keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option

SWITCH = "multi_latent_attention"


@dataclass(frozen=True, kw_only=True)
class Latent(Spelled):
    """Widths of latent attention. Without the switch attention has keys and values of its own."""

    multi_latent_attention: bool = option(False, "latent attention (MLA) in place of grouped queries")
    q_lora_rank: int | None = option(
        None, "width of the vector that queries are made of; unset: of the block's input", ge=1, needs=SWITCH
    )
    kv_lora_rank: int = option(32, "width of the vector that keys and values are made of", ge=1, needs=SWITCH)
    qk_head_dim: int = option(128, "channels of a head's queries and keys without position", ge=1, needs=SWITCH)
    qk_pos_emb_head_dim: int = option(
        64, "further ones that RoPE rotates; their keys are the same for all heads", ge=2, needs=SWITCH
    )
    v_head_dim: int = option(128, "channels of a head's values", ge=1, needs=SWITCH)
    latent_norm_epsilon: float | None = option(
        None, "epsilon of the norms of the two vectors; unset: `norm_epsilon`", gt=0, needs=SWITCH
    )

    @property
    def qk_channels(self) -> int:
        """Channels of a query or key of one head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def compressed(self) -> int:
        """Numbers of a token that its keys and values follow from, the rotated part of its keys included."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim
