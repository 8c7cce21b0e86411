"""RoPE in the model section: how it reads further than it was trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config.schema import Spelled, option


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Spelled):
    """Scaling of RoPE, to read further than it was trained."""

    rotary_seq_len_interpolation_factor: float = option(
        1.0, "positions are divided by it before rotation (linear scaling)", ge=1
    )
    use_rope_scaling: bool = option(False, "scale the rotary frequencies")
    rope_scaling_type: str = option(
        "llama3",
        "llama3 (Llama 3.1) or yarn (YaRN, with its logits' temperature)",
        choices=("llama3", "yarn"),
        only_with="use_rope_scaling",
    )
    rope_scaling_factor: float = option(8.0, "factor for the low frequencies", ge=1, only_with="use_rope_scaling")
    rope_scaling_original_length: int = option(
        8192, "sequence length of the training before it", ge=1, only_with="use_rope_scaling"
    )
    yarn_beta_fast: float = option(
        32.0, "YaRN: channels that turn more often in that length are kept", gt=0, only_with="use_rope_scaling"
    )
    yarn_beta_slow: float = option(
        1.0, "YaRN: those that turn less often are slowed down fully", gt=0, only_with="use_rope_scaling"
    )
    yarn_correction_range_round_to_int: bool = option(
        True, "YaRN: blend between whole channels", only_with="use_rope_scaling"
    )
    mscale: float | None = option(
        None,
        "YaRN: temperature (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1); unset: 0.1 ln factor + 1",
        gt=0,
        needs="mscale_all_dim",
    )
    mscale_all_dim: float | None = option(None, "YaRN: see mscale", gt=0, needs="mscale")

    @property
    def kind(self) -> str | None:
        """How frequencies are scaled, None: not."""
        return self.rope_scaling_type if self.use_rope_scaling else None

    @property
    def yarn_temperature(self) -> float:
        """What YaRN multiplies cosines and sines by."""
        log = 0.1 * math.log(self.rope_scaling_factor)
        if self.mscale is None or self.mscale_all_dim is None:
            return log + 1.0
        return (log * self.mscale + 1.0) / (log * self.mscale_all_dim + 1.0)

    @property
    def latent_temperature(self) -> float:
        """What latent attention multiplies queries and keys by beside it."""
        if self.kind != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return 0.1 * math.log(self.rope_scaling_factor) * self.mscale_all_dim + 1.0
