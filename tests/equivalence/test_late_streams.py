"""Values are the second witness of a race: with streams that are late a sound layout computes the same bits, one with a
planted race does not."""

from __future__ import annotations

from typing import Any

import pytest

from equivalence.test_races import PLANTED, ZERO_1, ZERO_3
from megalite.comm import World
from megalite.rehearsal import Fault, rehearsed, with_values, witness

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 4 --bf16 --lr 1e-2 "
    "--micro-batch-size 1 --train-iters 50 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 0"
).split()
OWN = witness.trained


def planted(world: World, settings: dict[str, Any], late: str | None) -> witness.Seen:
    with PLANTED["gather"][1]():
        return OWN(world, settings, late)


def found(layout: str, ranks: int = 2) -> list[Fault]:
    return with_values(rehearsed([*SMALL, *layout.split()], ranks))[0]


SOUND = [
    pytest.param(ZERO_3, marks=pytest.mark.landing),
    *(pytest.param(layout, marks=pytest.mark.full) for layout in (
        "--zero-stage 1 --overlap-param-gather", ZERO_1, "--offload optimizer --zero-stage 1",
        "--offload activations=1", "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2", "--context-parallel-size 2",
        "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --zero-stage 1",
    )),
]  # fmt: skip


@pytest.mark.parametrize("layout", SOUND)
def test_late_streams_change_no_bit_of_a_sound_layout(layout: str) -> None:
    assert found(layout) == []


@pytest.mark.landing
def test_late_streams_tell_a_planted_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "trained", planted)
    (fault,) = found(ZERO_3)
    assert "with all streams but the compute stream late rank 0 has loss nan" in fault.text
    assert PLANTED["gather"][2] in fault.text, fault
