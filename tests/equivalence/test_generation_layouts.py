"""Texts and scores at every layout equal those of one process, in fp64, and those without a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.comm import World
from megalite.config import ContextParallelism, Delta, Latent, ModelConfig, ParallelConfig, RopeScaling
from megalite.config.lora import Lora
from megalite.config.model_parts import Experts
from megalite.config.parallel import ExpertParallelism
from megalite.errors import ConfigError
from megalite.generation import Request, Sampling
from megalite.inference import generate, load_for_inference, score_continuations, score_text
from megalite.microbatch import Microbatch
from megalite.nn.stack import LayerStack
from megalite.testing import run_ranks, run_single
from tests.unit.inference.tiny_checkpoint import TEXT, all_logits, tiny_model_config, write_checkpoint

GPT = tiny_model_config(num_layers=4, num_attention_heads=4, vocab_size=257)
LLAMA = replace(
    GPT,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    ffn_hidden_size=24,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    num_query_groups=2,
)
WINDOWS = replace(LLAMA, window_size=3, window_attn_skip_freq="2", no_rope_freq="0,1,0,0")
SINKS = replace(LLAMA, softmax_type="off-by-one", softmax_type_skip_freq="3", attn_logit_softcapping=0.5)
OLMO3 = replace(
    WINDOWS,
    no_rope_freq=None,
    norm_placement="post",
    qk_layernorm=True,
    qk_layernorm_across_heads=True,
    window_rotary_base=10000.0,
    rope_scaling=RopeScaling(
        use_rope_scaling=True, rope_scaling_type="yarn", rope_scaling_factor=4.0, rope_scaling_original_length=8
    ),
)
GEMMA3 = replace(
    WINDOWS,
    no_rope_freq=None,
    activation="geglu-tanh",
    norm_placement="sandwich",
    apply_layernorm_1p=True,
    qk_layernorm=True,
    embedding_multiplier=4.0,
    softmax_scale=0.4,
    window_rotary_base=300.0,
)
GPT_OSS = replace(
    WINDOWS,
    no_rope_freq=None,
    add_bias_linear=True,
    softmax_type="learnable",
    activation="quick-geglu",
    glu_linear_offset=1.0,
    activation_func_clamp_value=0.01,
    experts=Experts(num_experts=4, moe_router_bias=True),
)
LATENT = replace(
    LLAMA,
    num_query_groups=None,
    qk_layernorm=True,
    softmax_type="learnable",
    latent=Latent(
        multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5
    ),
    rope_scaling=replace(OLMO3.rope_scaling, mscale=1.0, mscale_all_dim=1.5),
)
DELTA = replace(
    LLAMA,
    attention_output_gate=True,
    apply_layernorm_1p=True,
    delta=Delta(
        experimental_attention_variant="gdn",
        linear_attention_freq="2",
        linear_key_head_dim=4,
        linear_value_head_dim=6,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    ),
)
ONE_KEY = replace(LLAMA, num_query_groups=1)
SPARSE = replace(LLAMA, experts=Experts(num_experts=4, moe_router_topk=2))
PREFIX = replace(
    GPT,
    lora=Lora(lora_rank=3, adapter_kind="prefix"),
    max_position_embeddings=19,
    qk_layernorm=True,
    num_query_groups=2,
)
BOTTLENECK = replace(LLAMA, lora=Lora(lora_rank=3, adapter_kind="bottleneck"))
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "windows": WINDOWS,
    "sinks": SINKS,
    "sparse": SPARSE,
    "olmo3": OLMO3,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "latent": LATENT,
    "delta": DELTA,
    "one key": ONE_KEY,
    "prefix": PREFIX,
    "bottleneck": BOTTLENECK,
}

# Different lengths, one as long as the 16 positions, one longer, and more than there are stages.
PROMPTS = [[72, 101, 108], [1], [5] * 9, list(range(60, 76)), list(range(40, 60)), [7, 8], [9, 9, 9, 9, 1]]
GREEDY, DRAWN, FILTERED = Sampling(greedy=True), Sampling(seed=5), Sampling(top_k=9, top_p=0.9, temperature=1.5)

PAIRS = [([72, 105], [33]), ([1, 2, 3], [4, 5, 6]), ([9], [8] * 15), ([5, 5], [1, 2]), ([7], [1])]

Layout = dict[str, int | str]


def parallel_of(layout: Layout) -> ParallelConfig:
    """tp, pp, cp, ep, kind (of cp), or meshes -> the section."""
    if "meshes" in layout:
        meshes = str(layout["meshes"])
        return ParallelConfig(stage_meshes=meshes, pipeline_model_parallel_size=meshes.count(",") + 1)
    cp = ContextParallelism(context_parallel_size=int(layout.get("cp", 1)), cp_comm_type=str(layout.get("kind", "p2p")))
    return ParallelConfig(
        tensor_model_parallel_size=int(layout.get("tp", 1)),
        pipeline_model_parallel_size=int(layout.get("pp", 1)),
        context=cp,
        experts=ExpertParallelism(expert_model_parallel_size=int(layout.get("ep", 1))),
    )


def continued(world: World, directory: str, layout: Layout, sampling: list[Sampling], **options: Any) -> list[Any]:
    """What every rank was told."""
    loaded = load_for_inference(directory, device=world.device.type, world=world, parallel=parallel_of(layout))
    options = {"max_new_tokens": 12, "micro_batch_size": 2} | options
    # Prompts in pieces of two tokens and rounds of three between agreements: nothing may depend on either.
    requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(PROMPTS)]
    pieces = replace(loaded.generator, least_chunk=2, rounds=3)
    cut = pieces.run(requests, sampling[0], stops=loaded.stops, **options)
    assert cut == [ids for (ids,) in generate(loaded, PROMPTS, sampling[0], **options)]
    early = pieces.run(requests, Sampling(seed=9), stops=range(0, 257, 6), **options)  # in between a group ends
    # ... and another takes its place, which has more tokens to come than those that go on
    many = replace(loaded.generator, rounds=None)
    late = many.run(requests, Sampling(seed=9), stops=range(0, 257, 6), **options | {"micro_batch_size": 1})
    return [*(generate(loaded, PROMPTS, how, **options) for how in sampling), early, late]


def scored(world: World, directory: str, layout: Layout) -> Any:
    """Loss of a text in windows, and the scores of continuations."""
    loaded = load_for_inference(directory, device=world.device.type, world=world, parallel=parallel_of(layout))
    whole = score_text(loaded, TEXT, overlap=3, micro_batch_size=2)
    scores = list(score_continuations(loaded, PAIRS, micro_batch_size=2))
    return [whole.loss_sum, whole.num_tokens, whole.num_bytes], [(s.log_likelihood, s.is_greedy) for s in scores]


def training_loss(stack: LayerStack, context: list[int], continuation: list[int]) -> float:
    """The loss of the continuation's labels, as a step of training computes it."""
    ids = torch.tensor([[*context, *continuation]])
    mask = torch.zeros(1, ids.shape[1] - 1)
    mask[0, len(context) - 1 :] = 1
    at = torch.arange(ids.shape[1] - 1)[None]
    batch = Microbatch(ids[:, :-1], ids[:, 1:], at, mask, torch.zeros(1, dtype=torch.int64))
    loss = stack.train()(None, batch)
    assert loss.requires_grad
    return float(loss.detach())


