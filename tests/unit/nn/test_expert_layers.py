"""Experts against their definition (`megalite.testing.experts`): every expert computes every token, in a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.config.model_parts import Experts
from megalite.errors import ConfigError
from megalite.gradient import GradSink, WeightGradQueue, attach_sink
from megalite.microbatch import Microbatch
from megalite.microbatch_notes import EXTRA, ExpertLoads
from megalite.models import build_stack, layer_specs
from megalite.nn.router import choose, largest
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor.context import LayerContext
from megalite.testing.experts import PlainExperts, best_experts

B, S, V, E = 2, 12, 50, 4
SHAPE: dict[str, Any] = dict(num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=S, vocab_size=V)
LOSSES: dict[str, Any] = dict(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.1)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt, top 2": ({}, LOSSES),
    "llama, top 2": (dict(activation="swiglu", add_bias_linear=False, ffn_hidden_size=24), LOSSES),
    "gated, with biases": (dict(activation="swiglu", ffn_hidden_size=24), LOSSES),
    "another width, each second block": ({}, dict(moe_ffn_hidden_size=24, moe_layer_freq="2", **LOSSES)),
    "softmax before": ({}, dict(moe_router_pre_softmax=True, **LOSSES)),
    "top 1": ({}, dict(moe_router_topk=1, moe_router_pre_softmax=True, **LOSSES)),
    "all experts": ({}, dict(moe_router_topk=E, **LOSSES)),
    "sigmoid": ({}, dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5, **LOSSES)),
    "sigmoid, top 1": ({}, dict(moe_router_score_function="sigmoid", moe_router_topk=1, **LOSSES)),
    "groups": ({}, dict(moe_router_num_groups=2, moe_router_group_topk=1, **LOSSES)),
    "per sequence": ({}, dict(moe_router_load_balancing_type="seq_aux_loss", **LOSSES)),
    "not balanced": ({}, dict(moe_router_load_balancing_type="none", moe_z_loss_coeff=0.1)),
    "capacity 1": ({}, dict(moe_expert_capacity_factor=1.0, **LOSSES)),
    "capacity less than 1": ({}, dict(moe_expert_capacity_factor=0.3)),
    "a shared expert": ({}, dict(moe_shared_expert_intermediate_size=20, **LOSSES)),
    "parallel residual": (dict(use_parallel_residual=True), LOSSES),
}


def batch(share: float | None = 0.25) -> Microbatch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(0))
    return Microbatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=torch.arange(S).expand(B, S),
        loss_mask=torch.ones(B, S),
        sample_ids=torch.arange(B),
        share=None if share is None else torch.tensor(share, dtype=torch.float64),
    )


def build(fields: dict[str, Any], given: dict[str, Any], **context: Any) -> tuple[ModelConfig, LayerStack]:
    config = ModelConfig(**SHAPE, **fields, experts=Experts(num_experts=E, **given))
    stack = build_stack(config, layer_specs(config), LayerContext(dtype=torch.float64, **context), init_seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # so large that routing and experts matter
        for p in stack.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return config, stack


def gradients(stack: LayerStack) -> dict[str, Tensor]:
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in stack.logical_parameters()}


def plainly(config: ModelConfig, stack: LayerStack) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss without and gradients with the auxiliary losses, by the definition."""
    plain = PlainExperts(config)
    plain.replace(stack)
    loss = stack(None, batch())
    (loss + plain.take() * 0.25).backward()
    return loss.detach(), gradients(stack)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_experts_are_their_definition(name: str) -> None:
    config, stack = build(*CASES[name])
    loss = stack(None, batch())
    loss.backward()
    expected_loss, expected = plainly(*build(*CASES[name]))
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-12, atol=0)
    assert_same(gradients(stack), expected)


def test_auxiliary_losses_reach_the_router() -> None:
    """The gradient of the definition differs with and without them: what the comparison above would not see."""
    with_losses, without = (plainly(*build({}, given))[1] for given in (LOSSES, {}))
    router = "layers.0.mlp.router.weight"
    assert not torch.allclose(with_losses[router], without[router], rtol=1e-3)


