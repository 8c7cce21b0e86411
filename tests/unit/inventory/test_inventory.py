"""The inventory of a model against the modules that are built: over every family and flag that changes a parameter."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from equivalence.layouts import TINY

from megalite.comm.axis import ExpertAxes
from megalite.comm.mesh import Axis
from megalite.config.cli import parse
from megalite.config.lora import Lora
from megalite.config.model import FAMILY_DEFAULTS, ModelConfig
from megalite.config.model_parts import Delta, Experts, FurtherTokens, Latent
from megalite.inventory import activation_bytes, mixers, placement_of
from megalite.inventory.layers import (
    Layer,
    count_parameters,
    layer_name,
    model_layers,
    parameter_shapes,
    stage_parameters,
)
from megalite.models import build_stack, layer_specs
from megalite.nn import block
from megalite.parallel.tensor import ColumnParallelLinear, Linear, ReplicatedLinear, RowParallelLinear
from megalite.parallel.tensor.context import LayerContext

SHAPE: dict[str, Any] = dict(
    num_layers=2, hidden_size=24, num_attention_heads=4, seq_length=8, vocab_size=50, make_vocab_size_divisible_by=8
)
# Every field that decides which parameters there are, how large they are or how they begin, with its values.
CHOICES: dict[str, tuple[Any, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": ("gelu", "swiglu"),
    "add_bias_linear": (True, False),
    "add_qkv_bias": (True, False),
    "qk_layernorm": (True, False),
    "position_embedding_type": ("learned_absolute", "rope", "none"),
    "untie_embeddings_and_output_weights": (True, False),
    "num_query_groups": (None, 2),
}
DELTA = Delta(
    experimental_attention_variant="gdn", linear_attention_freq="2", linear_key_head_dim=4, linear_value_head_dim=6,
    linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
LATENT = Latent(
    multi_latent_attention=True, q_lora_rank=10, kv_lora_rank=12, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8
)
OTHERS = [
    {**FAMILY_DEFAULTS["llama"], "model_type": "llama", "num_query_groups": 2},
    {"activation": "geglu", "kv_channels": 10, "max_position_embeddings": 20, "init_method_std": 0.5},
    {"activation": "squared-relu", "ffn_hidden_size": 36, "num_layers": 3},
    {"softmax_type": "learnable", "num_query_groups": 2, "qk_layernorm": True},
    {**FAMILY_DEFAULTS["llama"], "num_query_groups": 2, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    {"norm_placement": "post", "normalization": "RMSNorm", "num_query_groups": 2},
    {"apply_layernorm_1p": True, "qk_layernorm": True, "activation": "geglu-tanh"},
    {"apply_layernorm_1p": True, "normalization": "RMSNorm", "qk_layernorm": True, "qk_layernorm_across_heads": True},
    {"norm_placement": "sandwich", "experts": Experts(num_experts=4, moe_layer_freq="2")},
    {"experts": Experts(num_experts=4, moe_layer_freq="2", moe_ffn_hidden_size=20)},
    {"activation": "swiglu", "experts": Experts(num_experts=6, moe_shared_expert_intermediate_size=8)},
    {**FAMILY_DEFAULTS["llama"], "latent": LATENT, "qk_layernorm": True, "softmax_type": "learnable"},
    {"latent": dataclasses.replace(LATENT, q_lora_rank=None), "normalization": "RMSNorm"},
    {**FAMILY_DEFAULTS["llama"], "further": FurtherTokens(mtp_num_layers=2)},
    {"position_embedding_type": "rope", "further": FurtherTokens(mtp_num_layers=1), "experts": Experts(num_experts=4)},
    {**FAMILY_DEFAULTS["llama"], "delta": DELTA, "attention_output_gate": True, "num_query_groups": 2},
    {"delta": dataclasses.replace(DELTA, linear_attention_freq=None), "apply_layernorm_1p": True},
    {"experts": Experts(num_experts=4, moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True)},
    {"activation": "quick-geglu", "experts": Experts(num_experts=4, moe_router_bias=True)},
    {"activation": "gelu-tanh", "use_parallel_residual": True, "vocab_size": 49, "make_vocab_size_divisible_by": 1},
]
ADAPTED = [
    {"lora": Lora(lora_rank=3)},
    {**FAMILY_DEFAULTS["llama"], "model_type": "llama", "num_query_groups": 2, "lora": Lora(lora_rank=2)},
    {"activation": "swiglu", "lora": Lora(lora_rank=5, lora_targets=("linear_q", "linear_v", "linear_fc1"))},
    {"experts": Experts(num_experts=4, moe_shared_expert_intermediate_size=8), "lora": Lora(lora_rank=2)},
    {
        **{**FAMILY_DEFAULTS["llama"], "model_type": "llama", "experts": Experts(num_experts=4, moe_layer_freq="2")},
        "lora": Lora(lora_rank=2, lora_shared_a=True),
    },
]
LAYOUTS = ((1, 0, True), (2, 0, False), (2, 1, True))  # tensor-parallel size, rank, sequence parallelism


def _models() -> Iterator[ModelConfig]:
    for values in itertools.product(*CHOICES.values()):
        yield ModelConfig(**SHAPE, **dict(zip(CHOICES, values, strict=True)))
    for changes in (*OTHERS, *ADAPTED):
        yield ModelConfig(**{**SHAPE, **changes})


def _check(model: ModelConfig, items: range, size: int, rank: int, split: bool) -> None:
    axes = ExpertAxes(Axis("etp", size, rank, tuple(range(size))), Axis("ep", 2, 1, (0, 1)))
    ctx = LayerContext(
        tp=Axis("tp", size, rank, tuple(range(size))), experts=axes, sequence_parallel=split, device="meta"
    )
    stack = build_stack(model, layer_specs(model)[items.start : items.stop], ctx)
    built = [(name, tuple(p.shape), placement_of(p)) for name, p in stack.logical_parameters()]
    frozen = [name for name, p in stage_parameters(model, items) if p.frozen]
    assert frozen == [name for name, p in stack.logical_parameters() if not p.requires_grad]
    listed = [
        (name, p.local_shape(size, 2), p.place(size, rank, sequence_parallel=split, ep=2, ep_rank=1))
        for name, p in stage_parameters(model, items)
    ]
    assert built == listed, f"{model}, tensor-parallel rank {rank} of {size}, sequence parallel {split}"


def test_what_is_built_is_what_the_inventory_lists() -> None:
    """Names in order, shapes, places, initial values of every parameter."""
    for number, model in enumerate(_models()):
        _check(model, range(model.num_layers + 2), *LAYOUTS[number % 3])


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_are_built_as_the_inventory_lists_them(layout: tuple[int, int, bool], untied: bool) -> None:
    """A head apart from the embedding holds a copy of it, under its name."""
    model = ModelConfig(**SHAPE, qk_layernorm=True, untie_embeddings_and_output_weights=untied)
    for items in (range(4), range(2), range(1, 3), range(3, 4)):
        _check(model, items, *layout)


def test_products_are_those_of_the_linear_layers() -> None:
    """Every weight matrix but those that are looked up multiplies once a token, cut as its layer is."""
    for size in (1, 2):
        ctx = LayerContext(tp=Axis("tp", size, 0, tuple(range(size))), device="meta")
        for model in (ModelConfig(**{**SHAPE, **changes}) for changes in ({}, *OTHERS) if "experts" not in changes):
            block = build_stack(model, layer_specs(model)[1:2], ctx).ordered()[0]
            linears = {
                name.rpartition(".")[2]: module for name, module in block.named_modules() if isinstance(module, Linear)
            }
            products = {p.name: p for p in model_layers(model)[1].products if not p.core}
            assert list(linears) == list(products)
            for name, linear in linears.items():
                *rows, columns = linear.weight.shape
                assert products[name].local(size) == (math.prod(rows), columns)
                cuts = {ColumnParallelLinear: "n", RowParallelLinear: "k", ReplicatedLinear: ""}
                assert products[name].cut == cuts[type(linear)]


def test_counts_are_sums_of_what_is_listed() -> None:
    for model in _models():
        assert count_parameters(model) == sum(math.prod(shape) for shape in parameter_shapes(model).values())


def test_equal_layers_are_one_object_and_other_models_have_others() -> None:
    model = ModelConfig(**SHAPE)
    first, second = model_layers(model)[1:3]
    assert first is second
    assert model_layers(dataclasses.replace(model, ffn_hidden_size=8))[1] is not first


@pytest.mark.parametrize(("index", "name"), [(0, "embedding"), (1, "layers.0"), (2, "layers.1"), (3, "head")])
def test_names_of_layers(index: int, name: str) -> None:
    assert layer_name(index, 2) == name == layer_specs(ModelConfig(**SHAPE))[index].name


def test_a_mixer_is_in_every_table() -> None:
    """One that was forgotten is an error there and is not counted as attention."""
    assert set(mixers.MIXERS) == set(activation_bytes.MIXER_BYTES) == set(block.MIXERS)
    config = parse([*TINY, "--num-layers", "1", "--micro-batch-size", "1"], world_size=1)
    with patch.object(ModelConfig, "mixer", "new"), pytest.raises(KeyError, match="new"):
        activation_bytes.kept_bytes(config, Layer("block", config.model, (), ()))
