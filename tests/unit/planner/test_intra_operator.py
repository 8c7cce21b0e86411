"""Alpa's choice inside a block: Megatron-LM's cut where memory is ample, sequence parallelism where it is not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest

from megalite.config import Config, StageMesh
from megalite.config.cli import parse
from megalite.inventory import (
    given_plan,
    model_layers,
)
from megalite.planner import unlike_stages
from megalite.planner.communication import CommGroup
from megalite.planner.cost import LayerTimes, Roofline
from megalite.planner.hardware import Hardware, load_hardware
from megalite.planner.intra_operator import (
    TOKENS,
    WHOLE,
    BlockPlan,
    Operation,
    block_chain,
    block_text,
    cheapest,
    extended,
    follows,
    plan_block,
)
from megalite.planner.memory import (
    PlannedStages,
    pipeline_memory,
)
from megalite.planner.predict import program_of
from megalite.planner.unlike_stages import DeviceClass, UnlikePlan, best_unlike

A100 = load_hardware("a100-80gb")


def of(more: str = "") -> Config:
    flags = (
        "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --global-batch-size 8 --lr 1e-4 "
        f"--vocab-size 8000 --bf16 --train-iters 10 --mock-data --micro-batch-size 1 {more}"
    )
    tp = "--tensor-model-parallel-size 4"
    return parse([*flags.split(), *tp.split()], world_size=4, check_files=False)


RUNNABLE = {"qkv": "column", "core": "heads", "proj": "row", "fc1": "column", "fc2": "row"}
"""The ways that the engine runs; columns of gathered input where the stream lies by tokens."""


def planned(config: Config, room: float, in_flight: int = 8) -> BlockPlan | None:
    chains = [block_chain(config, model_layers(config.model)[1], A100, stream, in_flight) for stream in (WHOLE, TOKENS)]
    return plan_block(chains, CommGroup(A100, 4), room)


def run_chain(config: Config, hardware: Hardware, stream: str) -> list[Operation]:
    """The chain of such a stream that the engine runs."""
    chain = block_chain(config, model_layers(config.model)[1], hardware, stream, 1)
    kinds = {
        name: "column of gathered" if kind == "column" and stream == TOKENS else kind for name, kind in RUNNABLE.items()
    }
    return [one._replace(ways=[way for way in one.ways if way.name == kinds.get(one.name, way.name)]) for one in chain]


def run_best(config: Config, hardware: Hardware, room: float) -> BlockPlan | None:
    chains = [run_chain(config, hardware, stream) for stream in (WHOLE, TOKENS)]
    return plan_block(chains, CommGroup(hardware, config.parallel.tensor_model_parallel_size), room)


@pytest.mark.parametrize("more", ["", "--swiglu", "--num-query-groups 8"])
def test_it_finds_column_and_row_with_two_all_reduces(more: str) -> None:
    found = planned(of(more), 1e12)
    assert found is not None and dict(found.ways)["norm"] == WHOLE
    assert dict(found.ways) | {"norm": "", "norm of the MLP": "", "stream": ""} == {
        **{"qkv": "column", "core": "heads", "proj": "row", "fc1": "column", "fc2": "row"},
        **{"norm": "", "norm of the MLP": "", "stream": ""},
    }
    assert found.forward == found.backward == ("all_reduce",) * 2


def test_under_a_cap_it_finds_sequence_parallelism() -> None:
    config = of()
    ample = planned(config, 1e12)
    assert ample is not None
    capped = planned(config, ample.kept * 0.72)
    assert capped is not None and capped.kept <= ample.kept * 0.72 and capped.seconds > ample.seconds
    assert dict(capped.ways)["norm"] == TOKENS and dict(capped.ways)["proj"] == "row"
    assert set(capped.forward) == {"gather"} and len(capped.forward) == 4  # two gathers, two reduce-scatters
    least = planned(config, ample.kept * 0.1)
    assert least is None


@pytest.mark.parametrize("stream", [WHOLE, TOKENS])
@pytest.mark.parametrize("price", [0.0, 1e-13, 1e-12, 1e-9])
def test_it_is_as_good_as_trying_everything(stream: str, price: float) -> None:
    config, group = of(), CommGroup(A100, 4)
    chain = block_chain(config, model_layers(config.model)[1], A100, stream, 8)
    best = float("inf")
    for ways in product(*(operation.ways for operation in chain)):
        if all(follows(*pair) for pair in zip(ways, ways[1:], strict=False)):
            plan, before = BlockPlan(), chain[-1].ways[0]
            for operation, way in zip(chain, ways, strict=True):
                plan, before = extended(plan, before, operation, way, group), way
            best = min(best, plan.seconds + price * plan.kept)
    found = cheapest(chain, group, price)
    assert found.seconds + price * found.kept == pytest.approx(best, rel=1e-12)


def test_a_plan_says_it_in_a_line() -> None:
    assert "qkv column, core heads, proj row" in block_text(of(), 4, A100)
    assert "2 all_reduce" in block_text(of(), 4, A100)
    assert block_text(of("--num-experts 4"), 4, A100) == ""


class BlockTimes(Roofline):
    """Blocks as long as this module has them, for the search: with the one chain that a configuration runs."""

    def layers(self, config: Config) -> Sequence[LayerTimes]:
        layers, group = model_layers(config.model), CommGroup(self.hardware, config.parallel.tensor_model_parallel_size)
        stream = TOKENS if config.parallel.sequence_parallel else WHOLE
        chain = run_chain(config, self.hardware, stream)
        assert all(len(operation.ways) == 1 for operation in chain)
        block = LayerTimes(forward=cheapest(chain, group, 0.0).seconds)
        return [block if layer.is_block else LayerTimes() for layer in layers]

    def optimizer_step(self, config: Config, elements: float) -> float:
        return 0.0

    def step_overhead(self, samples: float) -> float:
        return 0.0


def drawn(rng: random.Random, *, heads: int, layers: int, length: int, width: int) -> tuple[Config, Hardware]:
    """A model and a machine of links of some speed; a batch of one, so that there are no replicas."""
    flags = (
        f"--num-layers {layers} --hidden-size {heads * width} --num-attention-heads {heads} --seq-length {length} "
        "--global-batch-size 1 --lr 1e-4 --bf16 --vocab-size 128 --train-iters 10 --mock-data --micro-batch-size 1"
    )
    link = replace(A100.intra_node, bandwidth=A100.intra_node.bandwidth * rng.choice([0.01, 0.1, 1.0]))
    free = replace(A100.inter_node, latency=0.0, bandwidth=1e30)  # a node is a stage's, and between stages all is free
    hardware = replace(A100, intra_node=link, inter_node=free, devices_per_node=heads)
    return parse(flags.split(), world_size=1, check_files=False), hardware


def shared(found: UnlikePlan, blocks: int) -> set[int]:
    """Tensor-parallel sizes of the stages that have blocks."""
    stages = found.stages.stages
    return {stage.mesh.tp for stage in stages if min(stage.end, blocks + 1) > max(stage.begin, 1)}


def test_the_search_finds_the_best_of_what_the_engine_runs() -> None:
    """Of 25 random instances the least sum over all cuts and tensor-parallel sizes, each block as this module would
    have it of the runnable ways: what the search finds, which tries layouts and asks nothing here."""
    rng, sizes = random.Random(7), set()
    for _ in range(25):
        heads, blocks = rng.choice([2, 4]), rng.choice([2, 3, 4])
        length, width = rng.choice([1024, 4096]), rng.choice([64, 128, 512])
        config, hardware = drawn(rng, heads=heads, layers=blocks, length=length, width=width)
        legal = [tp for tp in (1, 2, 4) if heads % tp == 0]
        devices = heads + 2
        times = {}
        for tp in legal:
            parallel = replace(config.parallel, tensor_model_parallel_size=tp)
            best = run_best(replace(config, parallel=parallel), hardware, 1e15)
            assert best is not None
            times[tp] = best
        expected = min(
            sum(times[tp].seconds * n for tp, n in zip(stages, cut, strict=True))
            for count in range(2, devices + 1)
            for stages in product(legal, repeat=count)
            if sum(stages) == devices
            for cut in product(range(blocks + 1), repeat=count)
            if sum(cut) == blocks and all(cut[1:-1])
        )
        found = best_unlike(config, [DeviceClass(devices, hardware, BlockTimes(hardware))])
        assert found is not None and found.seconds == pytest.approx(expected, rel=1e-9)
        tp = max(shared(found, blocks))
        sizes.add(tp)
        if tp > 1:
            assert not found.config.parallel.sequence_parallel, "memory is ample"
            assert times[tp].forward == times[tp].backward == ("all_reduce",) * 2
    assert sizes == {1, 2, 4}


def test_under_a_cap_search_and_chain_take_sequence_parallelism() -> None:
    """Two stages of four ranks with room for what sequence parallelism keeps, and a bit too little for whole streams
    at any cut; then with room for these."""
    rng = random.Random(8)
    for _ in range(8):
        layers = rng.choice([2, 4, 6])
        config, hardware = drawn(rng, heads=4, layers=layers, length=4096, width=rng.choice([64, 128]))
        needs, kept = {}, {}
        for stream in (TOKENS, WHOLE):
            parallel = replace(config.parallel, tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
            parallel = replace(parallel, sequence_parallel=stream == TOKENS, zero_stage=1)
            one = replace(config, parallel=parallel)
            program, cuts = program_of(one, 8), range(1, layers + 2)
            ways = [[range(cut), range(cut, layers + 2)] for cut in cuts]
            memory = [pipeline_memory(PlannedStages(one, 8, program, way, given_plan(one))) for way in ways]
            needs[stream] = min(max(rank.total for rank in ranks) for ranks in memory)
            kept[stream] = cheapest(run_chain(one, hardware, stream), CommGroup(hardware, 4), 0.0).kept
        assert needs[TOKENS] < 0.97 * needs[WHOLE] and kept[TOKENS] < 0.97 * kept[WHOLE]
        for times in (0.97, 4.0):
            cap, room = times * needs[WHOLE], times * kept[WHOLE]
            asked = run_best(one, hardware, room)
            small = replace(hardware, memory_bytes=cap + hardware.reserved_bytes)
            with patch.object(unlike_stages._Problem, "meshes", [StageMesh(4, 1)]):
                found = best_unlike(config, [DeviceClass(8, small, BlockTimes(small))])
            assert found is not None and asked is not None
            by_tokens = dict(asked.ways)["norm"] == TOKENS
            assert found.config.parallel.sequence_parallel == by_tokens == (times < 1)
