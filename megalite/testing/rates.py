"""Megatron-LM's formulas for the learning rates and the weight decay of a step, without `megalite.optim`."""

import math
from collections.abc import Callable
from typing import NamedTuple

from megalite.config import Config, OptimizerConfig


class Rates(NamedTuple):
    """Learning rates of a step: of the word embedding and the output layer, and of the rest."""

    rest: float
    ends: float

    def of(self, name: str) -> float:
        return self.ends if name in ("embedding.word_embeddings.weight", "head.output.weight") else self.rest


class Factors(NamedTuple):
    """Of a parameter's learning rate, weight decay and epsilon."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


def factors_of(config: Config, decayed: frozenset[str]) -> Callable[[str], Factors]:
    """Name -> what table 1 of CompleteP (arXiv 2505.01618, alpha 1) says of it, or Megatron-LM's muP where no depth is
    given. decayed: matrices and embeddings."""
    model, given = config.model, config.model.mup
    if not given.use_mup:
        return lambda name: Factors()
    m = model.hidden_size / (given.mup_base_hidden_size or model.hidden_size)
    ends = ("embedding.", "head.output.", "head.final_norm.")
    deep = given.mup_base_num_layers

    def factors(name: str) -> Factors:
        hidden = name in decayed and not name.startswith(ends) and not name.endswith("conv")
        if deep is None:
            return Factors(1 / m, 1.0, 1 / m) if hidden else Factors()
        epsilon = 1 / m if name.startswith(ends) else deep / (m * model.num_layers)
        return Factors(1 / m if hidden else 1.0, m if hidden else 1.0, epsilon)

    return factors


def learning_rates(settings: OptimizerConfig, samples: int, batch: int, whole: int) -> Rates:
    """Of the step after `samples` samples, as Megatron's OptimizerParamScheduler has them; `whole`: of the training."""
    rest = _learning_rate(settings, settings.lr, settings.min_lr, samples, batch, whole)
    if settings.decoupled_lr is None:
        return Rates(rest, rest)
    low = settings.min_lr if settings.decoupled_min_lr is None else settings.decoupled_min_lr
    return Rates(rest, _learning_rate(settings, settings.decoupled_lr, low, samples, batch, whole))


def _learning_rate(settings: OptimizerConfig, lr: float, low: float, samples: int, batch: int, whole: int) -> float:
    warmup = settings.lr_warmup.lr_warmup_samples or settings.lr_warmup.lr_warmup_iters * batch
    decay = settings.lr_decay.lr_decay_samples or (settings.lr_decay.lr_decay_iters or 0) * batch or whole
    if warmup and samples <= warmup:
        begin = settings.lr_warmup.lr_warmup_init
        return begin + (lr - begin) * samples / warmup
    if settings.lr_decay_style == "constant":
        return lr
    if samples > decay:
        return low
    if settings.lr_decay_style == "WSD":
        return low + (lr - low) * _final(settings, samples, decay, batch)
    part = (samples - warmup) / (decay - warmup)
    if settings.lr_decay_style == "inverse-square-root":
        return max(low, lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
    if settings.lr_decay_style == "linear":
        return low + (1 - part) * (lr - low)
    assert settings.lr_decay_style == "cosine"
    return low + (math.cos(math.pi * part) + 1) / 2 * (lr - low)


def _final(settings: OptimizerConfig, samples: int, decay: int, batch: int) -> float:
    """The part of the rate above its lowest that WSD's last decay leaves."""
    wsd = settings.lr_wsd_decay
    length = wsd.lr_wsd_decay_samples or (wsd.lr_wsd_decay_iters or 0) * batch
    part = max(0.0, 1 - (decay - samples) / length)
    forms = {
        "linear": 1 - part,
        "cosine": (1 + math.cos(math.pi * part)) / 2,
        "exponential": 2 * math.exp2(-part) - 1,
        "minus_sqrt": 1 - math.sqrt(part),
    }
    return forms[wsd.lr_wsd_decay_style]


def decay_of(settings: OptimizerConfig, samples: int, whole: int) -> float:
    """The weight decay of the step after `samples` samples."""
    ramp = settings.weight_decay_ramp
    if ramp.weight_decay_incr_style == "constant":
        return settings.weight_decay
    first, last = ramp.start_weight_decay, ramp.end_weight_decay
    assert first is not None and last is not None
    part = min(1.0, samples / whole)
    if ramp.weight_decay_incr_style == "cosine":
        part = (math.cos(math.pi * (1 - part)) + 1) / 2
    return first + part * (last - first)
