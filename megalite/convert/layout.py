"""Names and shapes of a model's logical tensors, from its configuration alone."""

from __future__ import annotations

from megalite.config.model import ModelConfig

Shape = tuple[int, ...]


def logical_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Logical name -> shape without padding, in the order of the model: embedding, layers, head."""
    h = model.hidden_size
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (model.vocab_size, h)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (model.max_positions, h)
    for index in range(model.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _block_shapes(model).items()}
    shapes |= _norm("head.final_norm", h, model)
    if model.untie_embeddings_and_output_weights:
        shapes["head.output.weight"] = (model.vocab_size, h)
    return shapes


def layer_of(name: str) -> str:
    """`layers.3` for `layers.3.mlp.fc1.weight`; `embedding`, `head`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _block_shapes(model: ModelConfig) -> dict[str, Shape]:
    h, f, d = model.hidden_size, model.ffn_size, model.head_dim
    rows = model.query_size + 2 * model.kv_size
    up: Shape = (2, f) if model.gated else (f,)
    bias = model.add_bias_linear
    shapes = _norm("input_norm", h, model)
    shapes |= _linear("attention.qkv", (rows,), h, model.has_qkv_bias)
    if model.qk_layernorm:
        shapes |= _norm("attention.q_norm", d, model) | _norm("attention.k_norm", d, model)
    shapes |= _linear("attention.proj", (h,), model.query_size, bias) | _norm("mlp_norm", h, model)
    return shapes | _linear("mlp.fc1", up, h, bias) | _linear("mlp.fc2", (h,), f, bias)


def _linear(name: str, outputs: Shape, inputs: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (*outputs, inputs)}
    return shapes | {f"{name}.bias": outputs} if bias else shapes


def _norm(name: str, size: int, model: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (size,)}
    return shapes | {f"{name}.bias": (size,)} if model.normalization == "LayerNorm" else shapes