@pytest.mark.parametrize("name", ["gpt, top 2", "gated, with biases", "capacity 1", "a shared expert"])
def test_weight_gradients_wait_for_the_second_half_of_a_split_backward(name: str) -> None:
    queue = WeightGradQueue()
    config, stack = build(*CASES[name], weight_grads=queue)
    for p in stack.parameters():
        attach_sink(p, GradSink(torch.full_like(p, torch.nan)))  # the first contribution overwrites
    sinks = {name: p.sink for name, p in stack.logical_parameters()}  # type: ignore[attr-defined]
    stacked = [name for name in sinks if ".experts.fc" in name]
    loss = stack(None, batch())
    with queue.collect() as later:
        loss.backward()
    assert stacked and all(sinks[name].fresh for name in stacked)
    for compute in later:
        compute()
    assert_same({name: sink.grad for name, sink in sinks.items()}, plainly(*build(*CASES[name]))[1])


def test_all_tokens_to_one_expert_and_none_to_others() -> None:
    given = dict(moe_router_topk=1, moe_router_pre_softmax=True, **LOSSES)
    for chosen in (0, E - 1):
        built = [build({}, given) for _ in range(2)]
        for _, stack in built:
            for layer in ("layers.0", "layers.1"):
                block = stack.get_submodule(layer)
                with torch.no_grad():
                    block.mlp_norm.weight.zero_()
                    block.mlp_norm.bias.fill_(1.0)
                    block.mlp.router.weight.zero_()
                    block.mlp.router.weight[chosen].fill_(1.0)
        (config, stack), other = built
        stack(None, batch()).backward()
        found = gradients(stack)
        assert_same(found, plainly(*other)[1])
        used = [bool(found["layers.0.mlp.experts.fc1.weight"][e].any()) for e in range(E)]
        assert used == [e == chosen for e in range(E)]


def test_of_equal_scores_the_first_expert_is_taken() -> None:
    tied = torch.tensor([[[1.0, 3.0, 3.0, 1.0, 3.0]], [[0.0] * 5]])
    assert largest(tied, 3).tolist() == [[[1, 2, 4]], [[0, 1, 2]]]
    given = Experts(num_experts=4, moe_router_num_groups=2, moe_router_group_topk=1)
    for row in ([0.0] * 4, [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 2.0, 2.0]):
        chosen = choose(torch.tensor([[row]]), given).flatten().tolist()
        assert chosen == best_experts(row, given, [0.0] * 4)


def test_balanced_experts_have_a_loss_of_one() -> None:
    """E/k sum f P with f = k/E and P = 1/E; and loads are what the router did, once."""
    loads = ExpertLoads()
    config, stack = build({}, dict(moe_aux_loss_coeff=1.0, moe_z_loss_coeff=1.0, moe_router_topk=E), loads=loads)
    for layer in ("layers.0", "layers.1"):
        stack.get_submodule(layer).mlp.router.weight.data.zero_()
    with loads.of(3):
        stack(None, batch())
    stack(None, batch())  # not counted
    noted = loads.take(range(8))
    assert sorted(noted) == [0, 1] and not loads.take(range(8))
    expected = [float(B * S)] * E + [1.0, float(torch.tensor(E).log() ** 2), 0.0]
    assert len(expected) == E + EXTRA
    for load in noted.values():
        torch.testing.assert_close(load, torch.tensor(expected, dtype=torch.float64))


def test_evaluation_drops_no_token_and_adds_no_loss() -> None:
    outputs = []
    for given in ({}, dict(moe_expert_capacity_factor=0.3, **LOSSES)):
        _, stack = build({}, given)
        stack.train(False)
        with torch.no_grad():
            outputs.append(stack(None, batch(None)))
    assert torch.equal(*outputs)


def sparse_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    experts = Experts(num_experts=E, moe_layer_freq=text)
    return ModelConfig(**SHAPE | {"num_layers": num_layers}, experts=experts).sparse_layers


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("1", 3, "111"),
        ("2", 5, "10101"),
        ("[0]*3+[1]*2", 5, "00011"),
        ("([1, 0]*2 + [1])", 5, "10101"),
        ("([1]*2+[0])*2", 6, "110110"),
        ("[1]", 1, "1"),
    ],
)
def test_which_blocks_are_sparse(text: str, layers: int, expected: str) -> None:
    assert "".join(str(int(sparse)) for sparse in sparse_layers(text, layers)) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "[2]", "[1]*2", "[1]*99999999", "__import__('os')", "[[1]*2]*2", "1e3"]
)
def test_senseless_patterns_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--moe-layer-freq=.*--num-layers=4|list of 0 and 1"):
        sparse_layers(text, 4)
