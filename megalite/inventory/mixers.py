"""What mixes the tokens of a block, by the name of the mixer: its parameters and its matrix products."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from megalite.config import ModelConfig
from megalite.inventory.adapters import prefixes
from megalite.inventory.parameter import Parameter
from megalite.inventory.pieces import Product, column, norm, norm_start, row, whole

CHUNK = 64
"""Tokens of linear attention that see each other directly."""

Contents = tuple[list[Parameter], list[Product]]


def _head_norm(name: str, width: int, model: ModelConfig) -> list[Parameter]:
    """Of queries or keys: one for all heads, or one over all of them, whose weights are cut with the heads."""
    if not model.qk_layernorm_across_heads:
        return norm(name, model.head_dim, model, "heads")
    return [Parameter(f"{name}.weight", (width,), 0, decay=False, init_value=norm_start(model))]


def learned_sinks(model: ModelConfig) -> list[Parameter]:
    """A logit of each head, if they are learned."""
    learned = model.softmax_type == "learnable"
    return [Parameter("attention.softmax_offset", (model.num_attention_heads,), 0, decay=False)] if learned else []


def _attention(model: ModelConfig) -> Contents:
    """Projections, norms of queries and keys, sinks."""
    h, q, s, bias = model.hidden_size, model.query_size, model.seq_length, model.add_bias_linear
    qkv = model.qkv_size
    head_norms = {"attention.q_norm": q, "attention.k_norm": model.kv_size} if model.qk_layernorm else {}
    parameters = [
        *learned_sinks(model),
        *column("attention.qkv", (qkv,), h, model, model.has_qkv_bias),
        *row("attention.proj", h, q, model, bias),
        *(parameter for name, width in head_norms.items() for parameter in _head_norm(name, width, model)),
        *prefixes(model),
    ]
    return parameters, [
        Product("qkv", qkv, h, "n"),
        Product("scores", s, q, "k", core=True),
        Product("context", q, s, "n", core=True),
        Product("proj", h, q, "k"),
    ]


def _latent(model: ModelConfig) -> Contents:
    """Down to two small vectors a token, which every rank of the tensor axis has whole, and up from them, by heads."""
    h, a, s, given = model.hidden_size, model.num_attention_heads, model.seq_length, model.latent
    q, value, up = model.query_size, model.value_size, a * (given.qk_head_dim + given.v_head_dim)
    rank, width, made = given.kv_lora_rank, given.compressed, given.q_lora_rank
    parameters, products = learned_sinks(model), list[Product]()
    if made is not None:
        parameters += _down("q_down", made, made, model)
        products += [Product("q_down", made, h, "")]
    parameters += _down("kv_down", width, rank, model)
    queries = "q" if made is None else "q_up"
    parameters += column(f"attention.{queries}", (q,), made or h, model, False)
    parameters += column("attention.kv_up", (up,), rank, model, False)
    parameters += row("attention.proj", h, value, model, model.add_bias_linear)
    return parameters, [
        *products,
        Product("kv_down", width, h, ""),
        Product(queries, q, made or h, "n"),
        Product("kv_up", up, rank, "n"),
        Product("scores", s, q, "k", core=True),
        Product("context", value, s, "n", core=True),
        Product("proj", h, value, "k"),
    ]


def _down(name: str, rows: int, normed: int, model: ModelConfig) -> list[Parameter]:
    """A matrix that is not cut, and the norm of the first of what it makes."""
    weight = whole(f"attention.{name}", rows, model.hidden_size, model)
    return [weight, *(norm(f"attention.{name}_norm", normed, model) if model.qk_layernorm else [])]


def delta_vectors(model: ModelConfig) -> list[Parameter]:
    """The convolution, and what a state decays by."""
    given, std = model.delta, model.init_method_std
    keys, values = given.linear_num_key_heads, given.linear_num_value_heads
    return [
        Parameter("attention.conv", (keys, given.mixed, given.linear_conv_kernel_dim), 0, init_std=std),
        Parameter("attention.dt_bias", (values,), 0, decay=False, init_value=1.0),
        Parameter("attention.a_log", (values,), 0, decay=False, init_value=math.log(8.0)),
    ]


def _delta(model: ModelConfig) -> Contents:
    """These and the projections; rows by key heads."""
    h, given = model.hidden_size, model.delta
    keys, values, size = given.linear_num_key_heads, given.linear_num_value_heads, given.value_size
    rows, plain = keys * given.mixed + size, replace(model, apply_layernorm_1p=False, normalization="RMSNorm")
    parameters = [
        *delta_vectors(model),
        *column("attention.qkvz", (rows,), h, model, False),
        *column("attention.ba", (2 * values,), h, model, False),
        *norm("attention.norm", given.linear_value_head_dim, plain, "heads"),
        *row("attention.out", h, size, model, model.add_bias_linear),
    ]
    return parameters, [
        Product("qkvz", rows, h, "n"),
        Product("ba", 2 * values, h, "n"),
        Product("state", size, 6 * given.linear_key_head_dim, "n", core=True),
        Product("chunks", size, 2 * CHUNK, "n", core=True),
        Product("out", h, size, "k"),
    ]


class Mixer(NamedTuple):
    """contents: parameters and products. entering: numbers of a token that each rank of the tensor axis needs whole for
    its heads."""

    contents: Callable[[ModelConfig], Contents]
    entering: Callable[[ModelConfig], int] = lambda model: model.hidden_size


MIXERS: Mapping[str, Mixer] = {
    "attention": Mixer(_attention),
    "latent": Mixer(_latent, lambda m: (m.latent.q_lora_rank or m.hidden_size) + m.latent.compressed),
    "delta": Mixer(_delta),
}
