"""Loss scaling: fp16 gradients below 6e-8 are zero, so the loss is multiplied by a scale and the gradient divided by
it.

One interface, three kinds: no scale (bf16, fp32, fp64), a constant one, and a dynamic one that grows until gradients
overflow.
"""

from __future__ import annotations

from typing import Any, Protocol


class LossScaler(Protocol):
    """`scale` multiplies the loss; `update` is told after every step whether a gradient was not finite."""

    @property
    def scale(self) -> float: ...

    @property
    def previous(self) -> float:
        """The scale before the latest update."""
        ...

    @property
    def skips_non_finite(self) -> bool:
        """A step with a non-finite gradient is skipped as a matter of course (otherwise it is a failure)."""
        ...

    @property
    def at_minimum(self) -> bool:
        """The scale cannot fall: if this one overflows, so does whatever follows."""
        ...

    def update(self, *, found_non_finite: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ConstantLossScaler:
    """Always the same scale. With `scale` 1 it does nothing: the scaler of bf16, fp32 and fp64."""

    def __init__(self, scale: float = 1.0, *, skips_non_finite: bool = False) -> None:
        self._scale = float(scale)
        self._skips = skips_non_finite

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def previous(self) -> float:
        return self._scale

    @property
    def skips_non_finite(self) -> bool:
        return self._skips

    @property
    def at_minimum(self) -> bool:
        return True

    def update(self, *, found_non_finite: bool) -> None:
        """The scale does not move."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A constant scale comes from the flags, never from a checkpoint."""


class DynamicLossScaler:
    """Doubles after `window` good steps in a row, halves after `hysteresis` overflows (Micikevicius et al., arXiv
    1710.03740).

    `hysteresis` overflows are tolerated between two growths before every further one halves the scale (Megatron's rule:
    the tolerance is given back only when the scale grows).
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
    ) -> None:
        self._scale = self._previous = float(initial_scale)
        self.min_scale = float(min_scale)
        self.window = window
        self.hysteresis = hysteresis
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self._good_steps = 0
        self._tolerance = hysteresis

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def previous(self) -> float:
        return self._previous

    @property
    def skips_non_finite(self) -> bool:
        return True

    @property
    def at_minimum(self) -> bool:
        return self._scale <= self.min_scale

    def update(self, *, found_non_finite: bool) -> None:
        """Counts one step. Call it on every rank with the same (agreed) answer."""
        self._previous = self._scale
        if found_non_finite:
            self._good_steps = 0
            self._tolerance -= 1
            if self._tolerance <= 0:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._good_steps += 1
        if self._good_steps == self.window:
            self._good_steps = 0
            self._tolerance = self.hysteresis
            self._scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """What a bitwise resume needs."""
        return {
            "scale": self._scale,
            "previous": self._previous,
            "good_steps": self._good_steps,
            "tolerance": self._tolerance,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scale continues; the empty state of a constant scaler (another precision) leaves it at the beginning."""
        if not state:
            return
        self._scale = float(state["scale"])
        self._previous = float(state.get("previous", self._scale))
        self._good_steps = int(state["good_steps"])
        self._tolerance = int(state["tolerance"])
