"""`--compile`: blocks that torch.compile has seen compute what eager blocks compute, from one compilation for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing

from megalite.config.model import ModelConfig
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.context import LayerContext

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": dict(hidden_dropout=0.1),
    "llama": dict(
        position_embedding_type="rope", normalization="RMSNorm", activation="swiglu", add_bias_linear=False,
        untie_embeddings_and_output_weights=True, num_query_groups=2, qk_layernorm=True,
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_blocks_equal_eager_ones(variant: str) -> None:
    config = ModelConfig(
        num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=100, **VARIANTS[variant]
    )
    tokens = torch.randint(0, 100, (3, 33), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand(3, 32)
    data = Microbatch(tokens[:, :-1], tokens[:, 1:], positions, torch.ones(3, 32), torch.arange(3))
    torch._dynamo.reset()
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    results = []
    for compiled in (False, True):
        ctx = LayerContext(dtype=torch.float64, autograd_only=compiled)
        stack = build_stack(config, layer_specs(config), ctx, init_seed=1)
        if compiled:
            for layer in stack.ordered()[1:-1]:
                layer.compile(backend=compilations)
        loss = stack(None, data)
        loss.backward()
        results.append((loss, [p.grad for p in stack.parameters()]))
    assert compilations.frame_count == 1
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-10, atol=1e-11)
