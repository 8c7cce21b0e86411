"""What blocks are said to keep, from a run without values, beside what autograd holds after a real forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.comm import Axis
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.microbatch import Microbatch
from megalite.models import layer_specs
from megalite.parallel.context import SequenceCut
from megalite.planner.activations import stage_activations
from megalite.planner.memory import pipeline_memory
from megalite.rehearsal import unseen
from megalite.testing import run_ranks, run_single
from megalite.train.announcement import announce, as_read
from megalite.train.build import boundary_spec, build_module, layer_context
from megalite.train.kept_activations import _kept, with_kept
from megalite.train.make_mesh import make_mesh
from megalite.train.planned import PlannedRun

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2 --lr 1e-3 --mock-data "
    "--micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 304 --make-vocab-size-divisible-by 8"
).split()


def planned(flags: str, world: int) -> PlannedRun:
    return PlannedRun.of(parse([*BASE, *flags.split()], world_size=world), world, on_cpu=True)


def really_kept(world: World, flags: str, stage: int, device_type: str = "cpu") -> int:
    """Bytes that autograd holds of a real forward of a stage's blocks, beside weights and what the stage receives."""
    run = planned(flags, world.size)
    config, device = run.config, torch.device(device_type)
    mesh = make_mesh(config.parallel, world)
    how = {"sequence_parallel": config.parallel.sequence_parallel, "float8": config.training.float8}
    context = dataclasses.replace(layer_context(config, mesh, device, None, **how), deferred=False)
    every = layer_specs(config.model)
    specs = [every[item] for item in run.cuts[stage] if "layers." in every[item].name]
    stack = build_module(config, specs, context, run.plan.recompute_of(stage))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_(std=0.02)
    context_parallel = config.parallel.context
    cut = SequenceCut(0, context_parallel.context_parallel_size, context_parallel.ring)
    ids = torch.randint(0, 300, (config.training.micro_batch_size, config.model.seq_length), device=device)
    positions = torch.arange(config.model.seq_length, device=device).expand_as(ids)
    mask, numbers = torch.ones(ids.shape, device=device), torch.arange(len(ids), device=device)
    batch = cut(Microbatch(ids, ids, positions, mask, numbers))
    spec = boundary_spec(config, device)
    frozen = stage == 0 and "--lora" in flags  # as is the embedding, which makes it
    x = torch.randn(spec.shape, device=device).to(spec.dtype).requires_grad_(not frozen)
    given = [*stack.parameters(), *stack.buffers(), *vars(batch).values(), x if stage else None]
    outside = {each.untyped_storage()._cdata for each in given if isinstance(each, Tensor)}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() > 1 and tensor.untyped_storage()._cdata not in outside:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        assert stack(x, batch).requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.in_turn
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--fp64",
        "--model-type llama --num-query-groups 2 --bf16",
        "--hidden-dropout 0.1 --attention-dropout 0.1",
        "--window-size 20 --bf16 --fp32-residual-connection",
        "--seq-length 192 --qk-layernorm",
        "--softmax-type learnable",
        "--fp8-format hybrid --bf16",
        "--model-type llama --mla q_lora_rank=40 kv_lora_rank=24 qk_head_dim=20 qk_pos_emb_head_dim=12 v_head_dim=32",
        "--model-type llama --linear-attention variant=gdn num_key_heads=2 num_value_heads=4 key_head_dim=16 "
        "value_head_dim=32",
        "--lora rank=4 targets=linear_fc2 --bf16 --load . --finetune",
        "--recompute-granularity selective --attention-dropout 0.1",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_layers_without_values_keep_what_layers_with_values_do(flags: str, stage: int) -> None:
    flags += " --pipeline-model-parallel-size 2 --global-batch-size 8"
    kept = with_kept(planned(flags, 2)).kept
    assert kept is not None
    alone = World(stage, 2, torch.device("meta"), local_size=2)  # the tensor axis has one rank
    # Before torch 2.13 a fake kernel of the CPU returned log-sums in fp32 for fp64, too.
    narrow = 0.005 if "--fp64" in flags and torch.__version__ < "2.13" else 0.0  # compared as versions
    assert kept[stage] == pytest.approx(really_kept(alone, flags, stage), rel=narrow, abs=0)


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --tensor-model-parallel-size 2",
        "--model-type llama --tensor-model-parallel-size 2 --sequence-parallel --num-query-groups 2",
        "--bf16 --context-parallel-size 2 --cp-comm-type a2a",
    ],
)
def test_ranks_that_are_not_there_change_nothing(flags: str) -> None:
    [kept] = with_kept(planned(flags, 2)).kept or ()
    assert [kept] * 2 == run_ranks(really_kept, 2, flags, 0)


