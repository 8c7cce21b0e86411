"""Layers that differ and a curriculum of lengths: what cannot be is one line."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import parse

LENGTHS = "--seq-length-schedule"
ROPE = "--position-embedding-type rope"
ONE_LINE = [
    (
        "--window-size 8 --window-attn-skip-freq [1]*3",
        "--window-attn-skip-freq=[1]*3: 3 entries for --num-layers=8; give one for each layer",
    ),
    (
        "--window-size 8 --window-attn-skip-freq [1]*99999999",
        "--window-attn-skip-freq=[1]*99999999: more entries than --num-layers=8; give one for each layer",
    ),
    (
        "--window-size 8 --window-attn-skip-freq f(1)",
        "--window-attn-skip-freq=f(1): neither a number above 0 nor a list of 0 and 1; '([1]*3+[0])*2' is one",
    ),
    (
        "--window-size 8 --window-attn-skip-freq 1",
        "--window-attn-skip-freq=1: leaves no layer with --window-size=8; drop both",
    ),
    ("--window-attn-skip-freq 2", "--window-attn-skip-freq=2: needs --window-size"),
    ("--softmax-type-skip-freq 2", "--softmax-type-skip-freq=2: needs --softmax-type=off-by-one or learnable"),
    (
        "--softmax-type learnable --softmax-type-skip-freq [0]*8",
        "--softmax-type-skip-freq=[0]*8: leaves no layer with --softmax-type=learnable; drop both",
    ),
    (
        "--attn-logit-softcapping-skip-freq 2",
        "--attn-logit-softcapping-skip-freq=2: needs --attn-logit-softcapping",
    ),
    (
        "--attn-logit-softcapping 30 --attn-logit-softcapping-skip-freq 0,1",
        "--attn-logit-softcapping-skip-freq=0,1: 2 entries for --num-layers=8; give one for each layer",
    ),
    ("--attn-logit-softcapping 0", "--attn-logit-softcapping=0: must be > 0; leave it out"),
    ("--no-rope-freq 2", "--no-rope-freq=2: needs --position-embedding-type=rope"),
    (
        f"--no-rope-freq 3 {ROPE}",
        "--no-rope-freq=3: does not divide --num-layers=8; give a list, or 6 or 9 layers",
    ),
    (f"{LENGTHS} 0:16,64", "'0:16,64' is not TOKENS:LENGTH; write it like '0:4096 500B:32768'"),
    (f"{LENGTHS} 1K:64", "the first step must begin at 0 tokens; write it like '0:4096 500B:32768'"),
    (f"{LENGTHS} 0:0", "'0:0' has no tokens; write it like '0:4096 500B:32768'"),
]


@pytest.mark.parametrize(("changes", "line"), ONE_LINE, ids=[changes for changes, _ in ONE_LINE])
def test_one_problem_gives_exactly_one_line(changes: str, line: str) -> None:
    text = changes.partition(f"{LENGTHS} ")[2]
    assert problems_of(argv(changes), 1) == [f"{LENGTHS}='{text}': {line}" if text else line]


@pytest.mark.parametrize(
    ("text", "changes", "world_size", "rest"),
    [
        ("0:16 1M:32", "", 1, "the longest is 32, --seq-length is 64; give --seq-length=32"),
        ("0:24 1M:64", "", 1, "24 does not divide --seq-length=64, whose samples are cut; legal: 64,32,16,8,4,2,1"),
        ("0:2 1M:64", "--context-parallel-size 2", 2, "2 is not divisible by 2 x --context-parallel-size=2 = 4; use 4"),
        (
            "0:2 1M:64",
            "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --cp-comm-type a2a",
            4,
            "2 is not divisible by --context-parallel-size=2 x --tensor-model-parallel-size=2 (--sequence-parallel) = "
            "4; use 4",
        ),
        ("0:16 10:64 20:32", "", 1, "the token counts must rise; write it like '0:4096 500B:32768'"),
    ],
)
def test_lengths_that_cannot_be_are_one_line(text: str, changes: str, world_size: int, rest: str) -> None:
    assert problems_of([*argv(changes), LENGTHS, text], world_size) == [f"{LENGTHS}='{text}': {rest}"]


@pytest.mark.parametrize(
    ("text", "layers"),
    [("3", "11011011"), ("([1]*3+[0])*2", "11101110"), ("2*[0]+[1]*6", "00111111"), ("1," * 8, "1" * 8)],
)
def test_patterns_of_layers(text: str, layers: str) -> None:
    given = argv("--window-size 4 --softmax-type learnable --attn-logit-softcapping 30")
    skips = ("--window-attn-skip-freq", "--softmax-type-skip-freq", "--attn-logit-softcapping-skip-freq")
    model = parse([*given, *(word for flag in skips for word in (flag, text))]).model
    blocks = [model.for_layer(index) for index in range(8)]
    assert "".join(str(int(block.window_size == 4)) for block in blocks) == layers
    assert "".join(str(int(block.softmax_type == "learnable")) for block in blocks) == layers
    assert "".join(str(int(block.attn_logit_softcapping == 30)) for block in blocks) == layers
