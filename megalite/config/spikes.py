"""What is done about updates whose gradient is out of proportion."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option

WITHHELD = ("skip", "stop")
"""Values of `on_spike` that leave out the update of a spike."""


@dataclass(frozen=True, kw_only=True)
class Spikes(Spelled):
    """Spikes of the gradient norm."""

    on_spike: str | None = option(
        None,
        "an update whose gradient norm is far above those before it: log it, skip it (at most `max_skipped_updates` in "
        "a row), or stop before it",
        choices=("log", "skip", "stop"),
    )
    spike_sigma: float = option(
        6.0, "how many standard deviations above the mean of the window is far", gt=0, only_with="on_spike"
    )
    spike_window: int = option(
        128, "latest updates that are compared with; nothing is a spike before half of them", ge=2, only_with="on_spike"
    )