def test_the_table_has_it() -> None:
    run = planned("--recompute-granularity full --recompute-method uniform --pipeline-model-parallel-size 2", 2)
    ran = with_kept(run)
    assert ran.kept is not None and ran.kept[0] == ran.kept[1] + 4 * 64 * 2 * 64 > 0  # the first keeps its first input
    more = dataclasses.replace(ran, kept=[kept + 4096 for kept in ran.kept])
    before, after = (pipeline_memory(each)[0] for each in (ran, more))
    assert after.activations - before.activations == 4096


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 4",
        "--context-parallel-size 2",
        "--reset-attention-mask",
        "--seq-length-schedule 0:64",
        "--seq-length 65536",
        "--compile",
    ],
)
def test_layers_that_ask_for_values_are_left_to_closed_forms(flags: str) -> None:
    run = planned(flags, 2)
    assert with_kept(run) is run
    assert with_kept(dataclasses.replace(run, on_cpu=False)).kept is None


def on_unseen_gpu(world: World, flags: str) -> tuple[int, float]:
    """(What the blocks say they keep, what the search takes for it)."""
    size = 2 if "parallel-size 2" in flags else 1
    run = dataclasses.replace(planned(flags, size), on_cpu=False)
    [kept] = with_kept(run, unseen).kept or ()
    return kept, stage_activations(run.config, run.cuts[0], run.plan.recompute_of(0)).full


LARGER = " --hidden-size 512 --seq-length 512 --bf16 --device cuda "
ON_GPUS = [
    "",
    "--model-type llama --num-query-groups 2",
    "--qk-layernorm --hidden-dropout 0.1",
    "--attention-dropout 0.1 --window-size 100",
    "--softcapping attention=30 --softmax-type learnable",
    "--fp8-format hybrid",
    "--model-type llama --mla q_lora_rank=40 kv_lora_rank=24 qk_head_dim=20 qk_pos_emb_head_dim=12 v_head_dim=32",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2",
    "--context-parallel-size 2 --cp-comm-type all_gather",
    "--context-parallel-size 2 --cp-comm-type a2a",
]


@pytest.mark.in_turn
@pytest.mark.parametrize("flags", ON_GPUS)
def test_what_blocks_keep_on_a_gpu_is_what_the_search_takes_for_it(flags: str) -> None:
    kept, taken = run_single(on_unseen_gpu, LARGER + flags)
    assert taken == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("flags", ["--offload activations=2", "--cuda-graph-impl local", "--num-experts 4"])
def test_what_goes_or_stays_elsewhere_is_left_to_closed_forms(flags: str) -> None:
    run = dataclasses.replace(planned(LARGER + flags, 1), on_cpu=False)
    assert with_kept(run, unseen) is run


def announced(world: World) -> tuple[bool, tuple[int, ...] | None]:
    run = announce(planned("--hidden-size 256 --seq-length 256 --micro-batch-size 4", 1), world, Axis.single("world"))
    return run.held is not None, None if run.kept is None else tuple(run.kept)


def test_a_start_reads_as_a_dry_run_does() -> None:
    run = as_read(planned("--hidden-size 256 --seq-length 256 --micro-batch-size 4", 1))
    assert run.kept is not None and run_single(announced) == (True, tuple(run.kept))


def of_experts(world: World, flags: str) -> tuple[int, float]:
    """As `on_unseen_gpu`, of experts that the rehearsal's GPU deals their tokens evenly."""
    run = dataclasses.replace(planned(LARGER + flags, 1), on_cpu=False)
    with unseen(1):
        [kept] = _kept(run, torch.device("cuda"))
    return kept, stage_activations(run.config, run.cuts[0], run.plan.recompute_of(0)).full


@pytest.mark.parametrize("flags", ["", "--moe-shared-expert-intermediate-size 512"])
def test_what_experts_keep_is_what_the_search_takes_for_it(flags: str) -> None:
    kept, taken = run_single(of_experts, "--num-experts 4 --moe-router-topk 2 " + flags)
    assert taken == pytest.approx(kept, rel=0.01)
