"""Published figures: parameters and FLOPs to the last published digit, and what some runs are predicted to take."""

from __future__ import annotations

import dataclasses
from statistics import mean, median

import pytest

from megalite.config import ModelConfig
from megalite.config.model import FAMILY_DEFAULTS
from megalite.inventory.layers import count_parameters
from tools.compare_published import by_table, compare, configured, published_flops, published_runs, table


def _gpt3(layers: int, hidden: int, heads: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048, vocab_size=50368
    )


# mosaicml/llm-foundry, scripts/train/benchmarking/README.md, column NumParams at 2,048 tokens: the sizes of the GPT-3
# family with learned positions, biases and tied embeddings.
GPT3_FAMILY = [
    ((12, 768, 12), 125_311_488),
    ((24, 1024, 16), 355_985_408),
    ((24, 1536, 16), 760_470_528),
    ((24, 2048, 16), 1_315_950_592),
    ((32, 2560, 32), 2_651_837_440),
    ((32, 4096, 32), 6_658_859_008),
    ((40, 5120, 40), 12_853_954_560),
    ((48, 7168, 56), 29_975_214_080),
    ((80, 8192, 64), 64_862_437_376),
]


@pytest.mark.parametrize(("shape", "parameters"), GPT3_FAMILY)
def test_the_gpt3_family_has_the_published_parameters(shape: tuple[int, int, int], parameters: int) -> None:
    assert count_parameters(_gpt3(*shape)) == parameters
    longer = dataclasses.replace(_gpt3(*shape), seq_length=8192)
    assert count_parameters(longer) == parameters + (8192 - 2048) * shape[1]


def test_gpt3_175b_is_the_175b_of_its_paper() -> None:
    """arXiv 2005.14165, table 2.1: 175.0 B; 96 layers of 12,288, GPT-2's vocabulary."""
    model = dataclasses.replace(_gpt3(96, 12288, 96), vocab_size=50257)
    assert round(count_parameters(model) / 1e9) == 175
    # table D.1: 3.14e23 FLOPs are 6 for each of 174.6 G parameters and each of 300 G tokens
    assert f"{6 * count_parameters(model) * 300e9:.3g}" == "3.14e+23"


# Hugging Face counts them so (`safetensors.total` of the released models).
LLAMA = [
    ("Llama 2 7B", 6_738_415_616, dict(num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008)),
    (
        "Llama 2 13B",
        13_015_864_320,
        dict(num_layers=40, hidden_size=5120, num_attention_heads=40, ffn_hidden_size=13824),
    ),
    (
        "Llama 2 70B",
        68_976_648_192,
        dict(num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672, num_query_groups=8),
    ),
    (
        "Llama 3 8B",
        8_030_261_248,
        dict(num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336, num_query_groups=8),
    ),
    (
        "Llama 3 70B",
        70_553_706_496,
        dict(num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672, num_query_groups=8),
    ),
    (
        "Llama 3 405B",
        405_853_388_800,
        dict(num_layers=126, hidden_size=16384, num_attention_heads=128, ffn_hidden_size=53248, num_query_groups=8),
    ),
]


@pytest.mark.parametrize(("name", "parameters", "shape"), LLAMA)
def test_llama_has_the_published_parameters(name: str, parameters: int, shape: dict[str, int]) -> None:
    vocabulary = 32000 if "2" in name.split()[1] else 128256
    model = ModelConfig(seq_length=4096, vocab_size=vocabulary, **shape, **FAMILY_DEFAULTS["llama"])
    assert count_parameters(model) == parameters


# README of NVIDIA/Megatron-LM, 2022 to 2024: MFU of the runs of arXiv 2205.05198, table 5 (312 TFLOP/s are the peak).
MFU = {"22B sel": 41.5, "175B sel": 51.4, "530B sel": 56.0, "1T sel": 56.3}


def test_flops_give_the_published_utilisation() -> None:
    for run in published_runs():
        if run.source == "C" and run.name in MFU:
            config, _ = configured(run)
            assert run.seconds is not None
            rates = [
                published_flops(config, "attention") / (seconds * run.devices * 312e12) * 100
                for seconds in (run.seconds + 0.005, run.seconds - 0.005)  # as the source rounds
            ]
            assert round(rates[0], 1) <= MFU[run.name] <= round(rates[1], 1), run.name


def test_aggregate_rates_are_those_of_the_table() -> None:
    """images/cases_april2021.png: rate of a GPU times GPUs; and the recomputed FLOPs are 96 B s l h^2 (...)."""
    aggregates = [4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0]
    runs = [run for run in published_runs() if run.source == "A"]
    for run, aggregate in zip(runs, aggregates, strict=True):
        assert run.rate is not None and run.rate * run.devices / 1000 == pytest.approx(aggregate, rel=0.004)
        config, _ = configured(run)
        model, batch = config.model, config.training.global_batch_size
        h, s, layers = model.hidden_size, model.seq_length, model.num_layers
        paper = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + 51200 / (16 * layers * h))
        assert published_flops(config, "recomputed") == pytest.approx(paper, rel=1e-12)


BAR = 0.08
"""Mean error of each table."""


def test_some_published_runs_are_predicted(full: bool) -> None:
    """`tools/compare_published.py` prints all. The order of a table's rates is predicted, and no number is tuned to a
    table: corrected by the mean of the others it is not much worse off."""
    compared = compare(run for run in published_runs() if full or (run.devices <= 64 and run.source in "AC"))
    print(table(compared))
    assert median(abs(entry.error) for entry in compared) <= 0.08
    assert max(abs(entry.error) for entry in compared) <= 0.25
    needs = [entry.prediction.memory_bytes for entry in compared if not entry.fits]
    assert all(nbytes <= 80e9 * 1.05 for nbytes in needs)  # all of them did fit
    for key, (error, order) in by_table(compared).items():
        assert error <= BAR, key
        assert order is None or order >= 0.6, key
        mine = [1 + entry.error for entry in compared if entry.run.source == key]
        others = [1 + entry.error for entry in compared if entry.run.source != key]
        assert mean(abs(one / median(others) - 1) for one in mine) <= BAR + 0.04, key
