"""Messages of data parallelism by hand: ranks of one device a node, so that a ring is latency and one link."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megalite.config import Config, parse
from megalite.inventory import count_parameters
from megalite.planner import Roofline, load_hardware, predict
from megalite.planner.hardware import Hardware, Link
from megalite.planner.predict import Prediction

LAYERS, MICRO = 8, 4
BASE = (
    "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 1024 --mock-data --bf16 --seq-length 1024 "
    f"--num-layers {LAYERS} --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1"
)


def _hardware(bandwidth: float, latency: float, overlap: float = 0.8) -> Hardware:
    link = Link(bandwidth=bandwidth, latency=latency)
    return replace(load_hardware("h100"), devices_per_node=1, intra_node=link, inter_node=link, overlap=overlap)


def _config(ranks: int, more: str) -> Config:
    return parse(f"{BASE} --global-batch-size {MICRO * ranks} {more}".split(), world_size=ranks, check_files=False)


def _predict(ranks: int, more: str, hardware: Hardware) -> Prediction:
    return predict(_config(ranks, more), ranks, hardware, Roofline(hardware))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 64])
def test_messages_are_bytes_over_the_link_and_a_latency_each(zero: int, ranks: int) -> None:
    """Published algorithms: a ring sends (n - 1)/n of a tensor in n steps; ZeRO 3 gathers twice and scatters once in
    every micro-batch, in layers; ZeRO 1 scatters and gathers once a step, in buckets (arXiv 1910.02054)."""
    bandwidth, latency = 1e12, 1e-5
    found = _predict(ranks, f"--zero-stage {zero}", _hardware(bandwidth, latency)).messages
    parameters = count_parameters(_config(ranks, "").model)
    gradient, weight = 4 * parameters, 2 * parameters
    buckets = math.ceil(parameters / max(40e6, 1e6 * ranks))
    layers = LAYERS + 2  # with embedding and head
    once = (ranks - 1) / ranks / bandwidth

    if zero == 0:
        ring = 2 * (buckets * ranks * latency + once * gradient)
        tree = 2 * (buckets * math.ceil(math.log2(ranks)) * latency + gradient / bandwidth)
        assert found == pytest.approx(min(ring, tree), rel=1e-3)
    elif zero == 1:
        assert found == pytest.approx(2 * buckets * ranks * latency + once * (gradient + weight), rel=1e-3)
    elif zero == 2:
        scatters = MICRO * (layers * ranks * latency + once * gradient)
        assert found == pytest.approx(scatters + buckets * ranks * latency + once * weight, rel=1e-3)
    else:
        assert found == pytest.approx(MICRO * (3 * layers * ranks * latency + once * (gradient + 2 * weight)), rel=1e-3)


def test_zero_plus_plus_sends_a_quarter_of_the_bytes_between_nodes() -> None:
    """arXiv 2306.10209, table 1, M = 2 bytes a parameter: M, M and M become M/2, 0 and M/4 (and bounds of blocks)."""
    ranks, node = 16, 8
    slow, fast = Link(bandwidth=1e10, latency=0.0), Link(bandwidth=1e30, latency=0.0)
    hardware = replace(_hardware(1.0, 0.0), devices_per_node=node, intra_node=fast, inter_node=slow)
    whole = 2 * count_parameters(_config(ranks, "").model)
    ring, across = (ranks - 1) / ranks / node / slow.bandwidth, 1 / 2 / node / slow.bandwidth
    three = "--zero-stage 3 --grad-reduce-in-bf16"
    plain = _predict(ranks, three, hardware)
    assert plain.messages == pytest.approx(MICRO * 3 * whole * ring, rel=1e-3)
    less = _predict(ranks, f"{three} --zero-plus-plus weights gradients partition={node}", hardware)
    gathers, scatters = whole * ring * (1 / 2 + 2 / 64), MICRO * whole * across * (1 / 4 + 1 / 64)
    assert less.messages == pytest.approx(gathers + scatters, rel=1e-3)
    kept = less.memory[0].buffers - plain.memory[0].buffers
    assert kept == pytest.approx(whole / node, rel=1e-3)


def test_zero_plus_plus_sends_nothing_on_a_stage_of_one_replica() -> None:
    meshes, hardware = "--stage-meshes 1x1,1x2 --zero-stage 3", _hardware(1e10, 1e-5)
    less = _predict(3, f"{meshes} --zero-plus-plus weights gradients partition=2", hardware)
    assert less.messages == _predict(3, meshes, hardware).messages


def test_partial_backpropagation_leaves_the_share_of_its_paper() -> None:
    """(k + 1) / 2k of the backward of blocks; embedding and head are a small part here."""
    link = _hardware(1e12, 0.0)
    whole, *partial = (_predict(1, f"--partial-backprop-groups {k}", link).step_time for k in (1, 2, 4, 8))
    saved = [whole - time for time in partial]
    for groups, less in zip((2, 4, 8), saved, strict=True):
        assert less / saved[0] == pytest.approx((groups - 1) / (2 * groups) / (1 / 4), rel=0.01)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_last_sum_and_the_first_gather_are_never_hidden(zero: int) -> None:
    """However fast the link: what remains is one message at each end; a link twice as slow leaves twice as much."""
    alone = _predict(2, f"--zero-stage {zero} --global-batch-size {MICRO * 2}", _hardware(1e30, 0.0)).step_time
    times = [_predict(2, f"--zero-stage {zero}", _hardware(bandwidth, 0.0)).step_time for bandwidth in (4e12, 2e12)]
    assert times[0] - alone > 1e-6
    assert times[1] - alone == pytest.approx(2 * (times[0] - alone), rel=1e-6)
    found = _predict(2, f"--zero-stage {zero}", _hardware(4e12, 0.0))
    assert found.open_messages == pytest.approx(times[0] - alone, rel=1e-6)
    parameters = count_parameters(_config(2, "").model)
    gradient, weight, layers = parameters / 2 / 4e12 * 4, parameters / 2 / 4e12 * 2, LAYERS + 2
    buckets = math.ceil(parameters / 40e6)
    ends = {
        0: 2 * gradient / buckets,
        1: gradient / buckets + weight / buckets,
        2: gradient / layers + weight / buckets,
        3: gradient / layers + weight / layers,
    }
    assert found.open_messages == pytest.approx(ends[zero], rel=1e-6)


def test_without_overlap_all_of_it_is_in_the_open() -> None:
    off = "--no-overlap-grad-reduce --no-overlap-param-gather"
    for zero in (0, 1, 2, 3):
        found = _predict(4, f"--zero-stage {zero} {off}", _hardware(1e11, 1e-5, overlap=0.0))
        assert found.open_messages == pytest.approx(found.messages, rel=1e-9), zero


def test_more_replicas_cost_more_where_each_has_as_much_to_do() -> None:
    """A ring's latency grows with its ranks, so the rate of a device falls; it used to stay as it was to the digit."""
    rates = [_predict(ranks, "--zero-stage 1", load_hardware("h100")).tflops_per_device for ranks in (128, 512, 2048)]
    assert rates[0] > rates[1] * 1.001 > rates[2] * 1.002
