"""What blocks are said to keep, from a run without values, beside what autograd holds after a real forward."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import pretrain_gpt
from megalite.comm import Axis
from megalite.comm.world import World
from megalite.config import with_vocab_size
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.inventory import given_plan
from megalite.microbatch import Microbatch
from megalite.models import layer_specs
from megalite.parallel.context import SequenceCut
from megalite.parallel.tensor.products import product_dtype
from megalite.planner import float8_problems
from megalite.planner.memory import pipeline_memory
from megalite.rehearsal import unseen
from megalite.rehearsal.device import watched_gpu
from megalite.testing import run_ranks, run_single
from megalite.train import open_run
from megalite.train.announcement import announce, as_read
from megalite.train.build import boundary_spec, build_module, layer_context
from megalite.train.kept_activations import with_kept
from megalite.train.make_mesh import make_mesh
from megalite.train.planned import PlannedRun
from tests.unit.config.test_shipped_configs import WORLDS, load

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2 --lr 1e-3 --mock-data "
    "--micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 304 --make-vocab-size-divisible-by 8"
).split()


def planned(flags: str, world: int) -> PlannedRun:
    return PlannedRun.of(parse([*BASE, *flags.split()], world_size=world), world, on_cpu=True)


def read_from(run: PlannedRun) -> list[int]:
    """Bytes that the blocks of each stage say they keep at the longest sequences."""
    kept = with_kept(run, unseen).kept
    assert kept is not None
    return [sum(each) for each in kept[run.config.model.seq_length]]


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
    starts = positions // 20 * 20 if config.data.reset_attention_mask else None
    batch = cut(Microbatch(ids, ids, positions, mask, numbers, document_starts=starts))
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
        "--num-experts 4 --moe-router-topk 2 --bf16",
        "--num-experts 4 --moe-router score_function=sigmoid --moe-shared-expert-intermediate-size 40 --swiglu",
        "--reset-attention-mask",
        "--reset-attention-mask --window-size 20 --bf16",
    ],
)
def test_layers_without_values_keep_what_layers_with_values_do(flags: str, stage: int) -> None:
    flags += " --pipeline-model-parallel-size 2 --global-batch-size 8"
    kept = read_from(planned(flags, 2))
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
        "--bf16 --context-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type all_gather --reset-attention-mask",
        "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel",
    ],
)
def test_ranks_that_are_not_there_change_nothing(flags: str) -> None:
    [kept] = read_from(planned(flags, 2))
    assert [kept] * 2 == run_ranks(really_kept, 2, flags, 0)


def test_ranks_that_share_experts_get_what_plans_take_for_the_worst() -> None:
    """Half as many rows more than the mean, of what experts keep between their matrices and before the first."""
    flags = "--num-experts 4 --moe-router-topk 2 --swiglu --ffn-hidden-size 96"
    [alone], [shared] = read_from(planned(flags, 1)), read_from(planned(flags + " --expert-model-parallel-size 2", 2))
    rows, numbers = 2 * 64 * 2, 2 * 96 + 64  # gate and value, what comes in
    assert shared - alone == 4 * rows // 2 * numbers * 4


def test_the_table_has_it() -> None:
    run = planned("--recompute-granularity full --recompute-method uniform --pipeline-model-parallel-size 2", 2)
    first, last = read_from(run)
    assert first == last + 4 * 64 * 2 * 64 > 0  # the first keeps its first input
    ran = with_kept(run)
    more = dataclasses.replace(ran, kept={64: [[kept[0] + 4096, *kept[1:]] for kept in (ran.kept or {})[64]]})
    before, after = (pipeline_memory(each)[0] for each in (ran, more))
    assert after.activations - before.activations == 4096


def test_many_pieces_are_left_to_closed_forms_and_so_is_a_gpu_that_nobody_has() -> None:
    for run in (planned("--seq-length 65536", 1), dataclasses.replace(planned("", 1), on_cpu=False)):
        assert with_kept(run) is run


def test_what_a_compiler_keeps_beside_is_added() -> None:
    """The inputs of the second matrix of each MLP, 4 x 64 numbers of each of 128 tokens; none of a block that runs
    again."""
    for more, blocks in (
        ("", 4),
        (" --recompute-granularity full --recompute-method block --recompute-num-layers 1", 3),
    ):
        plain, compiled = (pipeline_memory(with_kept(planned(flags + more, 1)))[0] for flags in ("", "--compile"))
        assert compiled.activations - plain.activations == blocks * 128 * 256 * 4


LARGE = " --hidden-size 512 --seq-length 512 --device cuda "
LARGER = LARGE + "--bf16 "
FAMILIES = [
    "",
    "--model-type llama",
    "--model-type llama --num-query-groups 2",
    "--num-query-groups 4",
    "--swiglu --qk-layernorm --use-parallel-residual",
    "--softmax-scale 0.1",
    "--window-size 100",
    "--model-type llama --attention-dropout 0.1",
    "--softmax-type learnable --normalization RMSNorm",
    "--softcapping attention=30",
    "--model-type llama --qk-layernorm --qk-layernorm-across-heads",
    "--attention-output-gate --norm-placement post",
    "--model-type llama --norm-placement sandwich --apply-layernorm-1p",
    "--model-type llama --mla q_lora_rank=64 kv_lora_rank=32 qk_head_dim=32 qk_pos_emb_head_dim=16 v_head_dim=32",
    "--model-type llama --mla q_lora_rank=64 kv_lora_rank=32 qk_head_dim=32 qk_pos_emb_head_dim=16 v_head_dim=32 "
    "--attention-dropout 0.1",
    "--model-type llama --linear-attention variant=gdn num_key_heads=4 num_value_heads=8 key_head_dim=64 "
    "value_head_dim=128",
]
BESIDE = [
    "",
    "--num-experts 4 --moe-router-topk 2",
    "--num-experts 4 --moe-router score_function=sigmoid --moe-shared-expert-intermediate-size 512 "
    "--moe-shared-expert-gate",
    "--num-experts 4 --moe-router-topk 2 --moe-expert-capacity-factor 0.5",
    "--num-experts 4 --moe-layer-freq 2",
]
PARALLEL = {
    "": 1,
    "--tensor-model-parallel-size 2": 2,
    "--tensor-model-parallel-size 2 --sequence-parallel": 2,
    "--context-parallel-size 2": 2,
    "--context-parallel-size 2 --cp-comm-type a2a": 2,
    "--context-parallel-size 2 --cp-comm-type all_gather": 2,
    "--expert-model-parallel-size 2": 2,
    "--pipeline-model-parallel-size 4 --global-batch-size 8": 4,
    "--tensor-parallel-mode 4d --tensor-parallel-grid 2,1,1 --tensor-model-parallel-size 2": 2,
    "--stage-meshes 1x2,2x1 --global-batch-size 8": 4,
}
MORE = [
    *["", "--fp32-residual-connection", "--hidden-dropout 0.1", "--reset-attention-mask", "--fp8-format hybrid"],
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    *["--offload activations=1", "--cuda-graph-impl local", "--seq-length-schedule 0:256 5000:512"],
    "--compile",
]


def difference(run: PlannedRun) -> float:
    """By how much what the search takes for a rank's activations, here or on the host, is off what the blocks say."""
    pairs = zip(pipeline_memory(run), pipeline_memory(with_kept(run, unseen)), strict=True)
    totals = [(a.activations + a.host, b.activations + b.host) for a, b in pairs]
    return max(abs(said - read) / max(1.0, read) for said, read in totals)  # a stage may be without blocks


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(8))
def test_what_blocks_keep_on_a_gpu_is_what_the_search_takes_for_it(seed: int) -> None:
    """Drawn layouts of drawn models."""
    rng, tried = random.Random(seed), 0
    while tried < 12:
        parallel, size = rng.choice(list(PARALLEL.items()))
        drawn = [rng.choice(each) for each in (["--bf16", "--bf16", "--fp16", ""], FAMILIES, BESIDE, MORE)]
        flags = " ".join([*drawn, parallel])
        try:
            run = dataclasses.replace(planned(LARGE + flags, size), on_cpu=False)
        except ConfigError:  # a combination that no run may have
            continue
        if [*float8_problems(run.config)]:
            continue
        tried += 1
        assert with_kept(run, unseen).kept is not None, flags
        assert difference(run) < 0.01, flags


