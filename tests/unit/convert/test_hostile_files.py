"""A directory from a stranger: whatever is in it, one line that names the file, and nothing is written or executed."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.config.model import ModelConfig
from megalite.convert import HuggingFaceSource, write_checkpoint
from megalite.convert.registry import family_of
from megalite.errors import CheckpointError, ConfigError, MegaliteError
from megalite.inventory.layers import parameter_shapes

CONFIG: dict[str, Any] = dict(
    model_type="llama", vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5,
    tie_word_embeddings=False, rope_theta=10000.0,
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A whole little Llama."""
    model = ModelConfig(
        model_type="llama", num_layers=1, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2,
        seq_length=32, vocab_size=20, position_embedding_type="rope", normalization="RMSNorm", activation="swiglu",
        add_bias_linear=False, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    shapes = parameter_shapes(model)
    tensors = {}
    for pair in family_of(model).pairs(model):
        parts = pair.form.to_theirs(model, torch.randn(shapes[pair.ours]))
        tensors |= {name: part.clone() for name, part in zip(pair.theirs, parts, strict=True)}
    there = tmp_path / "there"
    there.mkdir()
    save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    (there / "config.json").write_text(json.dumps(CONFIG))
    return there


def convert(directory: Path) -> None:
    write_checkpoint(HuggingFaceSource(directory), directory.parent / "ours")


def test_the_little_llama_is_whole(directory: Path) -> None:
    convert(directory)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "mamba"}, "config.json: model_type 'mamba' not supported (gpt2, llama, mistral"),
        ({"model_type": ["llama"]}, "config.json: model_type \"['llama']\" not supported"),
        ({"hidden_size": "16"}, "config.json: hidden_size '16' is not a positive integer"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": True}, "config.json: hidden_size 'True' is not a positive integer"),
        ({"num_hidden_layers": 10**9}, "more than 10000"),
        ({"num_key_value_heads": 3}, "--num-query-groups=3: must divide"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps 'nan' is not a positive number"),
        ({"hidden_act": "relu"}, "config.json: hidden_act 'relu' not supported (silu, gelu)"),
        ({"mlp_bias": True}, "config.json: attention_bias"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "config.json: rope_scaling: rope_type 'longrope' not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": -1}},
            "original_max_position_embeddings '-1' is not a positive integer",
        ),
        ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling: factor is missing"),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config"),
        ({"intermediate_size": 32}, "shape [24, 16], config.json says [32, 16]"),
        ({"num_hidden_layers": 2}, "tensors are missing: model.layers.1."),
        ({"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, "tensors are missing"),
    ],
)
def test_a_config_that_is_not_ours(directory: Path, changes: dict[str, Any], line: str) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        convert(directory)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not list((directory.parent / "ours").glob("*"))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", ".hidden", "a/b.safetensors", "", "a\0b"])
def test_an_index_that_points_elsewhere(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory.parent / "secret.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not allowed"):
        HuggingFaceSource(directory)


def test_a_pickle_is_not_opened(directory: Path) -> None:
    canary = directory / "canary"

    class Opens:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (canary,)

    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Opens()))
    with pytest.raises(CheckpointError, match="pytorch_model.bin is a pickle, which is not read"):
        HuggingFaceSource(directory)
    (directory / "pytorch_model.bin").rename(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        HuggingFaceSource(directory)
    assert not canary.exists()


def test_tensors_nobody_knows_and_odd_dtypes(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, file)
    HuggingFaceSource(directory)  # a buffer of older versions
    save_file(tensors | {"model.layers.0.adapter.weight": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match="has no model.layers.0.adapter.weight"):
        HuggingFaceSource(directory)
    save_file(tensors | {"model.norm.weight": torch.ones(16, dtype=torch.int8)}, file)
    with pytest.raises(CheckpointError, match="model.norm.weight: dtype I8"):
        convert(directory)


def test_damaged_headers(directory: Path) -> None:
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    generator = random.Random(4)
    refused = 0
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            raw[generator.randrange(header)] = generator.randrange(256)
        file.write_bytes(raw[: generator.randrange(header)] if generator.random() < 0.2 else raw)
        try:
            source = HuggingFaceSource(directory)
            for name in parameter_shapes(source.model):
                source.read(name)
        except MegaliteError:
            refused += 1
    assert refused > 250  # a flip inside a number may leave a legal header


def test_a_directory_that_holds_something_is_never_written_into(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        convert(directory)
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["mine.txt"]


def test_no_family_for_a_model_of_both_worlds() -> None:
    model = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20)
    assert family_of(model).name == "gpt2"
    mixed = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20, activation="squared-relu"
    )
    with pytest.raises(ConfigError, match="nearest is gpt2: --activation=squared-relu"):
        family_of(mixed)
