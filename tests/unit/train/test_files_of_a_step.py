"""Which files a dense step enters: the reading list has them all, and features that are off are absent."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from make_reading_pages import ALONE, LATER, ROOT, reading
from megalite.comm import World
from megalite.config.cli import parse
from megalite.testing import run_ranks
from megalite.testing.entered import Entered, calls_entered
from megalite.train import run as run_room
from megalite.train.run import open_run

FLAGS = (
    "--num-layers 4 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 61 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--eval-iters 0 --num-workers 0 --no-exit-signal-handler "
)
STEPS = {
    "gpt": (1, ""),
    "llama": (1, "--model-type llama"),
    "1f1b": (2, "--pipeline-model-parallel-size 2"),
    "2bw": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"),
    "tp": (2, "--tensor-model-parallel-size 2"),
    "dp": (2, "--use-distributed-optimizer"),
}
FENCED = {
    "adapters": r"parallel/tensor/adapters|nn/adapters|inventory/adapters|parallel/zero/frozen",
    "layers as adapters": r"nn/adapters",
    "frozen 8 bits": r"parallel/tensor/int8",
    "grids": r"parallel/grid/|nn/grid|config/tensor_grid|inventory/grid_traffic",
    "partial backpropagation": r"train/partial_backprop|microbatch_notes",
    "ZeRO++": r"parallel/zero/plus_plus|config/zero_plus_plus",
    "experts": r"nn/(experts|router)|parallel/expert/|engine/expert_bias|train/expert_report|microbatch_notes",
    "second order": r"optim/(matrix_rule|soap|shampoo|kfac)|parallel/tensor/products.py TappedProducts",
    "fp8": r"parallel/tensor/(float8|delayed_scaling)|engine/scale_history|microbatch_notes",
    "rows": r"parallel/rows/|train/host_embedding",
    "tiers": r"parallel/tiers/|parallel/zero/(host_\w+|delayed_optimizer)|parallel/pipeline/offloaded_stage",
    "further tokens": r"nn/mtp|train/further.py Further|parallel/tensor/replicated",
    "latent attention": r"nn/attention/latent|parallel/tensor/replicated",
    "linear attention": r"nn/delta",
    "context parallelism": r"parallel/context/|nn/attention/context",
    "message-driven": r"comm/arrivals|schedule/arrival|parallel/pipeline/message_driven",
    "graphs": r"nn/graphs",
    "stages that differ": r"comm/mesh_channel|inventory/transfer_plan|parallel/pipeline/shared_rows",
}
"""A feature -> files under `megalite/` that are its own."""

Calls = list[tuple[str, str, int]]


def body_trace(world: World, more: str) -> tuple[Calls, Calls, Calls]:
    """(File, function, calls) of the rest of start-up, of building the model, and of two steps."""
    built: list[Entered] = []
    build = run_room.build_model

    def traced(*given: Any) -> Any:
        with calls_entered() as calls:
            model = build(*given)
        built.append(calls)
        return model

    config = parse((FLAGS + more).split(), world_size=world.size)
    with patch.object(run_room, "build_model", traced), calls_entered() as start, open_run(config, world) as run:
        with calls_entered() as steps:
            run.trainer.train_step(drain=False)
            run.trainer.train_step(drain=True)
    first, second, third = ([(*key, number) for key, number in calls.items()] for calls in (start, built[0], steps))
    return first, second, third


@functools.cache
def trace(name: str) -> tuple[Entered, Entered, Entered]:
    """Calls by (file, function) of all ranks: of the rest of start-up, of building the model, and of two steps."""
    size, more = STEPS[name]
    found: tuple[Entered, Entered, Entered] = Counter(), Counter(), Counter()
    for rank in run_ranks(body_trace, size, more):
        for total, calls in zip(found, rank, strict=True):
            for file, function, number in calls:
                total[file, function] += number
    return found


@pytest.mark.parametrize("name", STEPS)
def test_a_step_enters_no_file_of_a_feature_that_is_off(name: str) -> None:
    entered = trace(name)[2]
    assert entered["train/trainer.py", "Trainer.train_step"] == 2 * STEPS[name][0]  # the trace sees calls
    leaks = [
        f"{feature}: {file} {function}, {number} calls"
        for (file, function), number in sorted(entered.items())
        for feature, files in FENCED.items()
        if re.match(files, f"{file} {function}")
    ]
    assert not leaks, "\n".join(leaks)


@pytest.mark.parametrize("feature, ranks, flags", [
    ("adapters", 1, "--lora-rank 2"),
    ("layers as adapters", 1, "--lora rank=2 kind=bottleneck"),
    ("frozen 8 bits", 1, "--lora rank=2 int8"),
    ("grids", 4, "--tensor-model-parallel-size 4 --tensor-parallel-mode 2d --micro-batch-size 2"),
    ("partial backpropagation", 1, "--partial-backprop-groups 2"),
    ("ZeRO++", 2, "--zero-stage 3 --zero-plus-plus weights"),
    ("experts", 1, "--num-experts 2"),
    ("second order", 1, "--optimizer kfac"),
    ("rows", 1, "--embedding-offload cpu --untie-embeddings-and-output-weights"),
    ("tiers", 1, "--optimizer-cpu-offload"),
    ("fp8", 1, "--fp8-format hybrid --fp8-recipe delayed --bf16"),
    ("further tokens", 1, "--mtp-num-layers 1 --position-embedding-type rope"),
    ("latent attention", 1, "--mla kv_lora_rank=8"),
    ("linear attention", 1, "--linear-attention variant=gdn num_key_heads=2 num_value_heads=2"),
    ("context parallelism", 2, "--context-parallel-size 2"),
    ("graphs", 1, "--cuda-graph-impl local --global-batch-size 1"),
    ("stages that differ", 3, "--stage-meshes 1x2,1x1"),
    ("message-driven", 2, "--pipeline-model-parallel-size 2 --pipeline-schedule message-driven"),
])  # fmt: skip
def test_the_fence_sees_a_feature_that_is_on(feature: str, ranks: int, flags: str) -> None:
    *_, entered = run_ranks(body_trace, ranks, flags)[0]
    assert any(re.match(FENCED[feature], f"{file} {function}") for file, function, _ in entered)


def test_the_reading_list_has_the_files_that_a_step_enters() -> None:
    start, built, steps = (set[str](), set[str](), set[str]())
    for name in STEPS:
        for files, calls in zip((start, built, steps), trace(name), strict=True):
            files |= {f"megalite/{file}" for file, _ in calls}
    listed = {str(path.relative_to(ROOT)) for _, path in [*reading(), *reading(LATER)]}
    entered = {file for file in built | steps if file.split("/")[1] not in ALONE}
    assert sorted(entered - listed) == [], "add them to ENGINE or LATER in tools/make_reading_pages.py"
    never = listed - start - built - steps - {"pretrain_gpt.py"}  # which starts the process
    assert sorted(never) == [], "no step enters these: take them off the lists in tools/make_reading_pages.py"