def test_what_each_length_of_sequences_keeps_is_read() -> None:
    """On a CPU attention keeps weights of blocks, of more the longer they are."""
    run = planned("--seq-length 512 --train-iters 200 --seq-length-schedule 0:128 5000:512", 1)
    kept = with_kept(run).kept or {}
    assert set(kept) == {128, 512} and sum(kept[512][0]) > 1.5 * sum(kept[128][0])


def test_stages_that_are_recomputed_otherwise_keep_other_bytes() -> None:
    run = planned("--pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 8", 4)
    full = given_plan(planned("--recompute-granularity full --recompute-method uniform", 1).config).recompute[0]
    each = tuple(full if stage == 2 else run.plan.recompute_of(stage) for stage in range(4))
    plan = dataclasses.replace(run.plan, recompute=each)
    sums = read_from(dataclasses.replace(run, plan=plan))
    assert sums[2] < sums[1] / 4


def test_a_reading_asks_for_gradients_where_its_caller_wants_none() -> None:
    run = planned("", 1)
    with torch.inference_mode():
        assert with_kept(run).kept == with_kept(planned("", 1)).kept != {64: [[0, 0, 0, 0]]}


@pytest.mark.parametrize("flags", ["", "--model-type llama --num-query-groups 2", "--window-size 100", FAMILIES[-3]])
def test_without_a_kernel_all_weights_are_kept(flags: str) -> None:
    """In fp64 a GPU has no fused attention but by tiles."""
    run = dataclasses.replace(planned(f"{LARGE} --fp64 {flags}", 1), on_cpu=False)
    assert difference(run) < 0.01


