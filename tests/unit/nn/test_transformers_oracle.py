"""An independent implementation of the same models: logits, loss and every gradient equal transformers' in fp64."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.config.model_parts import Experts
from megalite.inventory import placement_of
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor.context import LayerContext
from tests.unit.convert.double_transformers import double_transformers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

B, S, V = 2, 12, 50
SHAPE: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=S, vocab_size=V)


def batch() -> Microbatch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(0))
    return Microbatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=torch.arange(S).expand(B, S),
        loss_mask=torch.ones(B, S),
        sample_ids=torch.arange(B),
    )


def build(config: ModelConfig) -> LayerStack:
    stack = build_stack(config, layer_specs(config), LayerContext(dtype=torch.float64), init_seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms and biases away from 1 and 0, matrices large enough that everything matters
        for p in stack.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.2)
    return stack


def split_qkv(config: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows grouped by key/value head -> all queries, all keys, all values."""
    g, d = config.query_groups, config.head_dim
    r = config.num_attention_heads // g
    grouped = qkv.reshape(g, r + 2, d, *qkv.shape[1:])
    parts = grouped[:, :r], grouped[:, r], grouped[:, r + 1]
    q, k, v = (part.reshape(-1, *qkv.shape[1:]) for part in parts)
    return q, k, v


