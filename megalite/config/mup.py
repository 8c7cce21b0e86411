"""muP and CompleteP in the model section: what was tuned on a small model holds for a wide and deep one.

Let m = h / base h and l = L / base L. A weight of a block that is a matrix has both of its sides growing with h:

                                   muP                 CompleteP in addition
    its initial deviation          / sqrt(m)           of what writes to the residual stream: as if L were base L
    its learning rate              / m
    its weight decay                                   x m, so that lr x decay is what it was
    its Adam epsilon               / m                 / (m l); of a block's vectors / (m l), of all else / m
    scores of attention            / d                 d: channels of a head, in place of sqrt(d)
    logits                         / m
    what a branch adds                                 / l

muP: Yang et al., arXiv 2203.03466, as Megatron-LM has it (`--use-mup`); CompleteP: Dey et al., arXiv 2505.01618,
table 1. Muon's matrices have updates of their own size, sqrt(rows / columns), and so need no other learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megalite.config.schema import Spelled, option
from megalite.config.update_rules import OPTIMIZER_SPECS

if TYPE_CHECKING:
    from megalite.config.model import ModelConfig
    from megalite.config.root import Config

DECOUPLED = ("embedding.word_embeddings.weight", "head.output.weight")
"""What Megatron-LM's decoupled learning rate is of; positions are not."""


class Mup(Spelled, flag="mup", needs="use_mup"):
    """muP and CompleteP: what was tuned for a small model holds for a wide and a deep one"""

    use_mup: bool = option(
        False, "muP: initial weights, learning rates, scores and logits scale with the width, so that a learning rate "
        "that was found for a narrow model holds", switch="mup"
    )  # fmt: skip
    mup_base_hidden_size: int | None = option(None, "width of the model that was tuned; unset: this one's", ge=1)
    mup_base_num_layers: int | None = option(None, "its layers: with them depth scales, too (CompleteP)", ge=1)
    mup_base_head_dim: int | None = option(
        None, "channels of its heads: scores are sqrt(this) / d in place of 1 / d", ge=1
    )


class Rates(NamedTuple):
    """What a parameter's numbers in the optimizer are multiplied by. decoupled: its learning rate is that of
    `--decoupled-lr`."""

    decoupled: bool = False
    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


def width_ratio(model: ModelConfig) -> float:
    """m, 1 without muP."""
    return model.hidden_size / (model.mup.mup_base_hidden_size or model.hidden_size)


def depth_ratio(model: ModelConfig) -> float:
    """l, 1 without CompleteP."""
    return model.num_layers / (model.mup.mup_base_num_layers or model.num_layers)


def hidden_std(model: ModelConfig) -> float:
    """Initial deviation of the matrices of blocks."""
    return model.init_method_std / math.sqrt(width_ratio(model))


def residual_std(model: ModelConfig) -> float:
    """Of those that write to the residual stream: 2L of them add up to one (GPT-2)."""
    return hidden_std(model) / math.sqrt(2 * (model.mup.mup_base_num_layers or model.num_layers))


def usual_scale(model: ModelConfig) -> float | None:
    """The factor of scores that no flag gives; None: 1 / sqrt(channels of a head)."""
    latent, given = model.latent.multi_latent_attention, model.mup
    if not latent and not given.use_mup:
        return None
    factor = (given.mup_base_head_dim or 1) ** 0.5 / model.head_dim if given.use_mup else model.head_dim**-0.5
    return float(factor) * (model.rope_scaling.latent_temperature**2 if latent else 1.0)


def rates_of(config: Config) -> Callable[[str, bool], Rates]:
    """(Logical name, whether it has weight decay) -> what is the parameter's own. Vectors have none."""
    model, optimizer = config.model, config.optimizer
    m, depth, deep = width_ratio(model), depth_ratio(model), model.mup.mup_base_num_layers is not None
    orthogonal = OPTIMIZER_SPECS[optimizer.optimizer].whole

    def rates(name: str, decays: bool) -> Rates:
        decoupled = optimizer.decoupled_lr is not None and name in DECOUPLED
        if not model.mup.use_mup:
            return Rates(decoupled)
        block = "layers." in name
        matrix = block and decays and not name.endswith(".conv")  # a channel's convolution has no side that grows
        if matrix and orthogonal is not None and orthogonal(name, 2):
            return Rates()
        epsilon = 1 / (m * (depth if block else 1.0)) if deep or matrix else 1.0
        return Rates(decoupled, 1 / m if matrix else 1.0, m if matrix and deep else 1.0, epsilon)

    return rates
