"""Times: closed forms where there are some, published runs where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config
from megalite.config.cli import parse, read_unjudged
from megalite.errors import ConfigError
from megalite.inventory import context_bytes, model_layers
from megalite.inventory.layers import count_parameters, flops_per_iteration
from megalite.planner.communication import CommGroup
from megalite.planner.cost import LayerTimes, Roofline
from megalite.planner.hardware import Link, available, load_hardware, parse_hardware
from megalite.planner.predict import Prediction, predict, program_of, steady_state
from megalite.planner.profile import Profile, load_profile, measured_model
from megalite.planner.result_table import layout_text
from megalite.planner.software import MEGALITE
from megalite.schedule import Costs, simulate

GPT = (
    "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 51200 --mock-data --bf16 --seq-length 2048"
)


def _gpt(layers: int, hidden: int, heads: int, tp: int, pp: int, batch: int, extra: str, world_size: int) -> Config:
    text = (
        f"{GPT} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --global-batch-size {batch} "
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {extra}"
    )
    return parse(text.split(), world_size=world_size, check_files=False)


def _predict(config: Config, world_size: int, name: str) -> Prediction:
    hardware = load_hardware(name)
    return predict(config, world_size, hardware, Roofline(hardware))


# Megatron-LM, arXiv 2104.04473, table 1: billions of parameters, layers, width, heads.
TABLE = [
    (1.7, 24, 2304, 24),
    (3.6, 30, 3072, 32),
    (7.5, 36, 4096, 32),
    (18.4, 40, 6144, 48),
    (39.1, 48, 8192, 64),
    (76.1, 60, 10240, 80),
    (145.6, 80, 12288, 96),
    (310.1, 96, 16384, 128),
    (529.6, 105, 20480, 128),
    (1008.0, 128, 25600, 160),
]


@pytest.mark.parametrize(("billions", "layers", "hidden", "heads"), TABLE)
def test_parameters_and_flops_of_the_published_table(billions: float, layers: int, hidden: int, heads: int) -> None:
    config = _gpt(layers, hidden, heads, 1, 1, 512, "--micro-batch-size 1", 1)
    h, s, vocabulary = hidden, 2048, 51200
    paper = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))
    assert count_parameters(config.model) == round(paper) + 2 * h  # the paper leaves the final norm out
    assert round(count_parameters(config.model) / 1e9, 1) == billions
    # 72 B s l h^2 (1 + s/(12 h) + V/(12 l h)): the paper's form without recomputation, causal attention halved
    flops = 72 * 512 * s * layers * h**2 * (1 + s / (12 * h) + vocabulary / (12 * layers * h))
    assert flops_per_iteration(config.model, 512) == pytest.approx(flops, rel=1e-12)


def test_a_published_iteration_time_is_within_a_quarter() -> None:
    """README of NVIDIA/Megatron-LM: GPT-3 175B on 1,024 A100, tp 8, pp 16, batch 1,536: about 32 s an iteration. Its
    138 TFLOP/s are the FLOPs with full recomputation.
    """
    extra = "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    config = _gpt(96, 12288, 96, 8, 16, 1536, extra, 1024)
    found = _predict(config, 1024, "a100-80gb")
    assert found.step_time == pytest.approx(32, rel=0.25)
    assert found.hardware_tflops_per_device * found.step_time == pytest.approx(138 * 32, rel=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "chimera-doubling"])
def test_a_long_batch_is_continued_exactly(schedule: str) -> None:
    chunks = "--virtual-pipeline-model-parallel-size 2" if schedule == "interleaved" else ""
    extra = f"--micro-batch-size 1 --pipeline-schedule {schedule} {chunks}"
    config = _gpt(8, 1024, 16, 1, 4, 720, extra, 4)
    program = program_of(config, 4)
    whole = simulate(program, Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, communication=0.25))
    found = steady_state(
        config, program, Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, communication=0.25)
    )
    assert found.makespan == pytest.approx(float(whole.makespan))
    assert found.bubble_over_ideal == pytest.approx(float(whole.bubble_over_ideal))


def test_collectives_follow_alpha_and_beta() -> None:
    hardware = load_hardware("h100")
    link, network = hardware.intra_node, hardware.inter_node
    assert CommGroup(hardware, 1).all_reduce(1e9) == 0
    assert CommGroup(hardware, 8).gather(8e9) == pytest.approx(7 * link.latency + 7e9 / link.bandwidth)
    # eight ranks in eight nodes share nothing with the other groups of their nodes
    assert CommGroup(hardware, 8, 8).gather(8e9) == pytest.approx(8 * network.latency + 7e9 / network.bandwidth)
    # sixteen in two nodes use eight links between them
    assert CommGroup(hardware, 16).bandwidth == min(link.bandwidth, 8 * network.bandwidth)
    assert CommGroup(hardware, 2, 8).send(1e9) == pytest.approx(network.latency + 1e9 / network.bandwidth)


def test_hardware_files_are_complete_and_errors_name_the_field() -> None:
    names = ("a100-80gb", "b200", "cpu-2core", "h100", "h200", "mi250x", "rtx-4090", "v100")
    assert tuple(available()) == names
    assert all(load_hardware(name).usable_bytes > 0 for name in names)
    with pytest.raises(ConfigError, match="one of a100-80gb"):
        load_hardware("tpu")
    with pytest.raises(ConfigError, match=r"matrix_efficiency: expected a number, got None"):
        parse_hardware({"name": "mine", "kind": "cuda"}, "mine.yaml")


def test_the_planner_never_imports_torch() -> None:
    code = "import sys, megalite.planner.search, megalite.planner.result_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chimera_pays_for_its_second_copy_of_every_stage() -> None:
    config = _gpt(8, 1024, 16, 1, 4, 16, "--micro-batch-size 1 --pipeline-schedule chimera", 4)
    plain = _gpt(8, 1024, 16, 1, 4, 16, "--micro-batch-size 1", 4)
    twice, once = _predict(config, 4, "h100"), _predict(plain, 4, "h100")
    assert twice.breakdown["shared_weights"] > once.breakdown["shared_weights"]
    total = [sum(memory.weights for memory in prediction.memory) for prediction in (twice, once)]
    assert total[0] == pytest.approx(2 * total[1])


def test_a_profile_knows_that_ranks_share_a_sequence() -> None:
    """It was measured with whole sequences: two ranks take about half of that, and the ring's messages."""
    hardware = load_hardware("cpu-2core")
    kinds = ("embedding", "block", "head")
    profile = Profile(
        hardware,
        points={(1, False, 1): dict.fromkeys(kinds, LayerTimes(1.0, 1.0, 1.0))},
        optimizer=(0.0, 0.0),
        step=(0.0, 0.0),
    )
    flags = "--micro-batch-size 1 --seq-length 8192"
    whole = _gpt(2, 512, 8, 1, 1, 1, flags, 1)
    shared = _gpt(2, 512, 8, 1, 1, 1, f"{flags} --context-parallel-size 2", 2)
    for one, two in zip(profile.layers(whole), profile.layers(shared), strict=True):
        assert one.forward == 1.0 and 0.45 < two.forward < 0.65


