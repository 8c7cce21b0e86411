"""`--compile`: compiled blocks compute what eager blocks compute, from one compilation for all blocks, and split their
backward where eager blocks split it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing

from megalite.config import Experts
from megalite.config.model import ModelConfig
from megalite.config.model_parts import Latent
from megalite.gradient import GradSink, attach_sink
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor.context import LayerContext

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": dict(hidden_dropout=0.1),
    "llama": dict(
        position_embedding_type="rope", normalization="RMSNorm", activation="swiglu", add_bias_linear=False,
        untie_embeddings_and_output_weights=True, num_query_groups=2, qk_layernorm=True,
    ),
    "parallel": dict(use_parallel_residual=True, attention_dropout=0.1, recompute_granularity="selective"),
    "experts": dict(
        experts=Experts(num_experts=4, moe_aux_loss_coeff=0.1, moe_shared_expert_intermediate_size=48),
    ),
    "groups": dict(
        activation="swiglu", add_bias_linear=False, normalization="RMSNorm", position_embedding_type="rope",
        latent=Latent(
            multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8,
            v_head_dim=16,
        ),
        experts=Experts(
            num_experts=8, moe_router_topk=3, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
            moe_router_num_groups=4, moe_router_group_topk=2, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01,
            moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True, moe_ffn_hidden_size=32,
        ),
    ),
    "clamped": dict(
        activation="quick-geglu", glu_linear_offset=1.0, activation_func_clamp_value=0.2, softmax_type="learnable",
        experts=Experts(num_experts=4, moe_router_topk=2, moe_router_bias=True, moe_aux_loss_coeff=0.1),
    ),
    "sinks": dict(softmax_type="learnable", attn_logit_softcapping=0.5),
    "post": dict(norm_placement="post", normalization="RMSNorm", add_bias_linear=False),
    "sandwich": dict(norm_placement="sandwich", hidden_dropout=0.1, apply_layernorm_1p=True),
    "recomputed": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=(1,), hidden_dropout=0.1
    ),
}  # fmt: skip
# Input norm, attention, what follows attention; an MLP's activation; what follows the MLP, if it is more than an
# addition. Of experts: the choice, the losses that balance, the activation in both directions; biases; what joins a
# shared one.
COMPILED, SPARSE = 3, 4
AGAIN = 5
"""Further compilations of a sparse block's: for any number of rows, from any place, in both directions; of a number
that turns out to be fixed."""


def run(fields: dict[str, Any], backend: Any, dtype: torch.dtype = torch.float64, layers: int = 3) -> dict[str, Any]:
    """Loss, gradients, and how many weight gradients were put aside; each is checked to have waited."""
    config = ModelConfig(
        num_layers=layers, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=100, **fields
    )
    tokens = torch.randint(0, 100, (3, 33), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand(3, 32)
    data = Microbatch(tokens[:, :-1], tokens[:, 1:], positions, torch.ones(3, 32), torch.arange(3))
    ctx = LayerContext(dtype=dtype)
    stack = build_stack(config, layer_specs(config), ctx, init_seed=1)
    if backend is not None:
        stack.compile_blocks(backend)
    sinks = {}
    for name, p in stack.logical_parameters():
        sinks[name] = GradSink(torch.zeros_like(p, dtype=ctx.wide_dtype), uses=getattr(p, "sink_uses", 1))
        attach_sink(p, sinks[name])
    loss = stack(None, data)
    with ctx.weight_grads.collect() as deferred:
        loss.backward()
    waiting = {name for name, sink in sinks.items() if sink.fresh}
    for compute in deferred:
        compute()
    gradients = {name: sink.buffer for name, sink in sinks.items()}
    return {"loss": loss.detach(), "gradients": gradients, "deferred": len(deferred), "waiting": waiting}


@pytest.mark.parametrize(
    "variant", ["experts", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "groups", "clamped"))]
)
def test_a_compiled_backward_is_split_where_an_eager_one_is(variant: str) -> None:
    eager, compiled = (run(VARIANTS[variant], backend, layers=1) for backend in (None, "aot_eager"))
    matrices = {name for name in eager["gradients"] if name.endswith("weight")}
    matrices = {name for name in matrices if not any(part in name for part in ("norm", "router", "shared_gate"))}
    assert matrices <= compiled["waiting"] == eager["waiting"]
    assert compiled["deferred"] == eager["deferred"] >= len(matrices)
    torch.testing.assert_close(compiled["gradients"], eager["gradients"], rtol=1e-12, atol=1e-13)


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_blocks_equal_eager_ones(variant: str) -> None:
    torch._dynamo.reset()
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    eager, compiled = (run(VARIANTS[variant], backend) for backend in (None, compilations))
    pieces = int(variant in ("parallel", "sinks", "clamped"))  # attention comes in two, before and behind its tiles
    experts = VARIANTS[variant].get("experts")
    mlp = 1
    if experts is not None:
        biased = VARIANTS[variant].get("add_bias_linear", True)
        mlp = SPARSE + biased + 2 * (experts.moe_shared_expert_intermediate_size is not None)
    least = COMPILED + mlp + pieces + ("hidden_dropout" in VARIANTS[variant])
    assert least <= compilations.frame_count <= least + AGAIN * (experts is not None)
    assert compiled["waiting"] == eager["waiting"] and compiled["deferred"] == eager["deferred"]
    torch.testing.assert_close(compiled["loss"], eager["loss"], rtol=1e-12, atol=0)
    torch.testing.assert_close(compiled["gradients"], eager["gradients"], rtol=1e-10, atol=1e-11)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_compiled_blocks_are_as_close_to_the_truth_as_eager_ones(dtype: torch.dtype) -> None:
    truth = run(VARIANTS["gpt"], None)["gradients"]
    eager, compiled = (run(VARIANTS["gpt"], backend, dtype)["gradients"] for backend in (None, "inductor"))
    for name, exact in truth.items():
        errors = [(gradients[name] - exact).norm() / exact.norm() for gradients in (eager, compiled)]
        assert errors[1] < 1.5 * errors[0] + 1e-6, name
