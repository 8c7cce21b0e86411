"""Temporary tensors of an optimizer's step, in numbers as wide as the masters.

    elementwise rules   so many of each element of a piece (`inventory.STEP_PIECE`); Adafactor takes a tensor as it is
    matrices            Muon: the update and Newton-Schulz; SOAP: preconditioners and bases of both sides
    a bucket            masters joined from remainders, gradients widened

Proof: tests/unit/planner/test_model_states.py counts what the rules allocate.
"""

from megalite.config import OPTIMIZER_SPECS, Config
from megalite.inventory import STEP_PIECE, BucketPlan, ElementBytes

JOINED = 4.0  # a master of 16 bits of remainder: itself, and what splits it again


def step_numbers(config: Config, plan: BucketPlan, owner: int, *, on_cpu: bool) -> float:
    """The most that are there while `owner` steps its slice of a bucket."""
    size, share, written = ElementBytes.of(config), plan.sizes[owner], 0
    rule = OPTIMIZER_SPECS[config.optimizer.optimizer]
    if plan.segments[0].whole:
        entries = [segment.ranges[0].entry for segment in plan.segments_of(owner)]
        half = 1.0 if on_cpu else 2 / size.wide  # Newton-Schulz runs in bf16 there
        steps = [rule.of_step(config.optimizer, e.shape, e.placement.global_shape, half) for e in entries]
        most = max(steps, default=0.0)
    else:
        longest = min(share, max(segment.stop - segment.start for segment in plan.segments))
        optimizer, method, piece = config.optimizer, config.staleness.method, min(longest, STEP_PIECE)
        narrow = sum(dtype != "fp32" for dtype in rule.moments(optimizer))
        numbers = narrow + rule.step + rule.step_nesterov * (method == "nesterov")
        stepped = piece * max(numbers, int(method == "error-feedback"))
        written = piece * (2 + narrow) * (method == "predict")  # while the next batch's weights are
        most = 1.0 * (longest if rule.statistics else stepped)
    joined = JOINED if config.optimizer.store_param_remainders and size.compute != size.wide else 0.0
    return max(most + share * (joined + (size.gradient != size.wide)), written)


def tapped_numbers(config: Config, plan: BucketPlan, owner: int) -> int:
    """Numbers that a batch adds up of what the gradients of matrices are made of."""
    tap = OPTIMIZER_SPECS[config.optimizer.optimizer].of_tap
    if tap is None:
        return 0
    everywhere = config.optimizer.args.kfac_factors == "all"
    ranges = plan.ranges if everywhere else [segment.ranges[0] for segment in plan.segments_of(owner)]
    return sum(tap(config.optimizer, range_.entry.placement.global_shape) for range_ in ranges)