def to_gpt2(config: ModelConfig, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our logical tensors under GPT-2's names; its Conv1D stores matrices transposed."""
    theirs = {
        "transformer.wte.weight": ours["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": ours["embedding.position_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = ours[f"head.final_norm.{kind}"]
        for i in range(config.num_layers):
            a, b = f"layers.{i}", f"transformer.h.{i}"
            theirs[f"{b}.ln_1.{kind}"] = ours[f"{a}.input_norm.{kind}"]
            theirs[f"{b}.ln_2.{kind}"] = ours[f"{a}.mlp_norm.{kind}"]
            theirs[f"{b}.attn.c_attn.{kind}"] = torch.cat(split_qkv(config, ours[f"{a}.attention.qkv.{kind}"])).t()
            theirs[f"{b}.attn.c_proj.{kind}"] = ours[f"{a}.attention.proj.{kind}"].t()
            theirs[f"{b}.mlp.c_fc.{kind}"] = ours[f"{a}.mlp.fc1.{kind}"].t()
            theirs[f"{b}.mlp.c_proj.{kind}"] = ours[f"{a}.mlp.fc2.{kind}"].t()
    return theirs


def to_llama(config: ModelConfig, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our logical tensors under the names of Llama and Qwen3."""
    theirs = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"],
        "model.norm.weight": ours["head.final_norm.weight"],
        "lm_head.weight": ours["head.output.weight"],
    }
    for i in range(config.num_layers):
        a, b = f"layers.{i}", f"model.layers.{i}"
        theirs[f"{b}.input_layernorm.weight"] = ours[f"{a}.input_norm.weight"]
        theirs[f"{b}.post_attention_layernorm.weight"] = ours[f"{a}.mlp_norm.weight"]
        for name, part in zip("qkv", split_qkv(config, ours[f"{a}.attention.qkv.weight"]), strict=True):
            theirs[f"{b}.self_attn.{name}_proj.weight"] = part
        theirs[f"{b}.self_attn.o_proj.weight"] = ours[f"{a}.attention.proj.weight"]
        if config.qk_layernorm:
            theirs[f"{b}.self_attn.q_norm.weight"] = ours[f"{a}.attention.q_norm.weight"]
            theirs[f"{b}.self_attn.k_norm.weight"] = ours[f"{a}.attention.k_norm.weight"]
        theirs[f"{b}.mlp.gate_proj.weight"], theirs[f"{b}.mlp.up_proj.weight"] = ours[f"{a}.mlp.fc1.weight"]
        theirs[f"{b}.mlp.down_proj.weight"] = ours.get(f"{a}.mlp.fc2.weight", torch.zeros(1))
    return theirs


def to_mixtral(config: ModelConfig, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our logical tensors under the names of Mixtral, Qwen3-MoE and OLMoE, which stack their experts as well."""
    theirs = to_llama(
        config, {**ours, **{f"layers.{i}.mlp.fc1.weight": torch.zeros(2, 1) for i in range(config.num_layers)}}
    )
    for i in range(config.num_layers):
        a, b = f"layers.{i}.mlp", f"model.layers.{i}.mlp"
        for name in ("gate_proj", "up_proj", "down_proj"):
            del theirs[f"{b}.{name}.weight"]
        theirs[f"{b}.gate.weight"] = ours[f"{a}.router.weight"]
        theirs[f"{b}.experts.gate_up_proj"] = ours[f"{a}.experts.fc1.weight"].flatten(1, 2)
        theirs[f"{b}.experts.down_proj"] = ours[f"{a}.experts.fc2.weight"]
    return theirs


def without_padding(parameter: nn.Parameter, values: Tensor | None) -> Tensor:
    assert values is not None
    return values[tuple(slice(n) for n in placement_of(parameter).valid_shape(tuple(values.shape)))]


def prepend(name: str, message: str) -> str:
    return f"{name}: {message}"


def compare(config: ModelConfig, kind: Any, settings: Any, translate: Any) -> None:
    """kind: transformers' class, built of its configuration `settings`."""
    stack, data = build(config), batch()
    parameters = dict(stack.logical_parameters())
    state = translate(config, {name: without_padding(p, p.detach()) for name, p in parameters.items()})
    with double_transformers(kind):
        peer = kind(settings).double()
        missing, unexpected = peer.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        logits = peer(input_ids=data.tokens).logits
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), data.labels.flatten(), reduction="sum")
        expected.backward()
    loss = stack(None, data)
    loss.backward()

    tolerance = 1e-11  # of single elements, some of them small
    torch.testing.assert_close(loss, expected, rtol=tolerance / 10, atol=0)
    ours = stack.get_submodule("head").logits(stack.body(None, data)).transpose(0, 1)
    torch.testing.assert_close(ours, logits, rtol=tolerance, atol=tolerance)
    gradients = translate(config, {name: without_padding(p, p.grad) for name, p in parameters.items()})
    theirs = dict(peer.named_parameters())
    assert set(gradients) <= set(theirs)
    for name, gradient in gradients.items():
        expected = theirs[name].grad
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance, msg=partial(prepend, name))


@pytest.mark.parametrize(("activation", "peer_activation"), [("gelu-tanh", "gelu_new"), ("gelu", "gelu")])
def test_gpt2(activation: str, peer_activation: str) -> None:
    config = ModelConfig(**SHAPE, activation=activation)
    settings = transformers.GPT2Config(
        vocab_size=V, n_positions=S, n_embd=32, n_layer=2, n_head=4, activation_function=peer_activation,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    compare(config, transformers.GPT2LMHeadModel, settings, to_gpt2)


LLAMA: dict[str, Any] = dict(
    model_type="llama", position_embedding_type="rope", normalization="RMSNorm", activation="swiglu",
    add_bias_linear=False, untie_embeddings_and_output_weights=True, ffn_hidden_size=48,
)  # fmt: skip
PEER: dict[str, Any] = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=S, tie_word_embeddings=False, use_cache=False, attn_implementation="eager",
    rms_norm_eps=1e-5,
)  # fmt: skip


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_llama_with_grouped_queries(groups: int) -> None:
    config = ModelConfig(**SHAPE, **LLAMA, num_query_groups=groups)
    settings = transformers.LlamaConfig(**PEER, num_key_value_heads=groups)
    compare(config, transformers.LlamaForCausalLM, settings, to_llama)


def test_qwen3_has_query_key_norms_and_its_own_head_size() -> None:
    config = ModelConfig(**SHAPE, **LLAMA, num_query_groups=2, kv_channels=16, qk_layernorm=True)
    settings = transformers.Qwen3Config(**PEER, num_key_value_heads=2, head_dim=16)
    compare(config, transformers.Qwen3ForCausalLM, settings, to_llama)


EAGER = {"experts_implementation": "eager"}  # the library's grouped products have no fp64


@pytest.mark.parametrize("k", [1, 2, 4])
def test_mixtral(k: int) -> None:
    experts = Experts(num_experts=4, moe_router_topk=k, moe_ffn_hidden_size=48)
    config = ModelConfig(**SHAPE, **{**LLAMA, "ffn_hidden_size": None}, num_query_groups=2, experts=experts)
    settings = transformers.MixtralConfig(
        **PEER, num_key_value_heads=2, **EAGER, num_local_experts=4, num_experts_per_tok=k, sliding_window=None,
        rope_theta=1e4,
    )  # fmt: skip
    compare(config, transformers.MixtralForCausalLM, settings, to_mixtral)


def test_qwen3_moe() -> None:
    experts = Experts(num_experts=4, moe_ffn_hidden_size=48)
    config = ModelConfig(**SHAPE, **LLAMA, num_query_groups=2, kv_channels=16, qk_layernorm=True, experts=experts)
    settings = transformers.Qwen3MoeConfig(
        **PEER, num_key_value_heads=2, head_dim=16, **EAGER, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, moe_intermediate_size=48,
    )  # fmt: skip
    compare(config, transformers.Qwen3MoeForCausalLM, settings, to_mixtral)


def test_the_auxiliary_loss_is_that_of_transformers() -> None:
    """Theirs takes all layers' tokens as one batch and is not divided by k: of a single layer, k times ours."""
    coefficient, share = 0.7, 0.5
    experts = Experts(num_experts=4, moe_ffn_hidden_size=48, moe_aux_loss_coeff=coefficient)
    config = ModelConfig(**{**SHAPE, "num_layers": 1}, **LLAMA, num_query_groups=2, experts=experts)
    settings = transformers.MixtralConfig(
        **{**PEER, "num_hidden_layers": 1},
        num_key_value_heads=2, **EAGER, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=None, rope_theta=1e4, output_router_logits=True,
    )  # fmt: skip
    stack, data = build(config), dataclasses.replace(batch(), share=torch.tensor(share, dtype=torch.float64))
    parameters = dict(stack.logical_parameters())
    state = to_mixtral(config, {name: without_padding(p, p.detach()) for name, p in parameters.items()})
    with double_transformers(transformers.MixtralForCausalLM):
        peer = transformers.MixtralForCausalLM(settings).double()
        peer.load_state_dict(state, strict=False)
        output = peer(input_ids=data.tokens)
        expected = nn.functional.cross_entropy(output.logits.flatten(0, 1), data.labels.flatten(), reduction="sum")
        (expected + coefficient * share * output.aux_loss / 2).backward()
    stack(None, data).backward()
    theirs, ours = peer.model.layers[0].mlp.gate.weight.grad, parameters["layers.0.mlp.router.weight"].grad
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
