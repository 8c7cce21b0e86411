"""Learning rate and weight decay as pure functions of the number of samples consumed.

The unit is samples, so that an iteration of a growing batch weighs what it should; settings given in iterations are
multiplied by the global batch size. The first step of a warm-up is made at `warmup_init` (Megatron's rule: the schedule
is read before the step's own samples are counted), and a step that is skipped (fp16 overflow) does not advance the
schedule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
RampStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up from `warmup_init` to `lr`, then a decay to `min_lr`. All lengths in samples.

    decay_samples: where the decay ends (counted from the start of training, warm-up included); `min_lr` holds after it.
    wsd_decay_samples: length of the final decay of WSD (warm-up, stable, decay: arXiv 2404.06395), which ends at
    `decay_samples`.
    """

    lr: float
    min_lr: float = 0.0
    style: DecayStyle = "linear"
    decay_samples: int = 1
    warmup_samples: int = 0
    warmup_init: float = 0.0
    wsd_style: WsdStyle = "exponential"
    wsd_decay_samples: int = 0

    def __call__(self, samples: int) -> float:
        """The learning rate of the step that comes after `samples` consumed samples."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.warmup_init + (self.lr - self.warmup_init) * samples / self.warmup_samples
        if self.style == "constant":
            return self.lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_samples, 1) / max(samples, 1)))
        return self.min_lr + self._coefficient(samples) * (self.lr - self.min_lr)

    def _coefficient(self, samples: int) -> float:
        form: str = self.style
        begin = self.warmup_samples
        if form == "WSD":
            form, begin = self.wsd_style, self.decay_samples - self.wsd_decay_samples
            if samples <= begin:
                return 1.0
        return FORMS[form](_ratio(samples - begin, self.decay_samples - begin))


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay from `start` to `end` over `ramp_samples`; `end` holds after it."""

    start: float
    end: float
    style: RampStyle = "constant"
    ramp_samples: int = 0

    def __call__(self, samples: int) -> float:
        """The weight decay of the step that comes after `samples` consumed samples."""
        if self.style == "constant" or samples > self.ramp_samples:
            return self.end
        ratio = _ratio(samples, self.ramp_samples)
        coefficient = ratio if self.style == "linear" else _half_cosine(1.0 - ratio)
        return self.start + coefficient * (self.end - self.start)


def _ratio(done: int, whole: int) -> float:
    return done / whole if whole > 0 else 1.0


def _half_cosine(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


FORMS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": _half_cosine,
    "exponential": lambda ratio: 2.0 * math.pow(0.5, ratio) - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}
"""Decays from 1 at ratio 0 to 0 at ratio 1."""
