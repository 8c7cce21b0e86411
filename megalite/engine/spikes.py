"""Spikes: updates whose gradient norm is far above those of the updates before (after OLMo-core's `SkipStepOptimizer`).

    norm > mean + sigma x deviation of the window   ->  a spike: logged, skipped, the end of the run, or a rollback

The window, of the latest norms, is the same on all ranks, and so is the device's decision; the host reads it with the
norm. A spike enters as the limit that it exceeded: it does not hide the next, and a new level soon is the usual one.
The deviation is at least a quarter of the mean: norms of large batches hardly differ, small ones double without harm.
"""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.config import Spikes
from megalite.errors import RuntimeFailure
from megalite.events import tell_event

logger = logging.getLogger(__name__)

_LEAST_DEVIATION = 0.25


class SpikeGuard:
    """The window, and what is done about a spike. max_skipped: how many `in_a_row` end the run. speaks: whether this
    rank logs. withholds: whether the update of a spike is left out. rolls_back: the iteration of the first spike that
    asks for a rollback, until that is done (`megalite/train/rollback.py`)."""

    def __init__(self, settings: Spikes, device: torch.device, *, max_skipped: int, speaks: bool) -> None:
        self.settings, self.speaks, self._max_skipped = settings, speaks, max_skipped
        # The latest at the end; not a number where there was none yet.
        self._norms = torch.full((settings.spike_window,), math.nan, dtype=torch.float64, device=device)
        self.withholds, self.in_a_row = settings.on_spike != "log", 0
        self.rolls_back: int | None = None

    def limit(self, norm: Tensor) -> Tensor:
        """What this update's norm (0-dim fp64) may be, infinite before half of the window is there; then takes it into
        the window if it is finite."""
        mean = self._norms.nanmean()
        deviation = (self._norms - mean).square().nanmean().sqrt()
        limit = mean + self.settings.spike_sigma * torch.maximum(deviation, _LEAST_DEVIATION * mean)
        limit = torch.where(2 * self._norms.isfinite().sum() >= len(self._norms), limit, math.inf)
        entered = torch.cat([self._norms[1:], torch.minimum(norm, limit)[None]])
        self._norms = torch.where(norm.isfinite(), entered, self._norms)
        return limit

    def resolve(self, update: int, norm: float, limit: float, *, iteration: int = 0) -> bool:
        """The host's part, once it knows both: was it a spike? Raises RuntimeFailure where the run ends."""
        if not limit < norm < math.inf:
            self.in_a_row = 0
            return False
        settings = self.settings
        what = (
            f"update {update + 1}: the gradient norm of {norm:.4g} is above {limit:.4g}, the mean of those before and "
            f"{settings.spike_sigma:g} deviations"
        )
        if settings.on_spike == "stop":
            raise RuntimeFailure(
                f"{what}; stopped before the update, the weights are as they were; look at the data and `lr`, or "
                "continue with `on_spike`=skip"
            )
        if self.speaks:
            logger.warning("%s%s", what, ": skipped" if self.withholds else "")
            tell_event("spike", iteration=iteration, update=update + 1, norm=norm, limit=limit)
        if settings.on_spike == "rollback" and self.rolls_back is None:
            self.rolls_back = iteration
        self.in_a_row += self.withholds
        if self.in_a_row >= self._max_skipped:
            raise RuntimeFailure(
                f"{what}; the last {self.in_a_row} were skipped (`max_skipped_updates`={self._max_skipped}): these are "
                "no spikes; continue from a checkpoint before them with a lower `lr` or a larger `spike_sigma`"
            )
        return True

    def window(self) -> list[float]:
        """The norms in the window, oldest first."""
        return [norm for norm in self._norms.tolist() if math.isfinite(norm)]

    def restore(self, norms: Sequence[float], in_a_row: int) -> None:
        """Continues with the window of a run before, or the newest of it that fit, and its spikes in a row."""
        held = ([math.nan] * len(self._norms) + [*norms])[-len(self._norms) :]
        self._norms.copy_(torch.tensor(held, dtype=torch.float64))
        self.in_a_row = in_a_row