def without_cache(stack: LayerStack, prompt: list[int], count: int) -> list[int]:
    """Greedy, by full recomputation of what is seen."""
    text, start, limit = list(prompt), max(0, len(prompt) - 16), 16
    for _ in range(count):
        start = len(text) - limit // 2 if len(text) - start > limit else start
        token = int(all_logits(stack, text[start:])[-1].argmax())
        if token == 256:
            break
        text.append(token)
    return text[len(prompt) :]


def checkpoint(tmp_path: Path, model: ModelConfig) -> LayerStack:
    return write_checkpoint(tmp_path, model=model)[1]


def equal_everywhere(tmp_path: Path, name: str, layout: Layout, ranks: int, **options: Any) -> None:
    stack = checkpoint(tmp_path, MODELS[name])
    how = [GREEDY, DRAWN, FILTERED]
    expected = run_single(continued, str(tmp_path), {}, how, **options)
    assert [one for (one,) in expected[0]] == [without_cache(stack, prompt, 12) for prompt in PROMPTS]
    assert expected[0] != expected[1] != expected[2] and len(set(map(len, expected[3]))) > 3
    for found in run_ranks(continued, ranks, str(tmp_path), layout, how, **options):
        assert found == expected, layout


def scores_are_equal(tmp_path: Path, name: str, layout: Layout, ranks: int) -> None:
    stack = checkpoint(tmp_path, MODELS[name])
    (sums, scores) = run_single(scored, str(tmp_path), {})
    assert [-score for score, _ in scores] == pytest.approx([training_loss(stack, *pair) for pair in PAIRS], rel=1e-12)
    for found, others in run_ranks(scored, ranks, str(tmp_path), layout):
        assert found == pytest.approx(sums, rel=1e-12), layout
        assert others == [(pytest.approx(score, rel=1e-12), greedy) for score, greedy in scores], layout


