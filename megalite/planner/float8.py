"""What `--fp8` and `--lora int8` take: passes over memory that round or widen operands, and what weights
take in 8 bits.

x is looked at (2 bytes an element, as `tests/unit/nn/test_float8_operands.py` counts them of the compiled kernels), and
rounded along each of the two dimensions that are contracted (3 each); dy likewise, its transpose made of bytes (2).
These passes are slower than others of as many bytes, so what counts is measured on an H100 (docs/gpus.md). The
weights' gradients are added by a pass of their own.
"""

import math

from megalite.config import Config
from megalite.inventory import (
    ElementBytes,
    Layer,
    held_in_8_bits,
    micro_tokens,
    model_layers,
)
from megalite.planner.communication import held_parameters, shards_of

# Bytes an element of a pass that takes as long; across: rounded and transposed at once.
LOOK, ROUND, ACROSS, TURN = 2.6, 3.5, 5.3, 3.5


def rounding_passes(config: Config, layer: Layer) -> tuple[float, float, float]:
    """Bytes that a micro-batch of a layer reads and writes to round operands, in F, I and W. Weights that are kept are
    rounded once for all micro-batches, which is left out."""
    given, tokens = config.training.float8, micro_tokens(config)
    if config.model.lora.frozen_weights_int8:
        sizes = (math.prod(p.local(p.shards(config.parallel))) for p in layer.in_float8())
        both = sum(sizes) * (1.0 + ElementBytes.of(config).compute)
        return both, both, 0.0
    if given.fp8_format is None:
        return 0.0, 0.0, 0.0
    look = 0.0 if given.fp8_recipe == "delayed" else LOOK
    forward = gradient = weight = 0.0
    for product in layer.in_float8():
        n, k = product.local(product.shards(config.parallel))
        of_weight = 0.0 if config.keeps_float8 else n * k * (look + ROUND)
        forward += tokens * k * (look + ROUND) + of_weight
        gradient += tokens * n * (look + ROUND) + of_weight
        weight += tokens * (k * ACROSS + n * TURN) + n * k * 3 * ElementBytes.of(config).gradient
    return forward, gradient, weight


def rounded_elements(config: Config, items: range) -> int:
    """Elements of a rank's weights that are multiplied in float8."""
    layers = model_layers(config.model)
    sizes = [p.local(p.shards(config.parallel)) for item in items for p in layers[item].in_float8()]
    return sum(math.prod(size) for size in sizes)


def kept_bytes(config: Config, items: range) -> int:
    """Of the weights of a stage in one version, as `[out, in]` and as its transpose."""
    return 2 * rounded_elements(config, items) if config.keeps_float8 else 0


def gathered_bytes(config: Config, items: range, world_size: int) -> int:
    """Of the weights of a stage that are gathered in float8: this rank's slice, and one layer on its way."""
    shards = shards_of(config, world_size, "dense")
    if not config.gathers_float8 or shards == 1:
        return 0
    each = [rounded_elements(config, range(item, item + 1)) for item in items]
    return sum(each) // shards + max(each, default=0)


def int8_bytes(config: Config, items: range, kind: tuple[str, bool]) -> tuple[int, int] | None:
    """Of the frozen weights of a family, wide or not, under `--lora int8`: (held, of the largest matrix as it was);
    else None. Codes have a scale for each row."""
    if not config.model.lora.frozen_weights_int8:
        return None
    size, weights, largest = ElementBytes.of(config), 0, 0
    for _, parameter in held_parameters(config, items):
        if not parameter.frozen or (parameter.family, parameter.wide) != kind:
            continue
        shape, held = parameter.local(config.parallel), held_in_8_bits(config.model, parameter.name)
        numel = math.prod(shape)
        as_it_was = numel * (size.wide if parameter.wide else size.compute)
        weights += numel + numel // shape[-1] * size.wide if held else as_it_was
        largest = max(largest, as_it_was * held)
    return weights, largest
