"""Temporary tensors of an optimizer's step, in numbers as wide as the masters.

    elementwise rules   so many of each element of a piece (`inventory.STEP_PIECE`); Adafactor takes a tensor as it is
    matrices            Muon: the update and Newton-Schulz; SOAP: preconditioners and bases of both sides
    a bucket            masters joined from remainders, gradients widened

Proof: tests/unit/planner/test_model_states.py counts what the rules allocate.
"""

from __future__ import annotations

import math

from megalite.config import OPTIMIZER_SPECS, Config
from megalite.inventory import STEP_PIECE, BucketPlan, ElementBytes, Shape

JOINED = 4.0
"""A master of 16 bits of remainder: itself, and what splits it again."""


def step_numbers(config: Config, plan: BucketPlan, owners: int, *, on_cpu: bool) -> float:
    """The most that are there while a bucket is stepped, of whose slices there are `owners`."""
    size, share, written = ElementBytes.of(config), (plan.stop - plan.start) // owners, 0
    if plan.segments[0].whole:
        entries = [segment.ranges[0].entry for segment in plan.segments]
        half = 1.0 if on_cpu else 2 / size.wide  # Newton-Schulz runs in bf16 there
        most = max(_of_matrix(config, entry.shape, entry.placement.global_shape, half) for entry in entries)
    else:
        longest = min(share, max(segment.stop - segment.start for segment in plan.segments))
        stepped, written = (number * min(longest, STEP_PIECE) for number in _of_element(config))
        most = 1.0 * (longest if OPTIMIZER_SPECS[config.optimizer.optimizer].statistics else stepped)
    joined = JOINED if config.optimizer.store_param_remainders and size.compute != size.wide else 0.0
    return max(most + share * (joined + (size.gradient != size.wide)), written)


def _of_element(config: Config) -> tuple[int, int]:
    """While it is stepped, and while the weights that the next batch computes with are written. Of AdamW for what rules
    of matrices leave to it, too."""
    optimizer, method = config.optimizer, config.staleness.method
    rule = OPTIMIZER_SPECS[optimizer.optimizer]
    narrow = sum(dtype != "fp32" for dtype in rule.moments(optimizer))
    name = optimizer.optimizer if rule.whole is None else "adam"
    steps = narrow + {"sgd": 2, "lion": 3}.get(name, 0)
    if method == "nesterov":
        steps += 3 if name == "adam" else 1
    return max(steps, int(method == "error-feedback")), (2 + narrow) * (method == "predict")


def _of_matrix(config: Config, local: Shape, whole: Shape, half: float) -> float:
    """Of a matrix, or a stack of them. half: bytes of a number of Newton-Schulz over those of a master."""
    rows, columns = whole[-2:]
    stack, numel = math.prod(local[:-2]), math.prod(local)
    left, right, gathered = (stack * n for n in (rows * rows, columns * columns, rows * columns))
    if config.optimizer.optimizer == "muon":
        gram = min(left, right)
        kept = 2.0 * numel + (gathered if gathered != numel else 0.0)
        return kept + half * max(4.0 * gathered + gram, 2.0 * gathered + 4.0 * gram)
    limit = config.optimizer.args.soap_max_precond_dim
    left, right = left * (rows <= limit), right * (columns <= limit)
    first = 9.0 * max(left, right)  # eigenvectors, in fp64
    return max(first, 5.0 * gathered, 3.0 * gathered + max(6.0 * left, 6.0 * right + left))
