"""The search misses no legal layout, keeps what is given, and says why nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.config.cli import read_unjudged
from megalite.config.legal import config_problems
from megalite.planner.cost import Roofline
from megalite.planner.hardware import Hardware, load_hardware
from megalite.planner.predict import Prediction, predict
from megalite.planner.search import AS_LONG, SearchResult, _in_order, pareto, search
from megalite.planner.search_space import Layout, apply, layout_of, legal_layouts
from megalite.schedule import SCHEDULES
from plan_fit import explain, remedy

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 8 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --bf16"
)


def _config(extra: str = "") -> Config:
    config, _ = read_unjudged(f"{BASE} {extra}".split(), optional=["micro_batch_size"])
    return config


def _search(config: Config, devices: int, hardware: Hardware, given: frozenset[str] = frozenset()) -> SearchResult:
    return search(config, devices, hardware, Roofline(hardware), given=given)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("devices", "flags"),
    [(1, ""), (4, ""), (6, ""), (4, "--num-query-groups 2 --attention-dropout 0.1 --num-layers 5 --seq-length 18")],
)
def test_no_legal_layout_is_missed(devices: int, flags: str) -> None:
    """Every combination of values, judged by the validator alone, against the search's own list."""
    config = _config(flags)
    kinds = [None, "full"]
    tensor = pipeline = range(1, devices + 1)
    brute = set()
    names = [name for name in SCHEDULES if name != "message-driven"]
    for tp, pp, chunks, split, name, zero, micro, kind in itertools.product(
        tensor, pipeline, [None, 2, 3, 4], [False, True], names, range(4), range(1, 9), kinds
    ):
        if devices % (tp * pp):
            continue
        runs_the_same = (
            (pp == 1 and (name != "1f1b" or chunks is not None))
            or (tp == 1 and split)
            or (tp * pp == devices and zero)
            or (chunks is not None and SCHEDULES[name].num_chunks is not None)
            or (chunks is None and SCHEDULES[name].num_chunks is None)
        )
        layout = Layout(tp, 1, pp, chunks, split, name, zero, micro, kind)
        if not runs_the_same and not config_problems(apply(config, layout), devices):
            brute.add(layout)
    # pipedream wants neither clipping nor tied embeddings; it is in the space but illegal for this configuration
    assert set(legal_layouts(config, devices, frozenset(), stale=True)) == brute
    fresh = {layout for layout in brute if not SCHEDULES[layout.pipeline_schedule].asynchronous}
    assert set(legal_layouts(config, devices, frozenset())) == fresh


def test_long_sequences_are_shared() -> None:
    """One sample of 65,536 tokens and four ranks: only ranks that share it help. Short ones are never cut."""
    config, hardware = (
        _config("--hidden-size 512 --num-layers 2 --global-batch-size 1 --position-embedding-type rope"),
        load_hardware("h100"),
    )
    long = replace(config, model=replace(config.model, seq_length=65536))
    given = frozenset({"pipeline_model_parallel_size", "tensor_model_parallel_size"})
    best = _search(long, 4, hardware, given).predictions[0]
    assert best.config.parallel.context.context_parallel_size == 4
    assert best.config.data_parallel_size(4) == 1
    alone = _search(long, 1, hardware, given).predictions[0]
    assert best.step_time < 0.5 * alone.step_time and best.memory_bytes < 0.5 * alone.memory_bytes
    assert {layout.context_parallel_size for layout in legal_layouts(config, 8, frozenset())} == {1}


def test_the_ranking_is_by_time_and_all_that_is_shown_is_legal_and_fits() -> None:
    config, hardware = _config("--hidden-size 512 --num-layers 8"), load_hardware("cpu-2core")
    found = _search(config, 4, hardware)
    times = [prediction.step_time for prediction in found.predictions]
    assert all(after > before * (1 - AS_LONG) for before, after in itertools.pairwise(times)) and len(times) >= 10
    for prediction in found.predictions:
        assert not config_problems(prediction.config, 4)
        assert prediction.memory_bytes <= hardware.usable_bytes
    front = pareto(found.predictions)
    assert front[0].step_time == min(times)
    assert [p.memory_bytes for p in front] == sorted((p.memory_bytes for p in front), reverse=True)


