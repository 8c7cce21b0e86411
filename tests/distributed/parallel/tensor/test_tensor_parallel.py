"""Tensor and sequence parallelism compute what one process computes: losses, logits and every gradient, fp64, 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.shared_memory import share_axis
from megalite.comm.world import World
from megalite.config.model import ModelConfig
from megalite.gradient import GradSink, attach_sink
from megalite.inventory import placement_of
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor.context import LayerContext
from megalite.testing import run_ranks, run_single

GPT: dict[str, Any] = dict(model_type="gpt", hidden_dropout=0.2, activation="gelu-tanh")
LLAMA: dict[str, Any] = dict(
    model_type="llama",
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    num_query_groups=4,
    kv_channels=6,
    qk_layernorm=True,
    add_qkv_bias=True,
)
SHAPE: dict[str, Any] = dict(
    num_layers=2, hidden_size=32, num_attention_heads=8, seq_length=8, vocab_size=70, make_vocab_size_divisible_by=16
)


def make_batch(b: int = 3, s: int = 8, vocab: int = 70, documents: bool = False) -> Microbatch:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocab, (b, s + 1), generator=generator)
    mask = torch.rand(b, s, generator=generator).round(decimals=1)
    starts = torch.tensor([0] * 3 + [3] * (s - 3)).expand(b, s) if documents else None
    return Microbatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=torch.arange(s).expand(b, s),
        loss_mask=mask,
        sample_ids=torch.arange(b) + 5,
        document_starts=starts,
    )


def body_model(
    world: World, fields: dict[str, Any], sequence: bool, sinks: bool, documents: bool = False, backend: str = ""
) -> dict[str, Any]:
    """Loss, gradients by logical name with their places, logits and token losses of one micro-batch; blocks are
    compiled where a `backend` of torch.compile is given.
    """
    tp = Axis.single("tp")
    if world.size > 1:
        tp = share_axis(ParallelMesh.build(rank=world.rank, size=world.size, tp=world.size)["tp"])
    config = ModelConfig(**{**SHAPE, **fields})
    ctx = LayerContext(tp=tp, sequence_parallel=sequence, dtype=torch.float64, seed=3)
    stack = build_stack(config, layer_specs(config), ctx, init_seed=11)
    if backend:
        stack.compile_blocks(backend)
    parameters = stack.logical_parameters()
    if sinks:
        for _, p in parameters:
            attach_sink(p, GradSink(torch.full_like(p, 9.0), uses=getattr(p, "sink_uses", 1)))
    batch = make_batch(documents=documents)
    with ctx.weight_grads.collect() as deferred:
        loss = stack(None, batch)
        (loss * 0.25).backward()
    for compute in deferred:
        compute()
    gradients = {}
    for name, p in parameters:
        place = placement_of(p)
        valid = place.valid_shape(tuple(p.shape))
        gradient = p.sink.grad if sinks else p.grad  # type: ignore[attr-defined]
        assert gradient is not None, name
        padding = gradient.clone()
        padding[tuple(slice(n) for n in valid)] = 0.0
        assert not padding.any(), f"{name}: gradient in padding rows"
        gradients[name] = {
            "shape": place.global_shape,
            "offset": place.offset,
            "partial": bool(place.partial),
            "replicated": not place.sharded,
            "value": gradient[tuple(slice(n) for n in valid)].contiguous(),
        }
    stack.eval()
    with torch.no_grad():
        x = stack.body(None, batch)
        head = stack.get_submodule("head")
        return {
            "loss": float(loss),
            "evaluated": float(stack(None, batch)),
            "gradients": gradients,
            "logits": head.logits(x),
            "token_losses": head.token_losses(x, batch),
        }


def whole_gradients(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Logical gradients put together from the ranks' rectangles, by the rules that placements state."""
    whole = {}
    for name, first in results[0]["gradients"].items():
        parts = [result["gradients"][name] for result in results]
        if first["partial"]:
            whole[name] = torch.stack([part["value"] for part in parts]).sum(0)
        elif first["replicated"]:
            for part in parts:
                assert torch.equal(part["value"], first["value"]), f"{name}: replicas differ"
            whole[name] = first["value"]
        else:
            total = torch.full(first["shape"], float("nan"), dtype=torch.float64)
            for part in parts:
                place = zip(part["offset"], part["value"].shape, strict=True)
                total[tuple(slice(begin, begin + n) for begin, n in place)] = part["value"]
            whole[name] = total
    return whole


def assert_same(single: dict[str, Any], results: list[dict[str, Any]], tolerance: float = 1e-12) -> None:
    expected, actual = whole_gradients([single]), whole_gradients(results)
    assert expected.keys() == actual.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m: name + m)  # noqa: B023
    for result in results:
        assert result["loss"] == pytest.approx(single["loss"], rel=tolerance)
        assert result["evaluated"] == pytest.approx(single["evaluated"], rel=tolerance)
        torch.testing.assert_close(result["logits"], single["logits"], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(result["token_losses"], single["token_losses"], rtol=tolerance, atol=tolerance)


@pytest.mark.in_turn
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("fields", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("size", [2, 4])
def test_layout_equals_one_process(fields: dict[str, Any], sequence: bool, size: int) -> None:
    single = run_single(body_model, fields, False, False)
    assert_same(single, run_ranks(body_model, size, fields, sequence, False))


@pytest.mark.parametrize("fields", [GPT, LLAMA], ids=["gpt", "llama"])
def test_gradient_sinks_receive_what_autograd_would(fields: dict[str, Any]) -> None:
    single = run_single(body_model, fields, False, False)
    assert_same(single, [run_single(body_model, fields, False, True)])
    assert_same(single, run_ranks(body_model, 2, fields, True, True))


def test_a_rank_without_a_true_token_takes_part() -> None:
    """70 tokens in 256 padded rows: ranks 2 and 3 hold padding only."""
    fields = {**LLAMA, "make_vocab_size_divisible_by": 64}
    assert_same(run_single(body_model, fields, False, False), run_ranks(body_model, 4, fields, False, False))


def test_dropout_of_attention_and_documents() -> None:
    fields = {**GPT, "attention_dropout": 0.3}
    single = run_single(body_model, fields, False, False, True)
    assert_same(single, run_ranks(body_model, 2, fields, True, False, True))


@pytest.mark.parametrize("granularity", ["selective", "full"], ids=["attention", "blocks"])
def test_recomputation_under_sequence_parallelism(granularity: str) -> None:
    fields = {**GPT, "attention_dropout": 0.3}
    again = {**fields, "recompute_granularity": granularity}
    if granularity == "full":
        again |= {"recompute_method": "uniform", "recompute_num_layers": (1,)}
    single = run_single(body_model, fields, False, False)
    assert_same(single, run_ranks(body_model, 2, again, True, True))


@pytest.mark.landing
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "sequence", [pytest.param(False, marks=pytest.mark.full, id="tp"), pytest.param(True, id="sp")]
)
def test_compiled_blocks_compute_the_same(sequence: bool, backend: str) -> None:
    """`--compile`; the C++ compiler behind it needs a minute on a new machine."""
    single = run_single(body_model, LLAMA, False, False)
    assert_same(single, run_ranks(body_model, 2, LLAMA, sequence, True, False, backend, timeout=600))
