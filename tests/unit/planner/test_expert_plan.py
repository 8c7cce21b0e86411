"""Experts in the plan: legal layouts of ep and etp, copies of experts, all-to-all by link, imbalance; Frontier."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config, config_problems, read_unjudged
from megalite.inventory import expert_rows, kept_bytes, model_layers
from megalite.inventory.activation_bytes import WORST_IMBALANCE
from megalite.planner.communication import CommGroup, families_of
from megalite.planner.cost import Roofline
from megalite.planner.estimate import FastEstimator
from megalite.planner.hardware import Link, load_hardware
from megalite.planner.predict import predict
from megalite.planner.search import search
from megalite.planner.search_space import SEARCHED, Layout, apply, layout_of, layouts, legal_layouts

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 8 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --bf16 --num-experts 4"
)
CONFIGS = Path(__file__).parents[3] / "configs"


def _config(extra: str = "", base: str = BASE) -> Config:
    return read_unjudged(f"{base} {extra}".split(), optional=["micro_batch_size"])[0]


def test_no_legal_layout_of_experts_is_missed() -> None:
    """Every combination of values, judged by the validator alone, against the search's own list."""
    config, devices = _config("--micro-batch-size 1 --pipeline-schedule 1f1b"), 4
    given = frozenset({"micro_batch_size", "pipeline_schedule", "recompute_granularity"})
    brute = set()
    for tp, pp, split, zero, ep, etp in itertools.product(
        (1, 2, 4), (1, 2), (False, True), range(4), range(1, 5), (None, 1)
    ):
        if devices % (tp * pp) or (tp == 1 and (split or etp is not None)):
            continue
        layout = Layout(tp, 1, pp, None, split, "1f1b", zero, 1, None, ep, etp)
        unsharded = all(each.ranks == 1 for each in families_of(apply(config, layout), devices))
        if not (zero and unsharded) and not config_problems(apply(config, layout), devices):
            brute.add(layout)
    assert len({(layout.expert_model_parallel_size, layout.expert_tensor_parallel_size) for layout in brute}) == 6
    assert set(legal_layouts(config, devices, given)) == brute


def test_gradients_of_experts_are_summed_over_their_copies_alone() -> None:
    """ep = 4 on four ranks: each expert is on one rank, so the network carries the dense gradients only."""
    slow = replace(load_hardware("h100"), intra_node=Link(1e6, 0.0), overlap=0.0)
    reduced = {}
    for ep in (1, 4):
        config = _config(f"--micro-batch-size 1 --expert-model-parallel-size {ep}")
        found = predict(config, 4, slow, Roofline(slow)).breakdown["data_parallel"]
        parameters = [p for layer in model_layers(config.model) for p in layer.parameters if not p.copy_of]
        alike = sum(p.numel for p in parameters if ep == 1 or p.family == "dense")
        reduced[ep] = found, 2 * 3 / 4 * 4 * alike / 1e6
    for found, expected in reduced.values():
        assert found == pytest.approx(expected, rel=1e-6)
    assert reduced[4][0] < 0.7 * reduced[1][0]


def test_tokens_take_the_links_that_they_cross() -> None:
    hardware = load_hardware("h100")
    inside, network = hardware.intra_node, hardware.inter_node
    assert CommGroup(hardware, 1).all_to_all(0.0) == 0
    assert CommGroup(hardware, 8).all_to_all(7e9) == pytest.approx(7 * inside.latency + 7e9 / inside.bandwidth)
    # of 16 ranks in two nodes 7 are near and 8 far: each has a network card of its own
    far = CommGroup(hardware, 16).all_to_all(15e9)
    assert far == pytest.approx(7 * inside.latency + network.latency + 8e9 / network.bandwidth)
    assert CommGroup(hardware, 8, 8).all_to_all(7e9) == pytest.approx(3 * network.latency + 7e9 / network.bandwidth)


def test_memory_of_dispatched_tokens_counts_the_fullest_rank() -> None:
    """Rows of ep ranks: the stated factor; a capacity factor bounds it; one rank alone has them all.
    Whole experts on a rank of the tensor axis (etp = 1) have that rank's tokens."""
    flags = "--micro-batch-size 2 --moe-router-topk 2"
    alone, shared = _config(flags), _config(f"{flags} --expert-model-parallel-size 2")
    tight = _config(f"{flags} --expert-model-parallel-size 2 --moe-expert-capacity-factor 1.25")
    rows = [expert_rows(config, model_layers(config.model)[1], WORST_IMBALANCE) for config in (alone, shared, tight)]
    assert rows == [2 * 16 * 2, 2 * 16 * 2 * WORST_IMBALANCE, 2 * 16 * 2 * 1.25]
    more = [kept_bytes(config, model_layers(config.model)[1]) for config in (alone, shared)]
    width, h = 4 * 32, 32
    assert more[1] - more[0] == pytest.approx((WORST_IMBALANCE - 1) * 2 * 16 * 2 * (width + h) * 2)
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size"
    widths = [
        model_layers(config.model)[1].mlp_width(config.parallel)
        for config in (_config(f"{flags} {tensor} 1"), _config(f"{flags} {tensor} 2"))
    ]
    assert widths == [2 * width / 2] * 2


def test_experts_are_dealt_out_where_they_do_not_fit() -> None:
    """Eight ranks of a node, 17 G parameters in experts, 129 GB under ZeRO 1 if every rank has all of them."""
    config = _config(
        "--num-layers 8 --hidden-size 2048 --num-experts 128 --num-attention-heads 16 --moe-ffn-hidden-size 4096 "
        "--seq-length 1024 --global-batch-size 64 --pipeline-schedule 1f1b --micro-batch-size 1 --zero-stage 1"
    )
    given = frozenset(SEARCHED) - {"expert_model_parallel_size"}
    found = search(config, 8, load_hardware("h100"), Roofline(load_hardware("h100")), given=given, even=True)
    assert {layout_of(p.config).expert_model_parallel_size for p in found.predictions} == {2, 4, 8}


def test_frontiers_trillion_fits_and_its_layout_is_in_the_best_tenth() -> None:
    """arXiv 2312.12705: 3,072 GCDs of 64 GB, tp 8, pp 64, ZeRO 1, micro-batch 1, everything recomputed. Among what may
    be chosen with its schedule; docs/rocm.md has its place among all layouts."""
    argv = ["--config", str(CONFIGS / "frontier_1t.yaml")]
    config, _ = read_unjudged(argv)
    hardware, here = load_hardware("mi250x"), layout_of(config)
    prediction = predict(config, 3072, hardware, Roofline(hardware))
    assert prediction.memory_bytes < 64e9 - hardware.reserved_bytes
    assert 0.27 < prediction.mfu < 0.38  # 0.32 is published
    quick = FastEstimator(config, 3072, hardware, Roofline(hardware))
    kept = frozenset({"pipeline_schedule", "virtual_pipeline_model_parallel_size", "micro_batch_size"})
    estimates = [quick.estimate(layout) for layout in layouts(config, 3072, kept)]
    fitting = sorted(seconds for seconds, nbytes in estimates if nbytes <= hardware.usable_bytes)
    assert len(fitting) > 300
    assert quick.estimate(here)[0] <= fitting[len(fitting) // 10]
