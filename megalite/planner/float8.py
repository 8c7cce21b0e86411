"""What `--fp8` and `--lora int8` take: passes over memory that round or widen operands, and what weights
take in 8 bits.

x is looked at (2 bytes an element, as `tests/unit/nn/test_float8_operands.py` counts them of the compiled kernels), and
rounded along each of the two dimensions that are contracted (3 each); dy likewise, its transpose made of bytes (2).
These passes are slower than others of as many bytes, so what counts is measured on an H100 (docs/gpus.md). The
weights' gradients are added by a pass of their own.
"""

import itertools
import math
from collections.abc import Iterator

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


MULTIPLE = {"blockwise": 128}
"""Of what both sides of a matrix must be a multiple, for kernels of GPUs; of other recipes 16."""
MADE_OF = {
    "shared": "`moe_shared_expert_intermediate_size`",
    "fc": "`ffn_hidden_size`",
    "qkvz": "heads of `linear_attention`",
    "ba": "heads of `linear_attention`",
    "out": "heads of `linear_attention`",
    "kv": "`kv_lora_rank` and heads",
    "q_": "`q_lora_rank` and heads",
}
"""What a product's name begins with -> the flags that its sizes are made of; of the others heads."""


def float8_problems(config: Config) -> Iterator[str]:
    """Why kernels of GPUs do not take what a run multiplies in float8: tokens, and both sides of a rank's matrices."""
    given, step = config.training.float8, MULTIPLE.get(config.training.float8.fp8_recipe, 16)
    if given.fp8_format is None:
        return
    if given.fp8_recipe == "mxfp8":
        yield "`fp8_recipe`=mxfp8: emulated on a CPU, not built for GPUs (docs/fp8.md); use blockwise"
        return
    if not config.training.precision.bf16:
        yield f"`fp8_format`={given.fp8_format}: needs `bf16` on a GPU"
    sizes = {"`hidden_size`": config.model.hidden_size, "tokens of a micro-batch on a rank": micro_tokens(config)}
    meshes = len(config.parallel.meshes or "1")  # stages may differ in their ranks
    layouts = dict.fromkeys(config.of_stage(stage, 1)[0].parallel for stage in range(meshes))
    products = [p for layer in dict.fromkeys(model_layers(config.model)) for p in layer.in_float8()]
    for product, parallel in itertools.product(products, layouts):
        made = next((what for name, what in MADE_OF.items() if product.name.startswith(name)), "heads")
        for side, size in zip(("rows", "columns"), product.local(product.shards(parallel)), strict=True):
            if size % step:
                sizes[f"{side} of {product.name} on a rank (of {made})"] = size
    odd = next((f"{what} = {size}" for what, size in sizes.items() if size % step), None)
    if odd is not None:
        other = "" if step == 16 else "another `fp8_recipe` needs multiples of 16; "
        yield (
            f"`fp8_format`={given.fp8_format}: {odd}, but kernels of GPUs need a multiple of {step}; {other}change it, "
            "the ranks of `tensor_model_parallel_size`, or drop `fp8_format`"
        )


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
