"""The parts of the transformer: attention's two ways, the fused loss, precision options, the key-value cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.comm.mesh import Axis
from megalite.config.model import ModelConfig
from megalite.gradient import WeightGradQueue
from megalite.inventory import tiling as pieces
from megalite.inventory.memory_plan import Recompute
from megalite.inventory.tiling import recompute_ranges
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.activation import ACTIVATIONS
from megalite.nn.attention.blocked import blocked_attention, register_operator
from megalite.nn.attention.core import AttentionCore, fused_attention
from megalite.nn.attention.tiles import tiled_attention
from megalite.nn.kv_cache import LayerCache
from megalite.nn.rope import Rotary, rotate
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor import VocabShard, fused_cross_entropy, token_losses
from megalite.parallel.tensor.context import LayerContext
from megalite.visibility import Visibility

SHAPE: dict[str, Any] = dict(num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=12, vocab_size=50)
ROPE: dict[str, Any] = dict(position_embedding_type="rope", normalization="RMSNorm", num_query_groups=2)


def batch(b: int = 2, s: int = 12, documents: bool = False) -> Microbatch:
    tokens = torch.randint(0, 50, (b, s + 1), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0] * 5 + [5] * (s - 5)).expand(b, s) if documents else None
    return Microbatch(
        tokens[:, :-1], tokens[:, 1:], torch.arange(s).expand(b, s), torch.ones(b, s), torch.arange(b), starts
    )


def model(dtype: torch.dtype = torch.float64, **fields: Any) -> LayerStack:
    config = ModelConfig(**{**SHAPE, **fields})
    return build_stack(config, layer_specs(config), LayerContext(dtype=dtype), init_seed=1)


def logits(stack: LayerStack, data: Microbatch) -> Tensor:
    return stack.get_submodule("head").logits(stack.body(None, data))


def qkv(s: int, length: int, r: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (s, 2, 3, r, 8), (length, 2, 3, 8), (length, 2, 3, 8)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def textbook_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Head by head, query by query."""
    s, b, g, r, d = q.shape
    past = k.shape[0] - s
    rows = []
    for i in range(s):
        for j in range(b):
            for head in range(g * r):
                seen = [
                    t for t in range(past + i + 1) if documents is None or documents[j, t] == documents[j, past + i]
                ]
                scores = k[seen, j, head // r] @ q[i, j, head // r, head % r] / d**0.5
                rows.append(scores.softmax(0) @ v[seen, j, head // r])
    return torch.stack(rows).view(s, b, g * r * d)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("s", "length", "r"), [(7, 7, 1), (7, 7, 2), (3, 7, 2), (1, 7, 1)])
def test_both_ways_of_attention_are_the_textbook(s: int, length: int, r: int, documents: bool) -> None:
    starts = torch.tensor([[0, 0, 0, 3, 3, 5, 5], [0, 1, 1, 1, 1, 1, 1]]) if documents else None
    inputs = qkv(s, length, r)
    expected = textbook_attention(*inputs, starts)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, inputs, dy)
    q, k, v = inputs
    at = torch.arange(length)
    sight = Visibility.of(at[-s:], at, window=None, document_starts=None if starts is None else starts[:, -s:])
    ways = [tiled_attention(*inputs, sight)]
    if starts is None and s in (1, length):
        ways.append(fused_attention(*inputs))
    if starts is None and s == length:
        ways.append(blocked_attention(torch.cat((q, k[:, :, :, None], v[:, :, :, None]), 3)))
    for actual in ways:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
        for a, e in zip(torch.autograd.grad(actual, inputs, dy), gradients, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("s", [64, 100, 640])
def test_blocks_of_queries(s: int, r: int) -> None:
    """One block, a shorter last one, and long blocks; eager, and as the operator of compiled blocks."""
    register_operator()
    inputs = qkv(s, s, r)
    q, k, v = inputs
    packed = torch.cat((q, k[:, :, :, None], v[:, :, :, None]), 3)
    expected = fused_attention(q, k, v)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, inputs, dy)
    for actual in (blocked_attention(packed), torch.ops.megalite.blocked_attention(packed)[0]):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
        for a, e in zip(torch.autograd.grad(actual, inputs, dy, retain_graph=True), gradients, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("g", "r"), [(1, 1), (1, 3), (2, 2)])
def test_operator_has_the_layout_that_it_announces(g: int, r: int) -> None:
    """A compiler plans with the strides of the announced result: one group a rank is the case that could differ."""
    register_operator()
    packed = torch.randn(70, 2, g, r + 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.library.opcheck(
        torch.ops.megalite.blocked_attention.default, (packed.requires_grad_(),), test_utils="test_faketensor"
    )


@pytest.mark.parametrize("r", [1, 2])
def test_blocks_leave_out_the_padding_of_values(r: int) -> None:
    register_operator()
    packed = torch.randn(100, 2, 2, r + 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    packed[:, :, :, -1, 5:] = 0
    whole = blocked_attention(packed.requires_grad_()).view(100, 2, 2, r, 8)
    dy = torch.randn(100, 2, 2, r, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dy[..., 5:] = 0
    (gradient,) = torch.autograd.grad(whole, packed, dy)
    for y in (blocked_attention(packed, 5), torch.ops.megalite.blocked_attention(packed, 5)[0]):
        torch.testing.assert_close(y, whole[..., :5].flatten(2), rtol=1e-12, atol=1e-13)
        (found,) = torch.autograd.grad(y, packed, dy[..., :5].flatten(2))
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-12)


def test_blocked_attention_takes_a_gradient_of_any_layout() -> None:
    packed = torch.randn(70, 2, 2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = blocked_attention(packed.requires_grad_())
    dy = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).transpose(0, 1)
    (actual,) = torch.autograd.grad(y, packed, dy, retain_graph=True)
    (expected,) = torch.autograd.grad(y, packed, dy.contiguous())
    assert torch.equal(actual, expected)


def test_softmax_in_fp32_is_closer_to_the_truth() -> None:
    inputs = qkv(64, 64, 1, torch.bfloat16)
    wide = tuple(t.detach().double() for t in inputs)
    truth = fused_attention(*wide)  # type: ignore[arg-type]
    errors = {
        flag: (
            AttentionCore(softmax_in_fp32=flag, dropout=1e-15, key=torch.tensor(3))(
                *inputs, sample_ids=torch.arange(2), training=True
            )
            - truth
        ).norm()
        for flag in (False, True)
    }
    assert errors[True] < errors[False]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fused_cross_entropy(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int) -> None:
    n, h, padded, vocab = 20, 16, 48, 37
    monkeypatch.setattr(pieces, "CHUNK_ELEMENTS_CPU", chunk * vocab)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(padded, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (n,), generator=generator)
    mask = torch.rand(n, generator=generator)
    shard = VocabShard(Axis.single("tp"), 0, vocab)
    loss = fused_cross_entropy(x, weight, labels, mask, shard=shard, sequence_parallel=False, queue=WeightGradQueue())
    loss.backward(torch.tensor(0.5, dtype=loss.dtype))
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    losses = F.cross_entropy(exact_x @ exact_weight[:vocab].t(), labels, reduction="none")
    expected = (losses * mask.double()).sum()
    (0.5 * expected).backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    for actual, exact in (
        (loss, expected),
        (token_losses(x, weight, labels, shard=shard), losses),
        (x.grad, exact_x.grad),
        (weight.grad, exact_weight.grad),
    ):
        assert actual is not None and exact is not None
        assert (actual.double() - exact).norm() <= tolerance * exact.norm()


def test_rope_turns_pairs_by_the_position_and_leaves_the_rest() -> None:
    config = ModelConfig(**{**SHAPE, **ROPE, "rotary_percent": 0.5, "rotary_base": 100.0})
    d = config.head_dim
    x = torch.randn(5, 2, 1, 1, d, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    y = rotate(x, Rotary(config)(positions, torch.float64))
    half = d // 4
    for i in range(5):
        for j in range(2):
            for c in range(half):
                turn = torch.polar(
                    torch.ones((), dtype=torch.float64), positions[j, i].double() * 100.0 ** (-2 * c / (d // 2))
                )
                pair = torch.complex(x[i, j, 0, 0, c], x[i, j, 0, 0, c + half]) * turn
                torch.testing.assert_close(torch.stack([pair.real, pair.imag]), y[i, j, 0, 0, [c, c + half]])
    assert torch.equal(y[..., d // 2 :], x[..., d // 2 :])


def test_activations() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    gate, value = x[:, :4], x[:, 4:]
    phi = 0.5 * (1 + torch.erf(gate / 2**0.5))
    cube = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    expected = {
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu-tanh": 0.5 * x * (1 + torch.tanh(cube)),
        "swiglu": gate / (1 + torch.exp(-gate)) * value,
        "geglu": gate * phi * value,
        "geglu-tanh": (0.5 * x * (1 + torch.tanh(cube)))[:, :4] * value,
        "quick-geglu": gate / (1 + torch.exp(-1.702 * gate)) * value,
        "squared-relu": torch.where(x > 0, x * x, 0.0),
    }
    assert expected.keys() == ACTIVATIONS.keys()
    for name, values in expected.items():
        torch.testing.assert_close(ACTIVATIONS[name][0](x), values)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations(name: str) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    plain, gradient = ACTIVATIONS[name]
    y = plain(x)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(gradient(x.detach(), dy), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("fields", [{}, ROPE], ids=["learned", "rope"])
def test_generation_with_a_cache_sees_what_the_whole_sequence_sees(fields: dict[str, Any]) -> None:
    stack, data = model(**fields).eval(), batch()
    whole = logits(stack, data)
    cache, at = [LayerCache(12) for _ in range(3)], 0
    pieces = []
    with torch.no_grad():
        for n in (5, 1, 1, 3, 2):  # prompt, single tokens, and chunks
            part = slice(at, at + n)
            piece = Microbatch(
                data.tokens[:, part],
                data.labels[:, part],
                data.positions[:, part],
                data.loss_mask[:, part],
                data.sample_ids,
            )
            pieces.append(stack.get_submodule("head").logits(stack.body(None, piece, cache)))
            at += n
            assert {layer.length for layer in cache} == {at}
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-13)


def test_a_full_cache_says_so() -> None:
    cache = LayerCache(3)
    cache.append(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4))
    with pytest.raises(ValueError, match="key-value cache of 3 tokens: 4 do not fit"):
        cache.append(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4))


@pytest.mark.parametrize("fields", [{}, ROPE], ids=["learned", "rope"])
def test_documents_do_not_see_each_other(fields: dict[str, Any]) -> None:
    """The second document's logits are those it has alone, when its positions start anew."""
    stack, data = model(**fields), batch(documents=True)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)
    data = Microbatch(data.tokens, data.labels, positions, data.loss_mask, data.sample_ids, data.document_starts)
    alone = Microbatch(data.tokens[:, 5:], data.labels[:, 5:], positions[:, 5:], data.loss_mask[:, 5:], data.sample_ids)
    torch.testing.assert_close(logits(stack, data)[5:], logits(stack, alone), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("fields", [{}, ROPE], ids=["learned", "rope"])
def test_the_future_is_hidden(fields: dict[str, Any]) -> None:
    stack, data = model(**fields), batch()
    before = logits(stack, data)
    changed = data.tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 50
    after = logits(stack, Microbatch(changed, data.labels, data.positions, data.loss_mask, data.sample_ids))
    assert torch.equal(after[:8], before[:8]) and not torch.equal(after[8:], before[8:])


def test_bf16_stays_close_to_fp64_and_closer_with_an_fp32_residual_stream() -> None:
    data = batch()
    truth = logits(model(), data)
    errors = []
    for fp32_residual in (False, True):
        stack = model(torch.bfloat16, fp32_residual_connection=fp32_residual)
        x = stack.body(None, data)
        assert x.dtype == (torch.float32 if fp32_residual else torch.bfloat16)
        errors.append((stack.get_submodule("head").logits(x) - truth).norm() / truth.norm())
        stack(None, data).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in stack.parameters())
    assert errors[1] < errors[0] < 0.05


@pytest.mark.parametrize(
    ("method", "number", "expected"),
    [
        ("uniform", 1, [(0, 1, False), (1, 2, True), (2, 3, True), (3, 4, True), (4, 5, False)]),
        ("uniform", 2, [(0, 1, False), (1, 3, True), (3, 4, True), (4, 5, False)]),
        ("block", 2, [(0, 1, False), (1, 2, True), (2, 3, True), (3, 4, False), (4, 5, False)]),
        ("block", 0, [(0, 1, False), (1, 4, False), (4, 5, False)]),
        ("block", 9, [(0, 1, False), (1, 2, True), (2, 3, True), (3, 4, True), (4, 5, False)]),
    ],
)
def test_what_is_recomputed(method: str, number: int, expected: list[tuple[int, int, bool]]) -> None:
    assert recompute_ranges(5, [1, 2, 3], Recompute(method, number)) == expected


def test_recomputed_blocks_keep_their_input_only() -> None:
    def saved_bytes(**fields: Any) -> int:
        total = 0

        def count(t: Tensor) -> Tensor:
            nonlocal total
            total += t.numel() * t.element_size()
            return t

        stack = model(**fields)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            stack(None, batch())
        return total

    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=(1,))
    assert saved_bytes(**full) < 0.3 * saved_bytes()
