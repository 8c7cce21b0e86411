"""Bytes of a model with experts: two families of parameters, and a router in fp32 beside bf16."""

from __future__ import annotations

import pytest
import torch

from megalite.comm.mesh import Axis, ParallelMesh
from megalite.config import OPTIMIZER_SPECS, parse
from megalite.engine import rule_maker
from megalite.inventory.families import AXIS_FAMILIES
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor.context import LayerContext
from megalite.parallel.zero import StageOptions, stage_buffers
from megalite.parallel.zero.sharded_optimizer import ShardedOptimizer
from megalite.planner.model_states import state_bytes
from megalite.train.build import parameter_dtype, zero_options
from tests.held_bytes import held_bytes

BASE = (
    "--num-layers 4 --hidden-size 40 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 --make-vocab-size-divisible-by 8 "
    "--num-experts 6 --moe-ffn-hidden-size 24"
).split()


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--bf16 --moe-layer-freq 2 --model-type llama --moe-shared-expert-intermediate-size 16",
        "--bf16 --optimizer muon",
        "--bf16 --optimizer soap",
        "--optimizer adafactor",
        "--bf16 --zero-stage 2",
    ],
)
def test_a_rank_alone_allocates_what_is_predicted(flags: str) -> None:
    config = parse([*BASE, *flags.split()], world_size=1)
    module = build_stack(config.model, layer_specs(config.model), LayerContext(dtype=parameter_dtype(config)))
    mesh = ParallelMesh.single()
    buffers = stage_buffers(
        [module.logical_parameters()],
        {name: mesh.family(name) for name in AXIS_FAMILIES},
        options=zero_options(config),
        pipeline_stage=StageOptions(whole=OPTIMIZER_SPECS[config.optimizer.optimizer].whole),
    )
    make_optimizer = rule_maker(config.optimizer, config.staleness)
    optimizer = ShardedOptimizer(buffers, make_optimizer=make_optimizer, norm_axis=Axis.single("model"))
    found = state_bytes(config, 1, range(6), num_stages=1, versions=1, num_gradients=1, on_cpu=True)
    held = optimizer.memory()
    assert len(buffers) == (3 if "--bf16" in flags else 2)
    assert found.weights == sum(held_bytes(each)["weights"] for each in buffers)
    assert found.gradients == sum(held_bytes(each)["gradients"] for each in buffers)
    assert (found.master, found.moments) == (held["master"], held["state"])
    assert {each.dtype for each in buffers} == {torch.float32, parameter_dtype(config)}