WIDE = "--hidden-size 64 --num-layers 2 --num-attention-heads 4 --vocab-size 100 --seq-length 32 --lr 1 --train-iters 1"
OTHER = {
    "--hidden-size 128": "hidden-size",
    "--ffn-hidden-size 96": "ffn-hidden-size",
    "--num-attention-heads 8": "num-attention-heads",
    "--num-query-groups 2": "num-query-groups",
    "--kv-channels 32": "kv-channels",
    "--seq-length 64": "seq-length",
    "--vocab-size 200": "vocab-size",
    "--activation swiglu": "activation",
    "--normalization RMSNorm": "normalization",
    "--num-experts 4": "num-experts",
    "--window-size 8": "window-size",
    "--untie-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
    "--position-embedding-type rope": "position-embedding-type",
    "--qk-layernorm": "qk-layernorm",
    "--bf16": "precision",
    "--num-layers 8": None,
    "--micro-batch-size 4": None,
    "--hidden-dropout 0.1": None,
    "--tensor-model-parallel-size 2": None,
    "--lr 3": None,
}


@pytest.mark.parametrize("words", OTHER)
def test_a_profile_is_of_one_width(words: str, tmp_path: Path) -> None:
    def config(more: str = "") -> Config:
        return read_unjudged([*WIDE.split(), "--micro-batch-size", "1", *more.split()])[0]

    point = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "micro_batch_size": 1}
    point |= dict.fromkeys(("embedding", "block", "head"), [1.0, 1.0, 1.0, 0.0])
    found = {"points": [point], "optimizer": [0.0, 0.0], "step": [0.0, 0.0], "links": {}}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="does not say which model was timed; measure it again"):
        load_profile(str(path), load_hardware("cpu-2core"))
    path.write_text(json.dumps(found | {"model": measured_model(config())}))
    profile = load_profile(str(path), load_hardware("cpu-2core"))
    profile.check(config())
    name = OTHER[words]
    if name is None:
        profile.check(config(words))
    else:
        with pytest.raises(ConfigError, match=f"its times are of a model with .*\\b{name}=.*measure this one"):
            profile.check(config(words))