def test_a_layout_scores_as_one_process_and_as_training(tmp_path: Path) -> None:
    scores_are_equal(tmp_path, "llama", {"tp": 2, "pp": 2}, 4)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        ("gpt", {"meshes": "1x2,1x1"}, 3),
        ("prefix", {"tp": 2, "pp": 2}, 4),
        ("gpt", {"tp": 2, "pp": 2}, 4),
        ("windows", {"cp": 2}, 2),
        ("delta", {"cp": 2, "kind": "a2a"}, 2),
        ("olmo3", {"tp": 2}, 2),
        ("gemma3", {"pp": 2}, 2),
    ],
)
def test_a_layout_continues_as_one_process(tmp_path: Path, name: str, layout: Layout, ranks: int) -> None:
    equal_everywhere(tmp_path, name, layout, ranks)


MATRIX: list[tuple[Layout, int]] = [
    ({"tp": 2}, 2),
    ({"pp": 2}, 2),
    ({}, 2),
    ({"pp": 4}, 4),
    ({"tp": 2, "pp": 2}, 4),
    ({"pp": 2}, 4),
    ({"cp": 2}, 2),
    ({"cp": 2, "kind": "a2a"}, 2),
    ({"cp": 2, "kind": "all_gather"}, 2),
    ({"cp": 2, "pp": 2}, 4),
    ({"cp": 2, "tp": 2}, 4),
    ({"cp": 4}, 4),
    ({"meshes": "2x1,1x2"}, 4),
    ({"meshes": "1x3,1x1"}, 4),
    ({"meshes": "1x1,1x2,1x1"}, 4),
]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"cp": 2}, "kind=prefix: not with --context-parallel-size, whose ranks share the keys; drop one"),
        ({"tp": 4}, "kind=prefix: 4 ranks of --tensor-model-parallel-size share 2 key heads; use 2 at most"),
    ],
)
def test_a_layout_without_a_prefix(tmp_path: Path, layout: Layout, message: str) -> None:
    checkpoint(tmp_path, PREFIX)
    with pytest.raises(ConfigError, match=message):
        load_for_inference(tmp_path, device="cpu", world=World(size=4), parallel=parallel_of(layout))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("layout", "ranks"), MATRIX, ids=str)
def test_every_layout_continues_as_one_process(tmp_path: Path, name: str, layout: Layout, ranks: int) -> None:
    if name == "prefix" and "cp" in layout:
        pytest.skip("ranks that share a text cannot have keys in front of it: test_a_layout_without_a_prefix")
    if name == "one key" and layout.get("kind") == "a2a":
        pytest.skip("two ranks cannot trade the heads of one key: refused at the start")
    equal_everywhere(tmp_path, name, layout, ranks, micro_batch_size=3)
    scores_are_equal(tmp_path / "scores", name, layout, ranks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [({"ep": 2}, 2), ({"ep": 2, "tp": 2}, 4), ({"ep": 2, "cp": 2}, 2), ({"ep": 4}, 4), ({"ep": 2, "pp": 2}, 4)],
)
def test_experts_over_ranks_continue_as_one_process(tmp_path: Path, layout: Layout, ranks: int) -> None:
    equal_everywhere(tmp_path, "sparse", layout, ranks, micro_batch_size=1)
    scores_are_equal(tmp_path / "scores", "sparse", layout, ranks)
