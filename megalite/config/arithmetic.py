"""Exact numbers of a model: parameters tensor by tensor, floating-point operations of an iteration.

The FLOPs follow Megatron-LM's convention ("model FLOPs"): 2 per multiply-add, backward counted twice a forward,
causal attention halved, nothing for recomputation, the output layer counted with the padded vocabulary. They are not
comparable with conventions that count full attention or recomputation, so whoever prints them names the convention.
"""

from __future__ import annotations

import math

from megalite.config.model import ModelConfig

__all__ = ["FLOPS_CONVENTION", "count_parameters", "flops_per_iteration", "layer_shapes", "parameter_shapes"]

FLOPS_CONVENTION = "model FLOPs, Megatron's convention: causal attention halved, no recomputation"


def _norm_shapes(model: ModelConfig, name: str, size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,)}
    if model.normalization == "LayerNorm":
        shapes[f"{name}.bias"] = (size,)
    return shapes


def _linear_shapes(name: str, rows: tuple[int, ...], columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (*rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = rows
    return shapes


def layer_shapes(model: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Logical name -> shape of every parameter of transformer layer `index`."""
    prefix, h, f, d = f"layers.{index}", model.hidden_size, model.ffn_size, model.head_dim
    shapes = _norm_shapes(model, f"{prefix}.input_norm", h)
    qkv_rows = (model.query_size + 2 * model.kv_size,)
    shapes |= _linear_shapes(f"{prefix}.attention.qkv", qkv_rows, h, model.has_qkv_bias)
    if model.qk_layernorm:
        shapes |= _norm_shapes(model, f"{prefix}.attention.q_norm", d)
        shapes |= _norm_shapes(model, f"{prefix}.attention.k_norm", d)
    shapes |= _linear_shapes(f"{prefix}.attention.proj", (h,), model.query_size, model.add_bias_linear)
    shapes |= _norm_shapes(model, f"{prefix}.mlp_norm", h)
    # A gated projection keeps gate and value apart in a leading dimension, so that a slice of it is a rectangle.
    fc1_rows = (2, f) if model.gated else (f,)
    shapes |= _linear_shapes(f"{prefix}.mlp.fc1", fc1_rows, h, model.add_bias_linear)
    shapes |= _linear_shapes(f"{prefix}.mlp.fc2", (h,), f, model.add_bias_linear)
    return shapes


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Logical name -> shape of every parameter of the model, vocabulary unpadded.

    Raises:
        AssertionError: `vocab_size` is not known yet (see `with_vocab_size`).
    """
    assert model.vocab_size > 0, "the vocabulary size comes from the tokenizer: resolve it first"
    h, vocabulary = model.hidden_size, model.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, h)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (model.max_positions, h)
    for index in range(model.num_layers):
        shapes |= layer_shapes(model, index)
    shapes |= _norm_shapes(model, "head.final_norm", h)
    if model.untie_embeddings_and_output_weights:
        shapes["head.output.weight"] = (vocabulary, h)
    return shapes


def count_parameters(model: ModelConfig) -> int:
    """Elements of all logical parameters, vocabulary unpadded; tied weights count once."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def flops_per_iteration(model: ModelConfig, global_batch_size: int, tensor_model_parallel_size: int = 1) -> int:
    """Model FLOPs of one iteration, forward and backward, in Megatron-LM's convention.

    With B samples of s tokens, width h, L layers, queries q = a*d, keys k = g*d, MLP width f with c matrices (3 when
    gated, else 2) and padded vocabulary V::

        6*B*s * (L*h*f*c + L*h*(2q + 2k) + h*V) + 6*B*s*s*q*L
    """
    s, h, layers = model.seq_length, model.hidden_size, model.num_layers
    mlp = h * model.ffn_size * (3 if model.gated else 2)
    projections = h * (2 * model.query_size + 2 * model.kv_size)
    logits = h * model.padded_vocab_size(tensor_model_parallel_size)
    matrices = 6 * global_batch_size * s * (layers * (mlp + projections) + logits)
    attention = 6 * global_batch_size * s * s * model.query_size * layers
    return matrices + attention
