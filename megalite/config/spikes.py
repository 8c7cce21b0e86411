"""What is done about updates whose gradient is out of proportion."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option


@dataclass(frozen=True, kw_only=True)
class Spikes(Spelled):
    """Spikes of the gradient norm."""

    on_spike: str | None = option(
        None,
        "an update whose gradient norm is far above those before it: log it, skip it (at most `max_skipped_updates` in "
        "a row), stop before it, or go back to a checkpoint and pass over the samples around it",
        choices=("log", "skip", "stop", "rollback"),
    )
    spike_sigma: float = option(
        6.0, "how many standard deviations above the mean of the window is far", gt=0, only_with="on_spike"
    )
    spike_window: int = option(
        128, "latest updates that are compared with; nothing is a spike before half of them", ge=2, only_with="on_spike"
    )
    rollback_iters: int = option(
        100, "rollback: how many iterations before a spike the samples begin that are passed over", ge=1
    )
    rollback_skip_iters: int = option(200, "rollback: how many iterations are passed over", ge=1)
    rollback_limit: int = option(
        3, "rollback: how many times the samples passed over may grow before the run ends instead", ge=1
    )
