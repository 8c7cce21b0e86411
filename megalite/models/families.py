"""The table of model families. A family is a function from the configuration to layer specs; gpt and llama share the
block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from megalite.config.model import ModelConfig
from megalite.errors import ConfigError
from megalite.nn.block import Block
from megalite.nn.context import LayerContext
from megalite.nn.embedding import Embedding
from megalite.nn.head import Head
from megalite.nn.init import initialize
from megalite.nn.naming import named_logical_parameters, placement_of
from megalite.nn.rope import Rotary
from megalite.nn.stack import LayerStack


@dataclass(frozen=True)
class LayerSpec:
    """One layer that is not built yet.

    name: 'embedding', 'layers.3' or 'head'. build: makes it, uninitialised. parameters: elements of its logical
    parameters (a tied head's output matrix counts with the embedding). flops: of its matrix products in one forward,
    per token, attention's s x s part halved as causal.
    """

    name: str
    build: Callable[[LayerContext], nn.Module]
    parameters: int
    flops: float


def decoder_layers(config: ModelConfig) -> list[LayerSpec]:
    """Embedding, L pre-norm blocks, head: everything that differs between gpt and llama is in the configuration."""
    rotary = Rotary(config) if config.position_embedding_type == "rope" else None
    h, f, d, V = config.hidden_size, config.ffn_size, config.head_dim, config.vocab_size
    q, kv = config.query_size, config.kv_size
    norm = h * (2 if config.normalization == "LayerNorm" else 1)
    positions = config.max_positions * h if config.position_embedding_type == "learned_absolute" else 0
    gate = 2 if config.gated else 1
    matrices = h * (q + 2 * kv) + q * h + (gate + 1) * h * f
    biases = (h + gate * f + h if config.add_bias_linear else 0) + (q + 2 * kv if config.has_qkv_bias else 0)
    qk_norms = norm // h * 2 * d if config.qk_layernorm else 0
    block_flops = 2.0 * matrices + 2.0 * config.seq_length * q  # 2 products x 2 x s x q, halved
    output = V * h if config.untie_embeddings_and_output_weights else 0
    return [
        LayerSpec("embedding", partial(Embedding, config), V * h + positions, 0.0),
        *(
            LayerSpec(
                f"layers.{index}",
                partial(_build_block, config, index, rotary),
                matrices + biases + 2 * norm + qk_norms,
                block_flops,
            )
            for index in range(config.num_layers)
        ),
        LayerSpec("head", partial(Head, config), output + norm, 2.0 * V * h),
    ]


def _build_block(config: ModelConfig, index: int, rotary: Rotary | None, ctx: LayerContext) -> Block:
    return Block(config, index, ctx, rotary)


MODELS: Mapping[str, Callable[[ModelConfig], list[LayerSpec]]] = {"gpt": decoder_layers, "llama": decoder_layers}


def layer_specs(config: ModelConfig) -> list[LayerSpec]:
    """The model's layers in order; nothing is built. Raises ConfigError for an unknown family or an unresolved
    vocabulary.
    """
    if config.model_type not in MODELS:
        raise ConfigError(f"--model-type={config.model_type}: unknown family; use one of {', '.join(MODELS)}")
    if config.vocab_size < 1:
        raise ConfigError(
            "--vocab-size=0: the vocabulary must be known before a model is built; give a tokenizer or a size"
        )
    return MODELS[config.model_type](config)


def build_stack(
    config: ModelConfig, specs: Sequence[LayerSpec], ctx: LayerContext, *, init_seed: int | None = None
) -> LayerStack:
    """Builds a stage from its slice of specs, filled from (`init_seed`, logical names); None leaves the memory as it
    is.
    """
    stack = LayerStack(config, [(spec.name, spec.build(ctx)) for spec in specs])
    if init_seed is not None:
        initialize(stack, seed=init_seed)
    if ctx.autograd_only:
        stack.compile_blocks()
    return stack


def parameter_count(stack: nn.Module) -> int:
    """Elements of the logical tensors that a stage holds parts of (padding and copies over the tensor axis not
    counted).
    """
    return sum(math.prod(placement_of(p).global_shape) for _, p in named_logical_parameters(stack))
