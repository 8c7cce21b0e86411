"""`--stage-meshes`: how it is read, and what is said against it, in one line each."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import parse
from megalite.config.stage_meshes import StageMesh, nearest_meshes, parse_meshes

MESHES = "--stage-meshes"


def test_alike_stages_are_another_spelling() -> None:
    given = parse(argv(f"{MESHES} 2x2,2x2 --global-batch-size 8"), world_size=8, check_files=False)
    plain = argv("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8")
    assert given.parallel.meshes == () and given.data_parallel_size(8) == 2
    expected = parse(plain, world_size=8, check_files=False).parallel
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        assert getattr(given.parallel, name) == getattr(expected, name) == 2


def test_stages_that_differ() -> None:
    config = parse(argv(f"{MESHES} 4x1,2x2,1x2 --global-batch-size 8"), world_size=10, check_files=False)
    assert config.parallel.meshes == (StageMesh(4, 1), StageMesh(2, 2), StageMesh(1, 2))
    assert config.parallel.workers == (1, 2, 2) and config.parallel.pipeline_model_parallel_size == 3
    assert config.data_parallel_size(10) == 1 and config.num_microbatches(10) == 8
    alike, ranks = config.of_stage(1, 10)
    assert ranks == 12 and alike.data_parallel_size(ranks) == 2 and alike.parallel.tensor_model_parallel_size == 2


@pytest.mark.parametrize(
    ("flags", "world", "line"),
    [
        (
            f"{MESHES} 2y1,1x1",
            3,
            f"{MESHES}=2y1,1x1: '2y1' is not TPxREPLICAS, two numbers from 1 on; write it like 4x1,2x2",
        ),
        (
            f"{MESHES} 1x2,1x1 --global-batch-size 8",
            4,
            f"{MESHES}=1x2,1x1: 3 ranks in all, the world has 4; use --nprocs 3, or one of 1x2,1x2; 1x2,2x1; 2x1,1x2",
        ),
        (
            f"{MESHES} 1x4,1x1 --global-batch-size 6",
            5,
            f"{MESHES}: 4 replicas of a stage do not divide m = 6 micro-batches per batch; make m a multiple of 4 by "
            "--global-batch-size, or choose replicas that divide 6 (legal: --global-batch-size=8); nearest: 1x3,1x2; "
            "1x3,2x1; 1x2,1x3",
        ),
        (
            f"{MESHES} 3x1,1x1",
            4,
            f"{MESHES}=3x1,1x1: tp 3 of stage 0: does not divide --num-attention-heads=8; legal: 1,2,4,8",
        ),
        (
            f"{MESHES} 1x2,1x1 --context-parallel-size 2 --global-batch-size 8",
            3,
            f"{MESHES}=1x2,1x1: not with --context-parallel-size=2; drop it, or give stages of one size",
        ),
        (
            f"{MESHES} 1x2,1x1 --pipeline-schedule chimera --global-batch-size 8",
            3,
            f"--pipeline-schedule=chimera: not with {MESHES}; legal: gpipe, 1f1b, eager-1f1b, pipedream, 2bw, zb-h1",
        ),
        (
            f"{MESHES} 1x2,1x1 --sample-interval 5 --global-batch-size 8",
            3,
            f"{MESHES}=1x2,1x1: not with --sample-interval; drop it, and let tools/generate_text.py continue texts "
            "from checkpoints",
        ),
        (
            f"{MESHES} 1x2,1x1 --pipeline-model-parallel-size 3 --global-batch-size 8",
            3,
            f"--pipeline-model-parallel-size=3: contradicts {MESHES}=1x2,1x1, which says 2; drop it",
        ),
        (
            f"{MESHES} 1x2,1x1 --tensor-model-parallel-size 2 --global-batch-size 8",
            3,
            f"--tensor-model-parallel-size=2: {MESHES}=1x2,1x1 says it of each stage; drop it",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipedream-vertical-sync --global-batch-size 8",
            2,
            "--pipedream-vertical-sync: 1f1b uses one version on all stages anyway; drop it, or use pipedream",
        ),
    ],
)
def test_one_line(flags: str, world: int, line: str) -> None:
    found = problems_of(argv(flags), world)
    assert line in found, found
    assert len([other for other in found if "stage-meshes" in other or "vertical" in other]) == 1, found


def test_nearest_meshes_are_legal() -> None:
    for text in nearest_meshes(parse_meshes("2x3,1x1,4x1"), 12, [8], [1, 2, 4]):
        meshes = parse_meshes(text)
        assert sum(mesh.size for mesh in meshes) == 12
        assert all(8 % mesh.dp == 0 and mesh.tp in (1, 2, 4) for mesh in meshes)


@pytest.mark.parametrize(
    ("flags", "excluded"),
    [
        ("--qk-layernorm --qk-layernorm-across-heads --normalization RMSNorm", "--qk-layernorm-across-heads"),
        ("--lora-rank 2 --lora-targets q_proj v_proj", "adapters of q, v alone"),
    ],
)
def test_what_does_not_go_with_shared_keys(flags: str, excluded: str) -> None:
    tp = "--tensor-model-parallel-size"
    line = f"{tp}=4: --num-query-groups=2, so ranks share keys: not with {excluded}; use {tp} 2 at most"
    assert line in problems_of(argv(f"--num-query-groups 2 {tp} 4 {flags}"), 4)


def test_rows_of_shared_keys_are_cut_evenly() -> None:
    tp = "--tensor-model-parallel-size"
    line = f"{tp}=8: cannot share --num-query-groups=2 evenly; legal: 1,2,4"
    assert problems_of(argv(f"--num-query-groups 2 --kv-channels 1 {tp} 8"), 8) == [line]