@pytest.mark.landing
@pytest.mark.in_turn
@pytest.mark.parametrize("name", WORLDS)
def test_every_file_of_configs_is_read(name: str) -> None:
    """On GPUs, as the search counts it: most of these compile, some have experts, documents, a state."""
    config, size, _ = load(name)
    run = PlannedRun.of(config if config.model.vocab_size else with_vocab_size(config, 50000), size, on_cpu=False)
    assert with_kept(run, unseen).kept is not None and difference(run) < 0.01


CacheWrapper = type(functools.cache(len))


def test_nothing_of_a_gpu_without_values_stays() -> None:
    """Neither what is patched nor what is remembered of trials and kernels: a run on a real one comes behind it."""
    rooms = [module for name, module in sys.modules.items() if name.startswith(("megalite.nn.", "megalite.parallel."))]
    found = {value for room in rooms for value in vars(room).values() if isinstance(value, CacheWrapper)}
    caches = {f"{each.__module__}.{each.__name__}": each for each in found if each is not product_dtype}
    patched = torch.cuda, torch.Tensor, torch.UntypedStorage, torch.distributed, torch.nn.functional

    def state() -> list[Any]:
        sizes = {name: each.cache_info().currsize for name, each in caches.items()}
        swaps, level = torch.__future__.get_swap_module_params_on_conversion(), logging.getLogger("megalite").level
        return [*(dict(vars(each)) for each in patched), sizes, swaps, level]

    runs = [dataclasses.replace(planned(LARGER + f"{a} {b}", 1), on_cpu=False) for a in FAMILIES for b in BESIDE[:2]]
    before = state()
    assert all(with_kept(run, unseen).kept is not None for run in runs)
    assert state() == before


def test_a_run_does_not_depend_on_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("megalite.train.kept_activations._saved", lambda *_: 1 / 0)
    large = "--hidden-size 256 --seq-length 256 --micro-batch-size 4"
    for run, gpu in ((planned(large, 1), None), (dataclasses.replace(planned(large, 1), on_cpu=False), unseen)):
        assert as_read(run, gpu) is run
        assert "without values fails (ZeroDivisionError: division by zero)" in caplog.records.pop().getMessage()


def announced(world: World) -> tuple[bool, Any]:
    run = announce(planned("--hidden-size 256 --seq-length 256 --micro-batch-size 4", 1), world, Axis.single("world"))
    return run.held is not None, run.kept


def test_a_start_reads_as_a_dry_run_does() -> None:
    run = as_read(planned("--hidden-size 256 --seq-length 256 --micro-batch-size 4", 1))
    assert run.kept is not None and run_single(announced) == (True, run.kept)


def trained_on_gpus(world: World, flags: str, *, reads: bool) -> tuple[bool, list[str], list[str]]:
    """(Whether the start has read what blocks keep, norms of three steps, races), on GPUs with values."""
    ran = []

    def announces(*args: Any) -> PlannedRun:
        ran.append(announce(*args))
        return ran[0]

    argv = [*BASE, *"--hidden-size 256 --seq-length 256 --micro-batch-size 8".split(), *flags.split()]
    with pytest.MonkeyPatch.context() as patch, watched_gpu() as gpu:
        patch.setattr("megalite.train.run.announce", announces)
        place = dataclasses.replace(world, device=torch.device("cuda", 0))
        with open_run(parse(argv, world_size=world.size), place, None, unseen if reads else None) as run:
            norms = [float(run.trainer.train_step(drain=step == 2).grad_norm or 0.0).hex() for step in range(3)]
    return ran[0].kept is not None, norms, gpu.races


@pytest.mark.landing
@pytest.mark.parametrize("flags", ["--bf16 --zero-stage 1", "--tensor-model-parallel-size 2 --bf16"])
def test_a_run_on_gpus_that_has_read_is_the_run_that_has_not(flags: str) -> None:
    """The same bits and no races behind a reading in the process that trains: what it patches there is put back."""
    plain, read = (run_ranks(trained_on_gpus, 2, flags, reads=reads) for reads in (False, True))
    assert (
        [each[1:] for each in plain] == [each[1:] for each in read]
        and not plain[0][2]
        and float.fromhex(plain[0][1][0])
    )
    assert [each[0] for each in plain] == [False, False] and [each[0] for each in read] == [True, False]


def test_a_start_on_a_gpu_has_one_without_values_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gives it to what announces the run."""
    given = []

    def announces(*args: Any) -> PlannedRun:
        given.append(args[-1])
        raise ConfigError("seen")

    monkeypatch.setattr("megalite.train.run.announce", announces)
    config = parse([*BASE, "--global-batch-size", "2"], world_size=1)
    with pytest.raises(ConfigError, match="seen"):
        pretrain_gpt.train(config, World(0, 1, torch.device("cpu")))
    run = dataclasses.replace(planned(LARGER, 1), on_cpu=False)
    assert as_read(run, given[0]).kept == with_kept(run, unseen).kept
