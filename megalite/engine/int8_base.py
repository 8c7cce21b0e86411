"""The base beside adapters in 8 bits: frozen matrices of blocks become codes and scales once they are loaded.

What else is frozen (embeddings, norms, biases, the output layer) moves out of the flat buffers, whose memory is let go.
"""

from __future__ import annotations

from torch import Tensor

from megalite.engine.weights import Weights
from megalite.parallel.tensor import hold_in_8_bits
from megalite.parallel.zero import release_frozen


def quantize_base(weights: Weights) -> None:
    """Collective over the ranks of a stage; once, when the base is loaded: nothing is left to do after that."""
    if not any(family.frozen for family in weights.optimizer.buffers):
        return
    moved: dict[int, Tensor] = {}
    modules = [module for _, stage in sorted(weights.stages.items()) for module in stage.modules]
    hold_in_8_bits(modules)
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        if not parameter.requires_grad and parameter.is_floating_point():
            place = parameter.data_ptr()
            parameter.data = moved[place] if place in moved else moved.setdefault(place, parameter.data.clone())
    release_frozen(weights.optimizer.buffers)
