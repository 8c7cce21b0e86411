"""Predicted bytes of states equal what the real buffers and the real optimizer allocate, to the byte."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalite.comm.mesh import Axis, ParallelMesh
from megalite.config import Config
from megalite.config.cli import parse
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.engine import rule_maker
from megalite.gradient import WeightGradQueue
from megalite.inventory.buckets import BufferParameter, plan_buckets
from megalite.inventory.layers import stage_parameters
from megalite.inventory.memory_plan import MemoryPlan, given_plan
from megalite.models import build_stack, layer_specs
from megalite.observe.live_memory import LiveBytes
from megalite.optim import Delay
from megalite.parallel.tensor.context import LayerContext
from megalite.parallel.zero import ParameterBuffers, StageOptions
from megalite.parallel.zero.sharded_optimizer import ShardedOptimizer
from megalite.planner.communication import stage_elements
from megalite.planner.host_params import with_weight_chunks
from megalite.planner.model_states import state_bytes
from megalite.train.build import WORD_EMBEDDINGS, parameter_dtype, zero_options
from tests.held_bytes import held_bytes

BASE = (
    "--num-layers 4 --hidden-size 40 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 --make-vocab-size-divisible-by 8"
).split()


def _config(text: str, world_size: int = 1) -> Config:
    return parse([*BASE, *text.split()], world_size=world_size)


def _modules(config: Config, items: range, device: str, versions: int = 1) -> list[nn.Module]:
    tp = config.parallel.tensor_model_parallel_size
    axis = Axis("tp", tp, 0, tuple(range(tp)), None)
    modules = []
    for _ in range(versions):
        context = LayerContext(
            tp=axis,
            sequence_parallel=config.parallel.sequence_parallel,
            dtype=parameter_dtype(config),
            device=torch.device(device),
            seed=1,
            weight_grads=WeightGradQueue(),
        )
        modules.append(build_stack(config.model, [layer_specs(config.model)[i] for i in items], context))
    return modules


@pytest.mark.parametrize("items", [range(0, 6), range(0, 2), range(2, 4), range(3, 6)])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--fp64",
        "--bf16 --grad-reduce-in-bf16",
        "--model-type llama --num-query-groups 2 --bf16 --qk-layernorm",
        "--zero-stage 1 --bf16",
        "--zero-stage 2 --bf16",
        "--zero-stage 3",
        "--optimizer sgd --sgd-momentum 0",
        "--optimizer sgd",
        "--optimizer lion --exp-avg-dtype bf16",
        "--optimizer muon --bf16",
        "--optimizer soap --bf16",
        "--optimizer soap --soap-max-precond-dim 100 --model-type llama",
        "--optimizer shampoo --shampoo-max-precond-dim 40",
        "--optimizer kfac --model-type llama",
        "--optimizer adafactor --model-type llama --bf16",
        "--optimizer adafactor --ema-decay 0.9",
        "--bf16 --ema-decay 0.9",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --ddp-bucket-size 10000",
    ],
)
def test_a_rank_alone_allocates_what_is_predicted(flags: str, items: range) -> None:
    config = _config(flags)
    [module] = _modules(config, items, "cpu")
    single = Axis.single
    buffers = ParameterBuffers(
        [module.logical_parameters()],
        axes=ParallelMesh.single().family(),
        options=zero_options(config),
        pipeline_stage=StageOptions(
            tied=frozenset({WORD_EMBEDDINGS}) if len(items) < 6 else frozenset(),
            whole=OPTIMIZER_SPECS[config.optimizer.optimizer].whole,
        ),
    )
    fraction = given_plan(config).fraction
    optimizer = ShardedOptimizer(
        [buffers],
        make_optimizer=rule_maker(config.optimizer, config.staleness),
        norm_axis=single("model"),
        offload_fraction=fraction,
    )
    held = held_bytes(buffers) | optimizer.memory()
    stages = 1 if len(items) == 6 else 3
    found = state_bytes(config, 1, items, num_stages=stages, versions=1, num_gradients=1, on_cpu=True)
    assert found.weights == held["weights"]
    assert found.gradients == held["gradients"]
    assert found.master == _masters(optimizer, config)
    assert found.moments == held["state"]
    assert found.host == held["offloaded"]


RULES = [
    "",
    "--bf16",
    "--fp64",
    "--bf16 --grad-reduce-in-bf16",
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--optimizer sgd --bf16",
    "--optimizer lion",
    "--optimizer lion --exp-avg-dtype bf16 --bf16",
    "--optimizer muon",
    "--optimizer muon --bf16 --swiglu",
    "--optimizer soap --soap-precondition-frequency 2",
    "--optimizer soap --bf16 --soap-max-precond-dim 100",
    "--optimizer shampoo --bf16",
    "--optimizer shampoo --shampoo-max-precond-dim 40",
    "--optimizer adafactor --bf16",
    "--bf16 --store-param-remainders",
    "--bf16 --ema-decay 0.9",
    "--optimizer muon --ema-decay 0.9",
]


def _built(config: Config, plan: MemoryPlan, versions: int, folder: Path) -> tuple[ParameterBuffers, ShardedOptimizer]:
    """Of the whole model on one rank, the second update behind if there are two versions."""
    named = [module.logical_parameters() for module in _modules(config, range(6), "cpu", versions)]
    stage = StageOptions(whole=OPTIMIZER_SPECS[config.optimizer.optimizer].whole)
    axes, delay = ParallelMesh.single().family(), Delay(versions - 1, learning_rate=1e-3, weight_decay=0.1)
    buffers = ParameterBuffers(named, axes=axes, options=zero_options(config, plan), pipeline_stage=stage)
    optimizer = ShardedOptimizer(
        [buffers],
        make_optimizer=rule_maker(config.optimizer, config.staleness, delay),
        norm_axis=Axis.single("model"),
        offload_fraction=plan.fraction,
        offload_path=str(folder) if plan.file_fraction else None,
        file_fraction=plan.file_fraction,
        store_param_remainders=config.optimizer.store_param_remainders,
    )
    delay.begin(5)
    return buffers, optimizer


def _temporary(optimizer: ShardedOptimizer) -> int:
    """The most bytes that one of three steps adds to those that were there."""
    most = 0
    for _ in range(3):
        for master in optimizer.masters:
            master.gradient.normal_()
        with LiveBytes() as counter:
            counter.add_everything()
            begin = counter.now
            optimizer.step(lr=1e-3, weight_decay=0.1)
        most = max(most, counter.peak - begin)
    return most


@pytest.mark.in_turn
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_at_every_stage_with_versions_and_places(rule: str, tmp_path: Path) -> None:
    """States to the byte, and what a step needs beside them: on the device, part of them on the host or in a file."""
    remainders = "remainders" in rule
    for stage, versions, share in product(range(4), (1, 2), (0, 0.4)):
        if (versions == 2 and (stage > 1 or remainders)) or (share and remainders):
            continue
        late = " --pipeline-schedule 2bw" if versions == 2 else ""
        config = _config(f"{rule} --zero-stage {stage} --ddp-bucket-size 10000{late}")
        plan = MemoryPlan(fraction=share, file_fraction=share / 2)
        buffers, optimizer = _built(config, plan, versions, tmp_path)
        found = state_bytes(
            config, 1, range(6), plan=plan, num_stages=1, versions=versions, num_gradients=1, on_cpu=True
        )
        held, case = held_bytes(buffers) | optimizer.memory(), (stage, versions, share)
        assert found.weights == held["weights"] and found.gradients == held["gradients"], case
        assert found.moments == held["state"] and found.host + found.file == held["offloaded"], case
        assert found.master == _masters(optimizer, config) or remainders, case
        if stage == 0 and not share:
            assert found.temporary == pytest.approx(_temporary(optimizer), rel=0.03, abs=3000), case
        optimizer.close()


@pytest.mark.parametrize("items", [range(0, 6), range(0, 2), range(3, 6)])
@pytest.mark.parametrize("flags", ["--bf16", "", "--bf16 --zero-stage 2", "--swiglu --ddp-bucket-size 3000 --fp64"])
def test_weights_and_gradients_on_the_host_take_what_is_predicted(flags: str, items: range) -> None:
    config = _config(f"{flags} --param-offload cpu")
    [module] = _modules(config, items, "cpu")
    stages = 1 if len(items) == 6 else 3
    buffers = ParameterBuffers(
        [module.logical_parameters()],
        axes=ParallelMesh.single().family(),
        options=zero_options(config),
        pipeline_stage=StageOptions(tied=frozenset({WORD_EMBEDDINGS}) if len(items) < 6 else frozenset()),
    )
    optimizer = ShardedOptimizer(
        [buffers],
        make_optimizer=rule_maker(config.optimizer, config.staleness),
        norm_axis=Axis.single("model"),
        offload_fraction=1.0,
    )
    found = state_bytes(config, 1, items, num_stages=stages, versions=1, num_gradients=1, on_cpu=True)
    held = held_bytes(buffers)
    assert (held["weights"], held["gradients"]) == (found.weights, found.gradients) and found.weights == 0
    homes: list[Any] = [bucket.weights[0].full for bucket in buffers.buckets]
    homes += [bucket.gradient.reduced for bucket in buffers.buckets if not bucket.plan.tied]
    shared = buffers.dtype == buffers.main_dtype  # then the weights are the masters
    masters = sum(master.tensor.nbytes for master in optimizer.masters) if shared else 0
    assert found.host == sum(home.nbytes for home in homes) + optimizer.memory()["offloaded"] - masters
    cuts = [items if number == 0 else range(0) for number in range(stages)]
    coming = [weights.nbytes for weights in buffers.weights.coming]  # type: ignore[attr-defined]  # the hosted ones
    chunks = with_weight_chunks(config, 1, cuts, given_plan(config)).chunks
    assert chunks is not None
    sizes = chunks.sizes[0]
    assert sum(coming) == sum(sizes) and (len(coming) > len(sizes) or sorted(coming) == sorted(sizes))


def _masters(optimizer: ShardedOptimizer, config: Config) -> int:
    """Bytes of the storages that hold masters and nothing else."""
    weights = {s.bucket.weights[0].shard.untyped_storage().data_ptr() for s in optimizer.masters}
    storages = [s.tensor.untyped_storage() for s in optimizer.masters if not s.offloaded]
    return sum({st.data_ptr(): st.nbytes() for st in storages if st.data_ptr() not in weights}.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("items", [range(0, 6), range(0, 3), range(3, 6)])
@pytest.mark.parametrize(
    ("flags", "tp", "dp"), [("--bf16", 2, 4), ("--model-type llama --bf16 --num-query-groups 2", 2, 3)]
)
def test_a_meta_instantiation_of_a_large_layout_gives_the_same_bytes(
    flags: str, tp: int, dp: int, items: range, zero: int
) -> None:
    config = _config(f"{flags} --tensor-model-parallel-size {tp} --zero-stage {zero}", world_size=tp * dp)
    [module] = _modules(config, items, "meta")
    named: list[tuple[str, Any]] = module.logical_parameters()
    assert {n: p.numel() for n, p in named} == {
        n: math.prod(p.local_shape(tp)) for n, p in stage_parameters(config.model, items)
    }
    tied = (
        frozenset({WORD_EMBEDDINGS})
        if len(items) < 6 and not config.model.untie_embeddings_and_output_weights
        else frozenset()
    )
    options = zero_options(config)
    plans = plan_buckets(
        [BufferParameter(i, n, tuple(p.shape), p.placement) for i, (n, p) in enumerate(named)],
        zero_stage=zero,
        shards=dp,
        bucket_size=options.bucket_size,
        overlap=True,
        on_cpu=True,
        tied=tied,
    )
    total = sum(plan.stop - plan.start for plan in plans)
    streamed = sum(plan.stop - plan.start for plan in plans if not plan.tied)
    stages = 1 if len(items) == 6 else 2
    found = state_bytes(config, tp * dp, items, num_stages=stages, versions=1, num_gradients=1, on_cpu=True)
    owned = total // dp if zero else total
    assert found.weights == 2 * (total // dp if zero == 3 else total)
    assert found.gradients == 4 * (total if zero < 2 else streamed // dp + total - streamed)
    assert (found.master, found.moments) == (4 * owned, 8 * owned)


@pytest.mark.parametrize("shards", [8, 32])
def test_owners_of_whole_matrices_need_what_adamw_needs_less_a_moment(shards: int) -> None:
    def total(rule: str) -> int:
        config = _config(
            f"--model-type llama --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --optimizer {rule} "
            f"--zero-stage 1 --bf16 --global-batch-size {shards}",
            world_size=shards,
        )
        found = state_bytes(config, shards, range(34), num_stages=1, versions=1, num_gradients=1, on_cpu=False)
        return shards * (found.weights + found.gradients + found.master + found.moments)

    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 4 * 4096)
    assert total("muon") == pytest.approx(total("adam") - 4 * matrices, rel=0.05)


@pytest.mark.parametrize("rule", ["adam", "sgd --sgd-momentum 0", "lion", "muon", "adafactor"])
@pytest.mark.parametrize("method", ["predict", "error-feedback"])
def test_the_last_step_is_kept_where_a_correction_needs_it(rule: str, method: str) -> None:
    config = _config(f"--optimizer {rule} --pipeline-schedule 2bw --staleness-correction {method} --bf16")
    versions = [module.logical_parameters() for module in _modules(config, range(0, 6), "cpu", versions=2)]
    whole = OPTIMIZER_SPECS[config.optimizer.optimizer].whole
    buffers = ParameterBuffers(
        versions,
        axes=ParallelMesh.single().family(),
        options=zero_options(config),
        pipeline_stage=StageOptions(whole=whole),
    )
    made = rule_maker(config.optimizer, config.staleness, Delay(1))
    optimizer = ShardedOptimizer([buffers], make_optimizer=made, norm_axis=Axis.single("model"))
    found = state_bytes(config, 1, range(0, 6), num_stages=1, versions=2, num_gradients=1, on_cpu=True)
    assert found.moments == optimizer.memory()["state"]


def test_two_versions_and_two_gradients() -> None:
    """2BW: one more compute copy, and a master of its own even where the weights are fp32."""
    one = state_bytes(_config(""), 1, range(6), num_stages=1, versions=1, num_gradients=1, on_cpu=True)
    two = state_bytes(_config(""), 1, range(6), num_stages=1, versions=2, num_gradients=2, on_cpu=True)
    assert two.weights == 2 * one.weights
    assert two.gradients == 2 * one.gradients
    assert (one.master, two.master) == (0, one.weights)


@pytest.mark.parametrize(
    ("zero", "half", "full"),
    [(0, 18, 16), (1, 6 + 12 / 4, 8 + 8 / 4), (2, 2 + 16 / 4, 4 + 12 / 4), (3, 18 / 4, 16 / 4)],
)
def test_bytes_per_parameter_over_four_shards_are_those_of_the_zero_paper(zero: int, half: float, full: float) -> None:
    for flags, expected in (("--bf16", half), ("", full)):
        config = _config(f"{flags} --hidden-size 512 --zero-stage {zero}", world_size=4)
        parameters = stage_elements(config, range(6))
        found = state_bytes(config, 4, range(6), num_stages=1, versions=1, num_gradients=1, on_cpu=True)
        assert found.held == pytest.approx(expected * parameters, rel=1e-3)
