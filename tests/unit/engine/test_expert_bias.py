"""The biases of experts, against their formula on a hand-written count."""

from __future__ import annotations

import torch
from torch import nn

from megalite.comm import Axis
from megalite.comm.p2p import TensorSpec
from megalite.config import Experts, ModelConfig
from megalite.engine.expert_bias import ExpertBias
from megalite.gradient import WeightGradQueue
from megalite.microbatch_notes import ExpertLoads
from megalite.nn.router import Router
from megalite.parallel.pipeline.stage import Stage
from megalite.parallel.tensor.context import LayerContext


def biases(versions: int) -> tuple[ExpertBias, ExpertLoads, list[Router]]:
    given = Experts(num_experts=4, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    config = ModelConfig(hidden_size=8, num_layers=1, num_attention_heads=1, seq_length=4, experts=given)
    routers, loads = [Router(config, 0, LayerContext()) for _ in range(versions)], ExpertLoads()
    spec = TensorSpec((4, 1, 8), torch.float32, torch.device("cpu"))
    modules = [nn.ModuleDict({"router": router}) for router in routers]
    stage = Stage(modules, WeightGradQueue(), spec=spec, is_first=True, is_last=True, loads=loads)
    return ExpertBias({(0, 0): stage}, 0.25, Axis.single("tp"), {}), loads, routers


def note(loads: ExpertLoads, microbatch: int, *counts: float) -> None:
    with loads.of(microbatch):
        loads.note(0, torch.tensor([*counts, 0.0, 0.0, 0.0]))


def test_each_version_moves_on_from_the_newest_by_the_loads_of_its_update() -> None:
    bias, loads, routers = biases(versions=2)
    note(loads, 0, 5, 1, 2, 0)
    note(loads, 1, 1, 1, 0, 2)  # mean 3: up where below
    note(loads, 2, 0, 9, 0, 0)
    bias.step(lambda number: number < 2, torch.zeros(()), 1)
    assert routers[1].expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert not routers[0].expert_bias.any()
    bias.step(lambda number: number == 2, torch.zeros(()), 2)
    assert routers[0].expert_bias.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert [shard.name for shard in bias.shards(2)] == ["router.expert_bias"]
    assert bias.shards(2)[0].local.data_ptr() == routers[0].expert_bias.data_ptr()


def test_a_load_at_the_mean_and_a_skipped_update_move_nothing() -> None:
    bias, loads, routers = biases(versions=1)
    note(loads, 0, 3, 4, 2, 3)
    bias.step(lambda number: True, torch.ones(()), 1)
    assert not routers[0].expert_bias.any()
    bias.step(lambda number: True, torch.zeros(()), 1)
    assert routers[0].expert_bias.tolist() == [0.0, -0.25, 0.25, 0.0]
