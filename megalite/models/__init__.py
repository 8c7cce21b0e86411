"""From a model's configuration to its ordered list of layers.

`layer_specs(config)` names the layers and knows how to build each; a rank builds those of its stage and no others:

    specs = layer_specs(config)
    stage = build_stack(config, specs[begin:end], ctx)      # a LayerStack, initialised

To add a family: its defaults in `config/model.py`, its list of layers as a line of `MODELS` in `families.py`, and new
kinds of layers, if it has any, in `nn` and `inventory/layers.py` (CONTRIBUTING, "Adding a model family").
"""

from megalite.models.families import MODELS, LayerSpec, build_stack, layer_specs
