"""Kernels and bytes of a compiled block beside nanoGPT's, counted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu_page, sparse_launches
from benchmarks.counted_launches import Traffic, estimate, nanogpt, of_a_block, of_a_logit, ours
from megalite.config import read_unjudged
from megalite.gradient import GradSink, attach_sink
from megalite.inventory import kept_bytes, model_layers
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor import LayerContext

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="counts with torch 2.13"),
]


def test_a_block_launches_no_more_than_nanogpts() -> None:
    forward, backward = (sum(part.values()) for part in of_a_block(ours))
    assert (forward, backward) == (9, 31)
    theirs = [sum(part.values()) for part in of_a_block(nanogpt)]
    assert forward <= theirs[0] and backward <= theirs[1]


def test_a_step_is_estimated_no_slower_than_nanogpts() -> None:
    counts = {
        name: (Traffic.of_a_block(make), of_a_logit(name)) for name, make in (("nanoGPT", nanogpt), ("megalite", ours))
    }
    for vocabulary in (50304, 50257):
        ms = {name: estimate(name, vocabulary, *counted)["all"] for name, counted in counts.items()}
        assert ms["megalite"] <= ms["nanoGPT"], vocabulary


@pytest.mark.parametrize("recipe", sparse_launches.RECIPES)
def test_a_sparse_block_launches_no_more_than_its_budget(recipe: str) -> None:
    found, most = sparse_launches.count(recipe), sparse_launches.held()[recipe]
    assert all(a <= b for a, b in zip(found, most, strict=True)), f"{found}, at most {most}"
    assert found.compiled_forward < found.forward and found.compiled_backward < found.backward
    # latent attention and Gated DeltaNet have more of their own
    assert found.compiled_forward <= 40 or recipe in ("deepseek_v3", "qwen3_next_80b_a3b")


def test_the_page_shows_the_budgets_that_are_held() -> None:
    assert gpu_page.written("sparse_launches") == sparse_launches.table(sparse_launches.held())


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b", "deepseek_v3"])
def test_a_compiled_sparse_block_keeps_what_is_predicted(recipe: str) -> None:
    flags = [*sparse_launches.SMALL.split(), *sparse_launches.RECIPES[recipe].split()]
    flags += "--recompute-granularity none --compile --no-bf16".split()
    path = f"{gpu_page.ROOT}/configs/{recipe}.yaml"
    config, layer = read_unjudged(["--config", path, *flags])[0], sparse_launches.LAYER
    torch._dynamo.reset()
    with sparse_launches.as_chosen_on_a_gpu():
        stack = build_stack(config.model, [layer_specs(config.model)[layer]], LayerContext(), init_seed=1)
        for parameter in stack.parameters():
            attach_sink(parameter, GradSink(torch.zeros(parameter.shape)))
        stack.compile_blocks("aot_eager_decomp_partition")  # divides forward and backward as inductor does
        weights = {parameter.untyped_storage()._cdata for parameter in stack.parameters()}
        kept: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage()._cdata not in weights:
                kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        b, s, h = config.training.micro_batch_size, config.model.seq_length, config.model.hidden_size
        at = torch.arange(s).expand(b, s)
        batch = Microbatch(at, at, at, torch.ones(b, s), torch.arange(b), share=torch.ones(()))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            stack(torch.randn(s, b, h, requires_grad=True), batch)
    predicted = kept_bytes(config, model_layers(config.model)[layer], on_cpu=True)
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.06)
