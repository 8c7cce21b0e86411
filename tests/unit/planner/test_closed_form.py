"""Gholami et al.'s closed form: its argmin is the simulator's best where nothing overlaps; its terms; who dominates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import Config
from megalite.config.cli import parse
from megalite.planner.closed_form import closed_form, explain_terms
from megalite.planner.cost import Roofline
from megalite.planner.hardware import Hardware, load_hardware
from megalite.planner.predict import predict

RANKS = 8
MODEL = (
    "--num-layers 8 --num-attention-heads 32 --train-iters 9 --lr 1e-4 --tokenizer-type NullTokenizer --mock-data "
    "--bf16"
)
# Name -> flags, and the sizes (tensor, context, data) that are best.
CASES = {
    "many short samples": (
        "--hidden-size 1024 --seq-length 1024 --global-batch-size 256 --vocab-size 32000",
        (1, 1, 8),
    ),
    "one long sample": ("--hidden-size 1024 --seq-length 131072 --global-batch-size 1 --vocab-size 512", (4, 2, 1)),
    "one long sample, few keys": (
        "--hidden-size 4096 --seq-length 131072 --global-batch-size 1 --vocab-size 512 --model-type llama "
        "--num-query-groups 8",
        (2, 4, 1),
    ),
    "large matrices, few tokens": (
        "--hidden-size 8192 --seq-length 256 --global-batch-size 1 --vocab-size 51200",
        (8, 1, 1),
    ),
    "two samples, wide": ("--hidden-size 4096 --seq-length 4096 --global-batch-size 2 --vocab-size 512", None),
}


def plain(name: str = "h100") -> Hardware:
    """Products at their peak and messages of alpha and beta: nothing overlaps, nothing else takes time."""
    return replace(
        load_hardware(name),
        overlap=0.0,
        matrix_half_size=0.0,
        multiprocessors=0,
        matrix_efficiency=1.0,
        attention_efficiency=1.0,
        memory_bandwidth=1e18,
        kernel_overhead=0.0,
        action_overhead=0.0,
    )


def config_of(flags: str, sizes: tuple[int, int, int]) -> Config | None:
    tp, cp, dp = sizes
    batch = int(flags.split("--global-batch-size ")[1].split()[0])
    if batch % dp:
        return None
    layout = f"--tensor-model-parallel-size {tp} --context-parallel-size {cp} --micro-batch-size {batch // dp}"
    return parse([*MODEL.split(), *flags.split(), *layout.split()], world_size=RANKS, check_files=False)


@pytest.mark.parametrize("name", CASES)
def test_its_argmin_is_the_simulators_best(name: str) -> None:
    flags, expected = CASES[name]
    hardware = plain()
    powers = (1, 2, 4, 8)
    all_sizes = [(tp, cp, RANKS // tp // cp) for tp in powers for cp in powers if tp * cp <= RANKS]
    configs = {sizes: config for sizes in all_sizes if (config := config_of(flags, sizes)) is not None}
    simulated = {s: predict(c, RANKS, hardware, Roofline(hardware)).step_time for s, c in configs.items()}
    closed = {s: closed_form(c, RANKS, hardware).total for s, c in configs.items()}
    best = min(simulated, key=lambda s: simulated[s])
    assert min(closed, key=lambda s: closed[s]) == best
    assert expected in (None, best)


def test_the_terms_are_the_papers() -> None:
    """Two tensor-, two context-, two data-parallel ranks by hand."""
    hardware = plain()
    alpha, beta = hardware.intra_node.latency, 1 / hardware.intra_node.bandwidth
    flags = (
        "--hidden-size 1024 --seq-length 8192 --global-batch-size 4 --vocab-size 512 "
        "--untie-embeddings-and-output-weights"
    )
    config = config_of(flags, (2, 2, 2))
    assert config is not None
    found = closed_form(config, RANKS, hardware)
    tokens = 2 * 8192 / 2
    one = 2 * (alpha + beta / 2 * tokens * 1024 * 2)
    sums = round(found.model / one)
    assert found.model == pytest.approx(sums * one) and sums in range(4 * 8, 4 * 8 + 4)  # blocks, embedding, head
    weights = 8 * (12 * 1024**2 / 2 + 1024 * (4 + 3 / 2 + 4 / 2 + 2)) + 2 * 512 / 2 * 1024 + 2 * 1024 + 8192 * 1024
    assert found.data == pytest.approx(2 * (2 * alpha + 3 / 4 * beta * weights * 4), rel=1e-3)
    keys = 2 * 2 * tokens * 512
    assert found.domain == pytest.approx(8 * (3 * alpha + beta * (keys + keys + 2 * keys)))
    assert found.computation == pytest.approx(
        predict(config, RANKS, hardware, Roofline(hardware)).model_flops / RANKS / 989e12, rel=0.3
    )


def test_it_says_which_dimension_dominates() -> None:
    flags = CASES["one long sample"][0]
    alone = parse([*MODEL.split(), *flags.split(), "--micro-batch-size", "1"], world_size=1, check_files=False)
    for sizes, dominant in (((8, 1, 1), "model"), ((1, 8, 1), "domain")):
        config = config_of(flags, sizes)
        assert config is not None
        assert closed_form(config, RANKS, plain()).dominant == dominant
        assert f"{dominant} dominates" in explain_terms(config, RANKS, plain())
    assert closed_form(alone, 1, plain()).dominant == "" and "no messages" in explain_terms(alone, 1, plain())


def test_tokens_travel_to_their_experts_and_back_in_forward_and_backward() -> None:
    """By hand; a shared expert hides one message of each pass in the plan, and nothing here."""
    hardware = plain()
    flags = "--hidden-size 1024 --seq-length 8192 --global-batch-size 8 --micro-batch-size 1 --vocab-size 512"
    sparse = "--num-experts 8 --moe-layer-freq 2 --expert-model-parallel-size 4 --moe-ffn-hidden-size 4096"

    def of(extra: str = "") -> Config:
        return parse([*MODEL.split(), *flags.split(), *sparse.split(), *extra.split()], world_size=4, check_files=False)

    link, rows = hardware.intra_node, 2 * 8192
    one = 3 * link.latency + 3 / 4 * rows * 1024 * 2 / link.bandwidth
    config, shared = of(), of("--moe-shared-expert-intermediate-size 65536")
    found = closed_form(config, 4, hardware)
    assert found.experts == pytest.approx(2 * 4 * 4 * one)  # micro-batches, sparse blocks
    assert closed_form(shared, 4, hardware).experts == found.experts
    assert "expert-parallel ranks: 4" in explain_terms(config, 4, hardware)
    hiding = replace(hardware, overlap=1.0)
    times = [Roofline(h).layers(shared)[1].forward for h in (hardware, hiding)]
    latency = 3 * link.latency  # the fullest rank receives 1.1 times the mean
    assert times[0] - times[1] == pytest.approx(latency + 1.1 * (one - latency))


def test_a_rank_computes_all_of_its_stages() -> None:
    """Interleaved stages, and pipelines in both directions, divide a rank's work otherwise and not once more."""
    hardware = plain()
    flags = f"{MODEL} --hidden-size 64 --seq-length 64 --vocab-size 64 --global-batch-size 8 --micro-batch-size 1"

    def computation(schedule: str) -> float:
        argv = f"{flags} --pipeline-model-parallel-size 4 --pipeline-schedule {schedule}".split()
        return closed_form(parse(argv, world_size=4, check_files=False), 4, hardware).computation

    plainly = computation("1f1b")
    assert computation("interleaved --virtual-pipeline-model-parallel-size 2") == pytest.approx(plainly, rel=0.02)
    assert computation("chimera") == pytest.approx(plainly, rel=0.02)
