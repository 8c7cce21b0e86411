"""Which documents of a batch are dearer than documents are: a statistic that knows how many tokens each has.

The mean loss of a document of n tokens scatters about its expectation by sqrt(t^2 + s^2 / n): documents differ (t), and
of few tokens the mean is noisy (s). What its first tokens cost, which follow from little, adds b / n. All three and the
level of each iteration come from the run itself, from the documents of iterations beside it. A loss stands out where
Student's t with 5 degrees of freedom, whose tails are those of real text, gives it less than a chance of a thousandth
divided by the number of documents that were looked at (Bonferroni).
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

CHANCE = 1e-3
"""That of a batch of ordinary documents to have one that is blamed."""
NATS = 0.5
"""Above its expectation a document must lie by so much: what costs less makes no spike."""
FREEDOM = 5
FEWEST = 12
"""Documents without which nothing is known of how they scatter."""
LEVEL_FROM = 8
"""Documents of an iteration whose median is its level; with fewer it is that of all."""
LEAST_RATIO, MOST_RATIO = -2, 12
"""Powers of two between which s^2 / t^2 is tried, beside 0 and infinity."""
ROUNDS = 20


class Sample(NamedTuple):
    """What a document cost in an iteration. loss: mean in nats over `tokens` tokens."""

    loss: float
    tokens: int


class Scatter(NamedTuple):
    """level: of a long document of the iteration. first: b. between, within: t^2 and s^2."""

    level: float
    first: float
    between: float
    within: float

    def expected(self, tokens: int) -> float:
        return self.level + self.first / tokens

    def deviations(self, one: Sample) -> float:
        """How many standard deviations above its expectation."""
        return (one.loss - self.expected(one.tokens)) / math.sqrt(self.between + self.within / one.tokens)


def outliers(looked_at: Sequence[Sample], beside: Mapping[int, Sequence[Sample]]) -> list[int]:
    """Places in `looked_at` of those that stand out. beside: the documents of other iterations, by iteration."""
    scatter = scatter_of(looked_at, beside)
    if scatter is None:
        return []
    bound = CHANCE / len(looked_at)
    return [
        place
        for place, one in enumerate(looked_at)
        if one.loss - scatter.expected(one.tokens) > NATS and chance_of(scatter.deviations(one)) < bound
    ]


def scatter_of(looked_at: Sequence[Sample], beside: Mapping[int, Sequence[Sample]]) -> Scatter | None:
    """What documents cost, in the iteration that is looked at; None where there are too few to tell."""
    groups = [looked_at, *beside.values()]
    everyone = [one for group in groups for one in group]
    if len(everyone) < FEWEST:
        return None
    common = median(one.loss for one in everyone)
    levels = [median(one.loss for one in group) if len(group) >= LEVEL_FROM else common for group in groups]
    losses = [one.loss - level for group, level in zip(groups, levels, strict=True) for one in group]
    y = torch.tensor(losses, dtype=torch.float64)
    n = torch.tensor([one.tokens for one in everyone], dtype=torch.float64)
    ratios = (0.0, *(2.0**k for k in range(LEAST_RATIO, MOST_RATIO + 1)), math.inf)
    fits = [_fitted(y, n, ratio) for ratio in ratios]
    _, fit = max(fits, key=lambda one: one[0])
    return fit._replace(level=fit.level + levels[0])


def _fitted(y: Tensor, n: Tensor, ratio: float) -> tuple[float, Scatter]:
    """(log-likelihood, fit) of y = level + first / n + scatter, Student's t, by iterated least squares."""
    shape = 1 / n if math.isinf(ratio) else 1 + ratio / n  # the variance but for its unit
    design = torch.stack([torch.ones_like(n), 1 / n], dim=1)
    if float(n.max()) < 2 * float(n.min()):  # of documents that are alike in length nothing tells the two apart
        design = design[:, :1]
    unit, weights = y.square().mean().clamp_min(1e-12), torch.ones_like(y)
    solution = y.new_zeros(design.shape[1])
    for _ in range(ROUNDS):
        scale = (weights / shape).sqrt()[:, None]
        solution = torch.linalg.lstsq(design * scale, y[:, None] * scale).solution[:, 0]
        squares = (y - design @ solution).square() / shape
        unit = (weights * squares).mean().clamp_min(1e-12)
        weights = (FREEDOM + 1) / (FREEDOM + squares / unit)
    spread = (shape * unit).log().sum() / 2 + (FREEDOM + 1) / 2 * (squares / unit / FREEDOM).log1p().sum()
    level, first = float(solution[0]), float(solution[1]) if len(solution) > 1 else 0.0
    between = 0.0 if math.isinf(ratio) else float(unit)
    within = float(unit) if math.isinf(ratio) else float(unit) * ratio
    return -float(spread), Scatter(level, first, between, within)


def chance_of(deviations: float) -> float:
    """That of a larger number: the upper tail of Student's t with 5 degrees of freedom, in closed form."""
    angle = math.atan2(deviations, math.sqrt(FREEDOM))
    sine, cosine = math.sin(angle), math.cos(angle)
    inside = 2 / math.pi * (angle + sine * cosine * (1 + 2 / 3 * cosine * cosine))
    return (1 - inside) / 2
