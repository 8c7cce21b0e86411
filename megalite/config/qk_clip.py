"""QK-clip in the model section."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option


@dataclass(frozen=True, kw_only=True)
class QKClip(Spelled):
    """What bounds the scores of attention by scaling projections after each update."""

    qk_clip: bool = option(
        False, "after each update scale the projections of queries and keys whose largest score was above a threshold"
    )
    qk_clip_threshold: float = option(100.0, "the largest score that stays as it is", gt=0, only_with="qk_clip")
    qk_clip_alpha: float = option(
        0.5, "share of the factor, as its exponent, that queries take; keys take the rest", ge=0, le=1,
        only_with="qk_clip",
    )  # fmt: skip
