"""Bad numbers of experts: flags -> the exact line."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

TP, EP, ETP = "--tensor-model-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"

# (flags beside the base, world size, the one line)
ONE_LINE = [
    ("--moe-router-topk 1", 1, "--moe-router-topk=1: needs --num-experts"),
    (f"{EP} 2", 2, f"{EP}=2: needs --num-experts"),
    ("--num-experts 4 --moe-router-topk 5", 1, "--moe-router-topk=5: more than --num-experts=4"),
    (
        "--num-experts 4 --moe-router-topk 1",
        1,
        "--moe-router-topk=1: the softmax of one score is 1, so the router would learn nothing; add "
        "--moe-router-pre-softmax",
    ),
    (
        "--num-experts 4 --moe-layer-freq [0]*8",
        1,
        "--moe-layer-freq=[0]*8: no block is sparse; drop --num-experts",
    ),
    (
        "--num-experts 4 --moe-layer-freq [1]*7",
        1,
        "--moe-layer-freq=[1]*7: 7 entries for --num-layers=8; give one for each layer",
    ),
    (
        "--num-experts 4 --moe-layer-freq all",
        1,
        "--moe-layer-freq=all: neither a number above 0 nor a list of 0 and 1; '([1]*3+[0])*2' is one",
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
        1,
        "--moe-aux-loss-coeff=0.1: not with --moe-router-load-balancing-type=none; drop one of them",
    ),
    (
        "--num-experts 4 --moe-router-enable-expert-bias",
        1,
        "--moe-router-enable-expert-bias: needs --moe-router-score-function=sigmoid",
    ),
    ("--num-experts 4 --moe-router-num-groups 2", 1, "--moe-router-num-groups=2: needs --moe-router-group-topk"),
    (
        "--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1",
        1,
        "--moe-router-num-groups=3: does not divide --num-experts=4; legal: 1,2,4",
    ),
    (
        "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 3",
        1,
        "--moe-router-group-topk=3: more than --moe-router-num-groups=2",
    ),
    (
        "--num-experts 4 --moe-router-num-groups 4 --moe-router-group-topk 1",
        1,
        "--moe-router-topk=2: --moe-router-group-topk=1 groups have 1 experts",
    ),
    (f"--num-experts 6 {EP} 4", 4, f"{EP}=4: does not divide --num-experts=6; legal: 1,2"),
    (
        f"--num-experts 4 {EP} 4",
        2,
        f"{EP}=4: the 2 ranks of a pipeline stage cannot be dealt out to {ETP}=1 x {EP}=4 = 4; use 4 ranks a stage, or "
        f"a smaller {EP}",
    ),
    (f"--num-experts 4 {TP} 4 {ETP} 2", 4, f"{ETP}=2: must be 1 or {TP}=4"),
    (
        f"--num-experts 4 {TP} 2 {ETP} 1",
        2,
        f"{ETP}=1: with {TP}=2 each rank must have tokens of its own; add --sequence-parallel, or {ETP}=2",
    ),
    (
        f"--num-experts 4 {TP} 2 --moe-ffn-hidden-size 33",
        2,
        f"{ETP}=2: does not divide --moe-ffn-hidden-size=33; try 32 or 34",
    ),
    (
        f"--num-experts 4 {TP} 2 --moe-shared-expert-intermediate-size 33",
        2,
        f"{TP}=2: does not divide --moe-shared-expert-intermediate-size=33",
    ),
    (
        f"--num-experts 4 {EP} 2 --num-distributed-optimizer-instances 4 --zero-stage 1",
        4,
        "--num-distributed-optimizer-instances=4: must divide the 2 ranks that hold the same experts",
    ),
]


@pytest.mark.parametrize(("changes", "world_size", "line"), ONE_LINE)
def test_one_line(changes: str, world_size: int, line: str) -> None:
    assert problems_of(argv(changes), world_size) == [line]
