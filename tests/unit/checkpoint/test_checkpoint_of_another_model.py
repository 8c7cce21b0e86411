"""A checkpoint of another model is refused with all differences at once; padding of the vocabulary is no difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_layouts import load_as_ranks, save_as_ranks

from megalite.checkpoint import check_model
from megalite.comm.rectangles import TensorShard, shards_of_range
from megalite.config.model import ModelConfig
from megalite.errors import CheckpointError
from megalite.inventory.parameter_placement import ParameterPlacement

MODEL = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=100)


def test_all_differences_are_named_at_once() -> None:
    now = replace(MODEL, hidden_size=32, num_attention_heads=2, norm_epsilon=1e-6, add_bias_linear=False)
    with pytest.raises(CheckpointError) as caught:
        check_model(MODEL, now, "--load=runs/a")
    assert str(caught.value) == (
        "--load=runs/a: model differs from checkpoint: --hidden-size=32 (checkpoint 64), "
        "--ffn-hidden-size=128 (checkpoint 256), --num-attention-heads=2 (checkpoint 4), "
        "--num-query-groups=2 (checkpoint 4), --norm-epsilon=1e-06 (checkpoint 1e-05), "
        "--add-bias-linear=false (checkpoint true), --add-qkv-bias=false (checkpoint true); "
        "use the checkpoint's values, or --use-checkpoint-args"
    )


def test_what_does_not_change_the_model_may_differ() -> None:
    check_model(MODEL, replace(MODEL, hidden_dropout=0.1, recompute_granularity="full", rotary_base=5e5), "x")
    check_model(MODEL, replace(MODEL, cpu_offloading_num_layers=1), "x")
    check_model(MODEL, replace(MODEL, num_query_groups=4, kv_channels=16, ffn_hidden_size=256), "x")
    rope = replace(MODEL, position_embedding_type="rope")
    check_model(rope, replace(rope, seq_length=64), "x")
    for changed in (replace(rope, rotary_base=5e5), replace(rope, activation="swiglu")):
        with pytest.raises(CheckpointError, match="differs"):
            check_model(rope, changed, "x")
    with pytest.raises(CheckpointError, match="--max-position-embeddings=64 \\(checkpoint 32\\)"):
        check_model(MODEL, replace(MODEL, seq_length=64), "x")


def vocabulary(words: int, width: int, tp: int, dp: int, padded: int, *, fill: bool) -> list[list[TensorShard]]:
    """A vocabulary-parallel embedding under ZeRO: padded to `padded` rows, cut over tp by rows, over dp flat."""
    logical = torch.arange(1.0, words * width + 1).view(words, width)
    rows = padded // tp
    ranks = []
    for t in range(tp):
        table = torch.zeros(padded, width)
        table[:words] = logical if fill else 0
        flat = table[t * rows : (t + 1) * rows].reshape(-1).clone()
        placement = ParameterPlacement((words, width), (t * rows, 0), frozenset({"tp"}))
        bounds = [flat.numel() * d // dp for d in range(dp + 1)]
        for d in range(dp):
            part = flat[bounds[d] : bounds[d + 1]]
            ranks.append(shards_of_range("w", placement, (rows, width), part, bounds[d]))
    return ranks


def test_padding_of_the_vocabulary_is_never_stored_and_changes_with_tp(tmp_path: Path) -> None:
    words, width = 37, 6
    logical = torch.arange(1.0, words * width + 1).view(words, width)
    layouts = [
        (1, 1, 37),
        (1, 3, 40),
        (2, 1, 48),
        (2, 2, 64),
        (4, 1, 128),
        (4, 3, 128),
    ]  # from 64 on, ranks of pads only
    for number, source in enumerate(layouts):
        path = save_as_ranks(tmp_path, number, vocabulary(words, width, *source, fill=True))
        for target in layouts:
            ranks = vocabulary(words, width, *target, fill=False)
            manifest = load_as_ranks(path, ranks)
            assert manifest.tensors["w"].shape == (words, width)
            gathered = torch.zeros(words, width)
            for shard in (shard for shards in ranks for shard in shards):
                end = tuple(a + n for a, n in zip(shard.offset, shard.local.shape, strict=True))
                gathered[shard.offset[0] : end[0], shard.offset[1] : end[1]] += shard.local
            assert torch.equal(gathered, logical)
