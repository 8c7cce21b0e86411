"""A block is its segments: two micro-batches that take turns at them compute what they compute one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.gradient import GradSink, attach_sink
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.block import Block
from megalite.parallel.tensor.context import LayerContext

SHAPE: dict[str, Any] = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=8, vocab_size=50, hidden_dropout=0.2
)


def half(number: int) -> tuple[Tensor, Microbatch]:
    """One of two half-batches: `[s, b, h]` and what belongs to it."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    samples = torch.arange(2) + 2 * number
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(number))
    return x, Microbatch(tokens, tokens, torch.arange(8).expand(2, 8), torch.ones(2, 8), samples)


def run(fields: dict[str, Any], *, in_turns: bool) -> list[Tensor]:
    """Outputs, gradients of the inputs, gradients of the parameters."""
    config = ModelConfig(**SHAPE, **fields)
    stack = build_stack(config, layer_specs(config)[1:3], LayerContext(), init_seed=1)
    blocks = [layer for layer in stack.ordered() if isinstance(layer, Block)]
    for parameter in stack.parameters():
        attach_sink(parameter, GradSink(torch.zeros_like(parameter)))
    inputs, batches = zip(*(half(number) for number in range(2)), strict=True)
    outputs: list[tuple[Tensor, ...]] = [(x.requires_grad_(),) for x in inputs]
    for block in blocks:
        if in_turns:
            for turn in zip(*(block.segments(batch) for batch in batches), strict=True):
                outputs = [segment.run(*state) for segment, state in zip(turn, outputs, strict=True)]
        else:
            outputs = [(block(*state, batch),) for state, batch in zip(outputs, batches, strict=True)]
    for (y,) in outputs:
        y.square().sum().backward()
    gradients = [parameter.sink.grad for parameter in stack.parameters()]  # type: ignore[attr-defined]
    return [y.detach() for (y,) in outputs] + [x.grad for x in inputs] + gradients


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_parallel_residual": True}, {"norm_placement": "post"}, {"norm_placement": "sandwich"}],
    ids=str,
)
def test_half_batches_in_turns_are_two_microbatches(fields: dict[str, Any]) -> None:
    fields = fields | dict(position_embedding_type="rope")
    one_by_one, in_turns = (run(fields, in_turns=in_turns) for in_turns in (False, True))
    for actual, expected in zip(in_turns, one_by_one, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_segments_are_the_pre_norm_block(parallel: bool) -> None:
    """Against the equations in the module's docstring, put together from the block's own layers."""
    config = ModelConfig(**{**SHAPE, "hidden_dropout": 0.0}, use_parallel_residual=parallel)
    block = build_stack(config, layer_specs(config)[1:2], LayerContext(), init_seed=1).ordered()[0]
    assert isinstance(block, Block)
    x, batch = half(0)
    attention, mlp = block.attention, block.mlp
    attended = attention.proj(attention.attend(attention.qkv(block.input_norm(x)), batch))
    normed = block.mlp_norm(x if parallel else x + attended)
    assert torch.equal(block(x, batch), x + attended + mlp.fc2(mlp.fc1(normed)))


@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_norms_of_results_are_added_after_them(placement: str) -> None:
    """The same, with norms elsewhere."""
    config = ModelConfig(**{**SHAPE, "hidden_dropout": 0.0}, norm_placement=placement)
    block = build_stack(config, layer_specs(config)[1:2], LayerContext(), init_seed=1).ordered()[0]
    assert isinstance(block, Block)
    x, batch = half(0)
    attention, mlp, nothing = block.attention, block.mlp, torch.nn.Identity()
    read, also_read = (nothing if norm is None else norm for norm in (block.input_norm, block.mlp_norm))
    assert (read is nothing) == (also_read is nothing) == (placement == "post")
    assert block.post_attention_norm is not None and block.post_mlp_norm is not None
    attended = x + block.post_attention_norm(attention.proj(attention.attend(attention.qkv(read(x)), batch)))
    assert torch.equal(block(x, batch), attended + block.post_mlp_norm(mlp.fc2(mlp.fc1(also_read(attended)))))