def test_what_a_ring_sends_hides_behind_attention() -> None:
    """All of it backward, all but the last part's share forward; gathered keys never."""
    slow = replace(load_hardware("h100"), intra_node=Link(1e9, 0.0), overlap=1.0)
    flags = "--micro-batch-size 1 --seq-length 65536 --context-parallel-size 4"
    times = {}
    for kind in ("p2p", "all_gather"):
        config = _gpt(1, 1024, 8, 1, 1, 1, f"{flags} --cp-comm-type {kind}", 4)
        for overlap in (0.0, 1.0):
            times[kind, overlap] = Roofline(replace(slow, overlap=overlap)).layers(config)[1]
    config = _gpt(1, 1024, 8, 1, 1, 1, flags, 4)
    sent = context_bytes(config, model_layers(config.model)[1])
    in_the_open, hidden = times["p2p", 0.0], times["p2p", 1.0]
    attention = 16384 * model_layers(config.model)[1].flops(core=True) / (
        slow.matrix_flops["bf16"] * slow.attention_efficiency
    )  # fmt: skip
    assert in_the_open.forward - hidden.forward == pytest.approx(min(sent.forward / 1e9, 0.75 * attention))
    assert in_the_open.backward - hidden.backward == pytest.approx(min(sent.backward / 1e9, 2.5 * attention))
    assert times["all_gather", 0.0] == times["all_gather", 1.0]


def test_sums_of_a_backward_hide_behind_the_weights_gradients() -> None:
    """All of them where a link is fast: a whole backward takes as long as over a link that costs nothing."""
    config = _gpt(1, 4096, 32, 8, 1, 64, "--micro-batch-size 2", 8)

    def backward(bandwidth: float, overlap: float) -> float:
        hardware = replace(load_hardware("h100"), intra_node=Link(bandwidth, 0.0), overlap=overlap)
        return Roofline(hardware).layers(config)[1].backward

    assert backward(1e12, 1.0) == pytest.approx(backward(1e30, 0.0)) and backward(1e12, 0.0) > 1.01 * backward(
        1e12, 1.0
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_half_batches_hide_messages_behind_each_other(sequence: bool) -> None:
    """What sticks out of a block's forward is the messages less the products that run meanwhile: nothing over a fast
    link, nearly everything over a slow one."""
    flags = "--micro-batch-size 2 --tp-comm-overlap" + " --sequence-parallel" * sequence
    config = _gpt(4, 4096, 32, 8, 1, 64, flags, 8)

    def forward(bandwidth: float) -> float:
        hardware = replace(load_hardware("h100"), intra_node=Link(bandwidth, 0.0))
        return Roofline(hardware).layers(config)[1].forward

    h, half, overlap = 4096, 2 * 2048 * 4096 * 1.0, load_hardware("h100").overlap
    roofline, computed = Roofline(load_hardware("h100")), forward(1e18)
    column = 2 * sum(roofline.product(config, 2048, n / 8, h) for n in (3 * h, 4 * h))
    row = 2 * sum(roofline.product(config, 2048, h, k / 8) for k in (h, 4 * h))
    row += roofline._attention(config, model_layers(config.model)[1])[0]
    assert forward(1e12) == pytest.approx(computed)
    messages = 2 * 2 * half * 7 / 8 / 1e9  # of both sublayers, of both halves; an all-reduce sends as much twice
    assert forward(1e9) == pytest.approx(
        computed + 2 * messages - overlap * (column + (row if sequence else 0.0)), rel=1e-6
    )


def test_transfers_that_a_stage_waits_for_add_to_every_round() -> None:
    """1F1B of m micro-batches on p stages takes m + p - 1 rounds, each with transfers of a forward and a backward."""
    p, m, tp = 4, 16, 2
    config = _gpt(8, 2048, 16, tp, p, m, "--micro-batch-size 1 --pipeline-schedule 1f1b", tp * p)
    hardware = load_hardware("a100-80gb")
    send, gather = CommGroup(hardware, p, tp).send, CommGroup(hardware, tp).gather
    nbytes = 2.0 * 2048 * 2048

    def step(**differs: object) -> float:
        program = replace(MEGALITE, whole_stages=False, **differs)  # type: ignore[arg-type]  # of its fields
        return predict(config, tp * p, hardware, Roofline(hardware, program)).step_time

    at_once, in_turn = step(waits=1), step(waits=2)
    whole_back = step(waits=2, whole_gradients=True)
    assert in_turn - at_once == pytest.approx((m + p - 1) * 2 * send(nbytes / tp), rel=0.1)
    more = 2 * (send(nbytes) - send(nbytes / tp)) - gather(nbytes)
    assert whole_back - in_turn == pytest.approx((m + p - 1) * more, rel=0.1)


@pytest.mark.parametrize(("tp", "begins"), [(1, "tp1, pp1"), (2, "tp2+sp, pp1")])
def test_a_layout_names_sequence_parallelism_where_it_does_something(tp: int, begins: str) -> None:
    config = _gpt(2, 256, 4, tp, 1, 8, "--micro-batch-size 1 --sequence-parallel", tp)
    assert layout_text(config, tp).startswith(begins)