def test_the_first_choice_is_the_best_of_all_legal_layouts() -> None:
    """Pruning by closed forms loses nothing here: everything simulated gives no faster layout."""
    config, hardware = _config("--hidden-size 256"), load_hardware("cpu-2core")
    everything = [
        predict(apply(config, layout), 4, hardware, Roofline(hardware)).step_time
        for layout in legal_layouts(config, 4, frozenset())
    ]
    assert _search(config, 4, hardware).predictions[0].step_time <= min(everything) * 1.01


def test_what_is_given_is_kept() -> None:
    config = _config("--tensor-model-parallel-size 2 --micro-batch-size 2")
    given = frozenset({"tensor_model_parallel_size", "micro_batch_size"})
    found = _search(config, 4, load_hardware("h100"), given)
    layouts = [layout_of(prediction.config) for prediction in found.predictions]
    assert {(layout.tensor_model_parallel_size, layout.micro_batch_size) for layout in layouts} == {(2, 2)}


def test_models_with_adapters_are_searched() -> None:
    """Adapters are copied as what they are beside is, so their ranks are those of the dense parameters."""
    found = _search(_config("--lora-rank 2"), 4, load_hardware("h100"))
    assert found.predictions and found.considered == _search(_config(), 4, load_hardware("h100")).considered


def test_stale_gradients_are_the_users_choice() -> None:
    config = _config("--pipeline-model-parallel-size 4 --hidden-size 512")
    given = frozenset({"pipeline_model_parallel_size"})
    hardware = load_hardware("cpu-2core")
    plain = _search(config, 4, hardware, given)
    allowed = search(config, 4, hardware, Roofline(hardware), given=given, stale=True)
    assert "2bw" not in {layout_of(p.config).pipeline_schedule for p in plain.predictions}
    assert layout_of(allowed.predictions[0].config).pipeline_schedule == "2bw"


def test_what_does_not_fit_says_by_how_much_where_and_what_would_help() -> None:
    config = _config("--hidden-size 1024 --num-layers 24 --micro-batch-size 8 --seq-length 1024")
    hardware = replace(load_hardware("cpu-2core"), memory_bytes=8e9, reserved_bytes=0.0)
    given = frozenset({"micro_batch_size", "recompute_granularity", "zero_stage", "tensor_model_parallel_size"})
    given |= {"pipeline_model_parallel_size"}
    found = _search(config, 1, hardware, given)
    assert not found.predictions
    misfit = found.rejected[0]
    text = explain(misfit, 1, hardware)
    assert "GB more than the 8.0 GB of one CPU, 2 cores" in text and "the largest term is activations" in text
    change = remedy(misfit, 1, hardware, Roofline(hardware))
    assert change is not None and change.devices == 1
    fixed = replace(
        config,
        training=replace(config.training, micro_batch_size=change.changes.get("micro_batch_size", 8)),
        model=replace(config.model, recompute_granularity=change.changes.get("recompute_granularity")),
    )
    assert len(change.changes) == 1
    assert _search(fixed, 1, hardware, given).predictions


def test_a_model_too_large_for_every_layout_needs_more_devices() -> None:
    config = _config("--hidden-size 2048 --num-layers 24")
    hardware = replace(load_hardware("cpu-2core"), memory_bytes=6e9, reserved_bytes=0.0)
    found = _search(config, 2, hardware)
    assert not found.predictions and found.rejected
    change = remedy(found.rejected[0], 2, hardware, Roofline(hardware))
    assert change is not None and not change.changes and change.devices in (4, 8)


def test_what_takes_equally_long_is_ordered_by_zero_stage_and_messages() -> None:
    """ZeRO stage 3 sends more than stage 1; where all of it is hidden, the last digit of a time decides nothing."""
    config, hardware = _config("--hidden-size 512 --num-layers 8"), load_hardware("cpu-2core")
    (base, *_) = _search(config, 4, hardware).predictions

    def made(seconds: float, zero: int, messages: float) -> Prediction:
        parallel = replace(base.config.parallel, zero_stage=zero)
        return replace(base, config=replace(base.config, parallel=parallel), step_time=seconds, messages=messages)

    rows = [(1.0, 3, 0.4), (1.0005, 1, 0.2), (1.001, 1, 0.1), (1.0015, 0, 0.3), (1.01, 0, 0.0)]
    ordered = _in_order([made(*row) for row in rows])
    found = [(one.step_time, one.config.parallel.zero_stage, one.messages) for one in ordered]
    assert found == [rows[3], rows[2], rows[1], rows[0], rows[4]]
