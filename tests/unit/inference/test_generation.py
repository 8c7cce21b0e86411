"""Sampling against loops without a cache, and the filters against their definitions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megalite.errors import CheckpointError, ConfigError
from megalite.inference.generate import Sampling, generate, pick_token
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


@pytest.mark.parametrize("changes", [{}, LLAMA, UNLIKE, SINKS], ids=["gpt", "llama", "layers that differ", "sinks"])
def test_greedy_with_the_cache_equals_full_recomputation(tmp_path: Path, changes: dict) -> None:
    _, stack = write_checkpoint(tmp_path, model=tiny_model_config(**changes))
    text = [72, 101, 108]
    expected = list(text)
    for _ in range(12):
        expected.append(int(all_logits(stack, expected)[-1].argmax()))
    ids = generate(stack, text, Sampling(greedy=True), max_new_tokens=12, eod_id=None)
    assert list(ids) == expected[3:]


def test_past_the_last_position_the_newer_half_is_the_context(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    text = list(range(60, 76))  # as long as the model's 16 positions
    first = int(all_logits(stack, text)[-1].argmax())
    second = int(all_logits(stack, [*text, first][-8:])[-1].argmax())
    ids = list(generate(stack, text, Sampling(greedy=True), max_new_tokens=40, eod_id=None))
    assert ids[:2] == [first, second]
    assert len(ids) == 40
    longer = list(generate(stack, [1, 2, *text], Sampling(greedy=True), max_new_tokens=1, eod_id=None))
    assert longer == [first], "of a prompt that is too long the end is seen"


def test_generation_stops_at_the_end_of_document(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    free = list(generate(stack, [65], Sampling(seed=4), max_new_tokens=10, eod_id=None))
    end = free[5]
    stopped = list(generate(stack, [65], Sampling(seed=4), max_new_tokens=10, eod_id=end))
    assert stopped == free[: free.index(end)]


def test_a_seed_decides_the_text(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    one, again, other = (
        list(generate(stack, [65], Sampling(seed=seed), max_new_tokens=12, eod_id=None)) for seed in (1, 1, 2)
    )
    assert one == again != other


def _frequencies(sampling: Sampling, logits: torch.Tensor, draws: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(len(logits))
    for _ in range(draws):
        counts[pick_token(logits, sampling, generator)] += 1
    return counts / draws


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
        Sampling(greedy=True): torch.tensor([1.0, 0, 0, 0]),
    }
    for sampling, wanted in expected.items():
        found = _frequencies(sampling, logits)
        assert torch.allclose(found, wanted.float(), atol=0.03), sampling
        assert ((found > 0) <= (wanted > 0)).all(), sampling


def test_however_low_the_temperature_the_most_likely_token_is_chosen(tmp_path: Path) -> None:
    logits = torch.tensor([3.0, 50.0, -60.0, 45.0])
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for temperature in (0.0, 5e-324, 1e-300, 1e-45, 1e-7):
            assert pick_token(logits.to(dtype), Sampling(temperature=temperature), generator) == 1
    assert pick_token(logits, Sampling(temperature=0.0, greedy=True), generator) == 1
    assert len({pick_token(logits, Sampling(temperature=math.inf), generator) for _ in range(50)}) == 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(greedy=True)])
def test_a_model_that_is_lost_is_one_line(sampling: Sampling) -> None:
    with pytest.raises(CheckpointError, match="logits are not numbers"):
        pick_token(torch.tensor([1.0, math.nan]), sampling, torch.Generator())


def test_ids_without_a_token_are_never_chosen(tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path)
    ids = list(generate(stack, [65], Sampling(), max_new_tokens=64, eod_id=None, num_choices=70))
    assert max(ids) < 70


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
