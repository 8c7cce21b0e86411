"""The table of model families: functions from the configuration to layer specs. gpt and llama share the block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from megalite.config import ModelConfig, RopeScaling
from megalite.errors import ConfigError
from megalite.inventory import Recompute, block_models
from megalite.nn import (
    Block,
    Embedding,
    FurtherPredictions,
    HalvedBlock,
    HalvedStack,
    Head,
    LayerStack,
    Rotary,
    initialize,
)
from megalite.parallel.tensor import LayerContext, make_layer


@dataclass(frozen=True)
class LayerSpec:
    """A layer ('embedding', 'layers.3', 'head') that is not built yet; `build` makes it, uninitialised."""

    name: str
    build: Callable[[LayerContext], nn.Module]


def decoder_layers(config: ModelConfig) -> list[LayerSpec]:
    """Embedding, L blocks, head: everything that differs between gpt and llama is in the configuration."""
    rotaries: dict[tuple[float, RopeScaling], Rotary] = {}  # blocks that turn alike share their angles
    blocks = []
    for i, own in enumerate(block_models(config)):
        turned = None
        if own.position_embedding_type == "rope":
            turned = rotaries.setdefault((own.rotary_base, own.rope_scaling), Rotary(own))
        blocks.append(LayerSpec(f"layers.{i}", partial(_block, own, i, rotary=turned)))
    # Further predictions have a block like the last one.
    head = partial(_head, config, own, turned) if config.further.depth else partial(make_layer, "head", Head, config)
    return [LayerSpec("embedding", partial(Embedding, config)), *blocks, LayerSpec("head", head)]


def _head(config: ModelConfig, own: ModelConfig, rotary: Rotary | None, ctx: LayerContext) -> Head:
    return Head(config, ctx, FurtherPredictions(config, own, ctx, rotary))


def _block(config: ModelConfig, index: int, ctx: LayerContext, rotary: Rotary | None) -> Block:
    return (HalvedBlock if ctx.halves else Block)(config, index, ctx, rotary)


MODELS: Mapping[str, Callable[[ModelConfig], list[LayerSpec]]] = {"gpt": decoder_layers, "llama": decoder_layers}


def layer_specs(config: ModelConfig) -> list[LayerSpec]:
    """The model's layers in order, not built. Raises ConfigError: unknown family, unresolved vocabulary."""
    if config.model_type not in MODELS:
        raise ConfigError(f"`model_type`={config.model_type}: unknown family; use one of {', '.join(MODELS)}")
    if config.vocab_size < 1:
        raise ConfigError(
            "`vocab_size`=0: the vocabulary must be known before a model is built; give a tokenizer or a size"
        )
    return MODELS[config.model_type](config)


def build_stack(
    config: ModelConfig,
    specs: Sequence[LayerSpec],
    ctx: LayerContext,
    *,
    init_seed: int | None = None,
    recompute: Recompute | None = None,
) -> LayerStack:
    """Builds a stage from its specs, filled from (`init_seed`, logical names); None: memory as it is. recompute: None:
    as flags say it of the first stage."""
    layers = [(spec.name, spec.build(ctx)) for spec in specs]
    if ctx.halves:
        stack: LayerStack = HalvedStack(config, layers, recompute, crossing=ctx.halves == "stage")
    else:
        stack = (LayerStack if ctx.grid is None else ctx.grid["stack"])(config, layers, recompute)
    for name, parameter in stack.named_parameters() if config.adapted_parts else ():  # else all is trained
        parameter.requires_grad_(".adapters." in name)
    if init_seed is not None:
        initialize(stack, seed=init_seed)
    return stack
