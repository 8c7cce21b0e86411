"""Generation against loops without a cache, and the choice of tokens against its definitions."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.comm import ContextAxes
from megalite.errors import ConfigError
from megalite.generation.engine import Generator
from megalite.generation.groups import Request, group_size
from megalite.generation.sampling import NO_NUMBER, Sampling, pick_tokens
from megalite.generation.stages import ModelParts
from megalite.nn import LayerCache
from megalite.nn.stack import LayerStack
from tests.unit.inference.tiny_checkpoint import all_logits, tiny_model_config, write_checkpoint

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}
UNLIKE = LLAMA | {"num_layers": 2, "window_size": 3, "window_attn_skip_freq": "2", "no_rope_freq": "0,1"}
SINKS = LLAMA | {"softmax_type": "off-by-one", "attn_logit_softcapping": 0.5}
SINKS_ALONE, CAP_ALONE = {"softmax_type": "off-by-one"}, {"attn_logit_softcapping": 0.5}
GREEDY = Sampling(greedy=True)


def part_of(stack: LayerStack) -> ModelParts:
    """A whole model in this process."""
    weight = next(stack.parameters())
    wide = torch.promote_types(weight.dtype, torch.float32)
    boundary = wide if stack.config.fp32_residual_connection else weight.dtype
    return ModelParts({0: stack}, 1, stack.config, ContextAxes(), boundary, weight.device)


def continued(stack: LayerStack, prompts: list[list[int]], sampling: Sampling, count: int, **options: Any) -> list:
    making = {name: options.pop(name) for name in ("rounds", "num_choices") if name in options}
    requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(prompts)]
    generator = Generator(part_of(stack), **making)
    return generator.run(requests, sampling, max_new_tokens=count, **({"stops": ()} | options))


def one(stack: LayerStack, prompt: list[int], sampling: Sampling, count: int, **options: Any) -> list[int]:
    return continued(stack, [prompt], sampling, count, **options)[0]


@pytest.mark.parametrize(
    "changes",
    [{}, LLAMA, UNLIKE, SINKS, SINKS_ALONE, CAP_ALONE],
    ids=["gpt", "llama", "layers that differ", "sinks and a cap", "sinks", "a cap"],
)
def test_greedy_with_the_cache_equals_full_recomputation(tmp_path: Path, changes: dict) -> None:
    _, stack = write_checkpoint(tmp_path, model=tiny_model_config(**changes))
    prompts, expected = [[72, 101, 108], [5], [7] * 4], []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(12):
            text.append(int(all_logits(stack, text)[-1].argmax()))
        expected.append(text[len(prompt) :])
    for size, rounds in ((1, None), (3, 5)):
        assert continued(stack, prompts, GREEDY, 12, micro_batch_size=size, rounds=rounds) == expected


def test_nothing_of_a_generation_waits_for_a_collection(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    caches: list[weakref.ref[LayerCache]] = []
    make = LayerCache.__init__

    def noted(cache: LayerCache, most: int) -> None:
        make(cache, most)
        caches.append(weakref.ref(cache))

    gc.disable()
    try:
        with patch.object(LayerCache, "__init__", noted):
            continued(stack, [[5, 6], [7]], GREEDY, 4)
        assert caches and not any(cache() is not None for cache in caches)
    finally:
        gc.enable()


def test_past_the_last_position_the_newer_half_is_the_context(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    text = list(range(60, 76))  # as long as the model's 16 positions
    first = int(all_logits(stack, text)[-1].argmax())
    second = int(all_logits(stack, [*text, first][-8:])[-1].argmax())
    ids, longer, _ = continued(stack, [text, [1, 2, *text], [3]], GREEDY, 40, micro_batch_size=3)
    assert ids[:2] == [first, second]
    assert len(ids) == 40
    assert longer == ids, "of a prompt that is too long the end is seen"


def test_generation_stops_at_the_end_of_document(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    free = one(stack, [65], Sampling(seed=4), 10)
    end = free[5]
    assert one(stack, [65], Sampling(seed=4), 10, stops=(end,)) == free[: free.index(end)]
    told: list[int] = []
    part = one(
        stack, [65], Sampling(seed=4), 10, ended=lambda new: len(new) >= 3, on_tokens=lambda _, ids: told.extend(ids)
    )
    assert part == told == free[:3]


def test_what_keys_a_draw(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    first, again, other = (one(stack, [65], Sampling(seed=seed), 12) for seed in (1, 1, 2))
    assert first == again != other
    twins = continued(stack, [[65], [65]], Sampling(seed=1), 12, micro_batch_size=2)
    assert twins[0] == first != twins[1], "equal prompts of one list are drawn apart"
    generator = Generator(part_of(stack))
    (shifted,) = generator.run([Request(0, (65,), sample=1)], Sampling(seed=1), max_new_tokens=12, stops=())
    assert shifted == other


def drawn(sampling: Sampling, logits: torch.Tensor, draws: int = 4000) -> torch.Tensor:
    """Frequencies over positions 0, 1, 2, ..."""
    at, zeros = torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    ids = pick_tokens(logits.expand(draws, -1), sampling, zeros, zeros, at, num_choices=len(logits))
    return torch.bincount(ids, minlength=len(logits)) / draws


def test_filters_against_their_definitions() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logits = probabilities.log()
    expected = {
        Sampling(): probabilities,
        Sampling(temperature=0.5): probabilities**2 / (probabilities**2).sum(),
        Sampling(top_k=2): torch.tensor([4 / 7, 3 / 7, 0, 0]),
        Sampling(top_p=0.6): torch.tensor([4 / 7, 3 / 7, 0, 0]),  # 0.4 does not reach 0.6, 0.7 does
        Sampling(top_p=0.01): torch.tensor([1.0, 0, 0, 0]),
        Sampling(top_k=3, top_p=0.7): torch.tensor([4 / 7, 3 / 7, 0, 0]),  # of 4/9, 3/9, 2/9 two reach 0.7
        GREEDY: torch.tensor([1.0, 0, 0, 0]),
    }
    for sampling, wanted in expected.items():
        found = drawn(sampling, logits)
        assert torch.allclose(found, wanted.float(), atol=0.03), sampling
        assert ((found > 0) <= (wanted > 0)).all(), sampling


def test_draws_of_neighbours_do_not_depend_on_each_other() -> None:
    """Pairs of tokens at neighbouring positions, of prompts, and of seeds, as often as independent ones."""
    at, zeros = torch.arange(4000), torch.zeros(4000, dtype=torch.int64)
    flat = torch.zeros(4000, 4)
    for keys in ((zeros, zeros, at), (zeros, at, zeros), (at, zeros, zeros)):
        ids = pick_tokens(flat, Sampling(), *keys, num_choices=4)
        pairs = torch.bincount(4 * ids[:-1] + ids[1:], minlength=16) / 4000
        assert (pairs - 1 / 16).abs().max() < 0.02


def test_however_low_the_temperature_the_most_likely_token_is_chosen() -> None:
    logits = torch.tensor([3.0, 50.0, -60.0, 45.0])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for temperature in (0.0, 5e-324, 1e-300, 1e-45, 1e-7):
            assert drawn(Sampling(temperature=temperature), logits.to(dtype), 3)[1] == 1
    assert drawn(Sampling(temperature=0.0, greedy=True), logits, 3)[1] == 1
    assert (drawn(Sampling(temperature=math.inf), logits, 50) > 0).all()


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY, Sampling(top_k=1)])
def test_logits_that_are_no_numbers_are_no_token(sampling: Sampling) -> None:
    rows, zeros = torch.tensor([[1.0, math.nan], [0.0, -50.0]]), torch.zeros(2, dtype=torch.int64)
    assert pick_tokens(rows, sampling, zeros, zeros, zeros, num_choices=2).tolist() == [NO_NUMBER, 0]


def test_ids_without_a_token_are_never_chosen(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    assert max(one(stack, [65], Sampling(), 64, num_choices=70)) < 70


def test_there_is_a_group_for_each_stage() -> None:
    assert [group_size(n, 8, 4) for n in (1, 3, 8, 9, 32, 100)] == [1, 1, 2, 3, 8, 8]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"temperature": -0.1}, "--temperature=-0.1: must be >= 0 (0: the most likely token, as --greedy)"),
        ({"temperature": float("nan")}, "--temperature=nan: must be >= 0 (0: the most likely token, as --greedy)"),
        ({"seed": 2**70}, f"--seed={2**70}: must be below 2^64; choose a smaller one"),
        ({"top_k": -1}, "--top-k=-1: must be >= 0 (0: all tokens)"),
        ({"top_p": 1.5}, "--top-p=1.5: must be above 0 and at most 1 (1: all tokens)"),
        (
            {"greedy": True, "top_k": 3},
            "--greedy: leaves no choice to --temperature, --top-k and --top-p; drop one or the other",
        ),
    ],
)
def test_bad_settings(values: dict, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**values)
    assert str(caught.value) == line
