"""Loss scaling: fp16 gradients below 6e-8 are zero, so the loss is multiplied by a scale and the gradient divided by
it."""

from copy import copy
from typing import Any

from megalite.config import LossScaling, TrainingConfig


class LossScaler:
    """`scale` multiplies the loss. This one is constant; with 1 it is the scaler of bf16, fp32 and fp64.

    previous: the scale before the latest update. skips_non_finite: a step with a non-finite gradient is skipped as a
    matter of course (otherwise it is a failure).
    """

    def __init__(self, scale: float = 1.0, *, skips_non_finite: bool = False) -> None:
        self.scale = self.previous = float(scale)
        self.skips_non_finite = skips_non_finite

    @property
    def at_minimum(self) -> bool:
        """The scale cannot fall: if this one overflows, so does whatever follows."""
        return True

    def update(self, *, found_non_finite: bool) -> None:
        """Counts one step. Call it on every rank with the same (agreed) answer."""

    def foresee(self) -> tuple[float, float]:
        """(The scale if the next step is taken, if it is skipped)."""
        taken, skipped = copy(self), copy(self)
        taken.update(found_non_finite=False)
        skipped.update(found_non_finite=True)
        return taken.scale, skipped.scale

    def state_dict(self) -> dict[str, Any]:
        """State for a bitwise resume; a constant scale comes from the flags, never from a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scale continues; an empty state (of another precision) leaves it at the beginning."""


class DynamicLossScaler(LossScaler):
    """Doubles after `loss_scale_window` good steps in a row, halves after `hysteresis` overflows (Micikevicius et al.,
    arXiv 1710.03740).

    `hysteresis` overflows are tolerated between two growths before every further one halves the scale (Megatron's rule:
    the tolerance is given back only when the scale grows).
    """

    def __init__(self, settings: LossScaling) -> None:
        super().__init__(settings.initial_loss_scale, skips_non_finite=True)
        self._settings = settings
        self._good_steps = 0
        self._tolerance = settings.hysteresis

    @property
    def at_minimum(self) -> bool:
        return self.scale <= self._settings.min_loss_scale

    def update(self, *, found_non_finite: bool) -> None:
        self.previous = self.scale
        if found_non_finite:
            self._good_steps = 0
            self._tolerance -= 1
            if self._tolerance <= 0:
                self.scale = max(self.scale / 2, self._settings.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._settings.loss_scale_window:
            self._good_steps = 0
            self._tolerance = self._settings.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        scales = {"scale": self.scale, "previous": self.previous}
        return scales | {"good_steps": self._good_steps, "tolerance": self._tolerance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.scale = float(state["scale"])
        self.previous = float(state.get("previous", self.scale))
        self._good_steps = int(state["good_steps"])
        self._tolerance = int(state["tolerance"])


def build_scaler(training: TrainingConfig) -> LossScaler:
    """fp16: constant or dynamic scale; every other precision needs none."""
    settings = training.loss_scaling
    if not training.precision.fp16:
        return LossScaler()
    if settings.loss_scale is not None:
        return LossScaler(settings.loss_scale, skips_non_finite=True)
    return DynamicLossScaler(settings)
