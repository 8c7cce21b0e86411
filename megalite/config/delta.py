"""Linear attention in the model section: Gated DeltaNet (arXiv 2412.06464), a state in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option

VARIANT = "experimental_attention_variant"


@dataclass(frozen=True, kw_only=True)
class Delta(Spelled):
    """Layers whose tokens meet in a state, and the state's sizes."""

    experimental_attention_variant: str | None = option(
        None, "gdn: Gated DeltaNet in place of attention", choices=("gdn",)
    )
    linear_attention_freq: str | None = option(
        None,
        "layers that keep attention: N, every N-th; or a list, 1 without and 0 with it: '([1]*3+[0])*2'; unset: none",
        metavar="N|LIST",
        needs=VARIANT,
    )
    linear_key_head_dim: int = option(128, "channels of a head's queries and keys", ge=1, needs=VARIANT)
    linear_value_head_dim: int = option(128, "channels of a head's values", ge=1, needs=VARIANT)
    linear_num_key_heads: int = option(16, "heads of queries and keys", ge=1, needs=VARIANT)
    linear_num_value_heads: int = option(32, "heads of values, a multiple of those", ge=1, needs=VARIANT)
    linear_conv_kernel_dim: int = option(
        4, "tokens that the convolution before it looks at", ge=1, le=64, needs=VARIANT
    )

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def mixed(self) -> int:
        """Channels of a key head that the convolution mixes: query, key, values."""
        return 2 * self.linear_key_head_dim + self.group * self.linear_value_head_dim

    @property
    def value_size(self) -> int:
        """Width of all values together."""
        return self.linear_num_value_heads * self.linear_value_head_dim
