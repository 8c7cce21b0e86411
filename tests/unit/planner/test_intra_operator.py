"""Alpa's choice inside a block: Megatron-LM's cut where memory is ample, sequence parallelism where it is not."""

from __future__ import annotations

from itertools import product

import pytest

from megalite.config import Config
from megalite.config.cli import parse
from megalite.inventory import model_layers
from megalite.planner.communication import CommGroup
from megalite.planner.hardware import load_hardware
from megalite.planner.intra_operator import (
    TOKENS,
    WHOLE,
    BlockPlan,
    block_chain,
    block_text,
    cheapest,
    extended,
    follows,
    plan_block,
)

A100 = load_hardware("a100-80gb")


def of(more: str = "") -> Config:
    flags = (
        "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --global-batch-size 8 --lr 1e-4 "
        f"--vocab-size 8000 --bf16 --train-iters 10 --mock-data --micro-batch-size 1 {more}"
    )
    tp = "--tensor-model-parallel-size 4"
    return parse([*flags.split(), *tp.split()], world_size=4, check_files=False)


def planned(config: Config, room: float, in_flight: int = 8) -> BlockPlan | None:
    return plan_block(config, model_layers(config.model)[1], A100, room, in_flight)


@pytest.mark.parametrize("more", ["", "--swiglu", "--num-query-groups 8"])
def test_it_finds_column_and_row_with_two_all_reduces(more: str) -> None:
    found = planned(of(more), 1e12)
    assert found is not None and not found.sequence_parallel
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
    assert capped.sequence_parallel and dict(capped.ways)["proj"] == "row"
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
            plan, before = BlockPlan(), None
            for operation, way in zip(chain, ways, strict=True):
                plan, before = extended(plan, before, operation, way, group), way
            best = min(best, plan.seconds + price * plan.kept)
    found = cheapest(chain, group, price)
    assert found.seconds + price * found.kept == pytest.approx(best, rel=1e-12)


def test_a_plan_says_it_in_a_line() -> None:
    assert "qkv column, core heads, proj row" in block_text(of(), 4, A100)
    assert "2 all_reduce" in block_text(of(), 4, A100)
    assert block_text(of("--num-experts 4"), 4, A100) == ""
