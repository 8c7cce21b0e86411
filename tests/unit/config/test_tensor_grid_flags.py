"""`--tensor-parallel-mode`: which ranks make which grid, and what is said against the others, in one line each."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import parse

MODE, TP = "--tensor-parallel-mode", "--tensor-model-parallel-size"


@pytest.mark.parametrize(
    ("mode", "ranks", "shape"),
    [
        ("1d", 8, None),
        ("2d", 4, (1, 2, 2)),
        ("2.5d", 8, (1, 2, 4)),
        ("2.5d", 32, (1, 4, 8)),
        ("3d", 8, (2, 2, 2)),
        ("4d --tensor-parallel-grid 2 1 4", 8, (2, 1, 4)),
        ("4d --tensor-parallel-grid 1,2,8", 16, (1, 2, 8)),
    ],
)
def test_ranks_make_a_grid(mode: str, ranks: int, shape: tuple[int, int, int] | None) -> None:
    flags = f"{TP} {ranks} {MODE} {mode} --micro-batch-size 8 --seq-length 64 --hidden-size 128"
    config = parse(argv(flags), world_size=ranks, check_files=False)
    assert config.parallel.grid == shape


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            f"{TP} 8 {MODE} 2d",
            f"{TP}=8: {MODE}=2d has grids of 4,9,16,25,36,49,64 ranks; use one of them, or 4d with a grid of your own",
        ),
        (f"{TP} 4 {MODE} 4d", f"{MODE}=4d: needs --tensor-parallel-grid with three numbers, such as 1 2 2"),
        (
            f"{TP} 4 {MODE} 4d --tensor-parallel-grid 1 2 3",
            f"--tensor-parallel-grid: 1 x 2 x 3 = 6 ranks, not {TP}=4; use as many",
        ),
        (
            f"{TP} 4 --tensor-parallel-grid 1 2 2",
            f"--tensor-parallel-grid=1,2,2: {MODE}=1d has a grid of its own; use 4d, or drop it",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 3",
            "--micro-batch-size=3: not divisible by the 2 ranks of a grid of 1 x 2 x 2 that share samples; use 2 or 4",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 2 --num-query-groups 1",
            f"{MODE}=2d: a grid of 1 x 2 x 2 shares heads over 2, which does not divide 1 groups of queries; legal: 1",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 2 --ffn-hidden-size 66",
            "--ffn-hidden-size=66: not divisible by the 4 ranks of a grid of 1 x 2 x 2; use 64 or 68",
        ),
        (
            f"{TP} 4 {MODE} 4d --tensor-parallel-grid 1 1 4 --micro-batch-size 4",
            f"{MODE}=4d: a grid of 1 x 1 x 4 cuts no features, as data parallelism does; drop it for --zero-stage, or "
            "widen the grid",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 2 --sequence-parallel",
            f"{MODE}=2d: not with --sequence-parallel, a grid splits all activations already; drop one",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 2 --num-experts 4",
            f"{MODE}=2d: not with --num-experts, whose tokens travel; drop one",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 2 --eval-tasks files={__file__}",
            f"{MODE}=2d: not with --eval-task-files, which scores with layers cut along one side; drop one",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 2 --softmax-type learnable",
            f"{MODE}=2d: not with --softmax-type, whose sinks are cut along one side; drop one",
        ),
        (
            f"{TP} 4 {MODE} 2d --micro-batch-size 2 --optimizer muon",
            f"{MODE}=2d: not with --optimizer=muon, which needs whole rows; use adam or sgd",
        ),
    ],
)
def test_one_problem_gives_exactly_one_line(flags: str, line: str) -> None:
    assert problems_of(argv(flags), int(flags.split()[1])) == [line]
