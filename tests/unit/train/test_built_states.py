"""What is read from ranks on `meta`, beside the closed forms of the planner, and beside ranks that have memory."""

from __future__ import annotations

import dataclasses
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from equivalence import own_models
from equivalence.layouts import TINY, draw

from megalite.comm import Axis, ContextAxes, ParallelMesh
from megalite.config import OPTIMIZER_SPECS, Config
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.inventory import MemoryPlan, first_alike
from megalite.parallel.tiers import MetaMover
from megalite.planner import StateBytes, within_budget
from megalite.planner.memory import pipeline_memory
from megalite.train.build import build_model
from megalite.train.built_states import build_on_meta, held_at, with_held
from megalite.train.foreign import ForeignModel
from megalite.train.planned import PlannedRun
from megalite.train.programs import ProgramCache
from tests.held_bytes import held_bytes

BASE = (
    "--num-layers 4 --hidden-size 40 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 --make-vocab-size-divisible-by 8"
).split()
HELD = ("weights", "gradients", "master", "moments", "host", "file")
RULES = [
    "",
    "--bf16",
    "--fp64",
    "--bf16 --grad-reduce-in-bf16",
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--optimizer sgd --bf16",
    "--optimizer lion --exp-avg-dtype bf16 --bf16",
    "--optimizer muon",
    "--optimizer muon --hidden-size 36",
    "--optimizer muon --bf16 --swiglu",
    "--optimizer soap --soap-max-precond-dim 100",
    "--optimizer shampoo --bf16",
    "--optimizer kfac --model-type llama",
    "--optimizer adafactor --bf16",
    "--bf16 --store-param-remainders",
    "--optimizer muon --bf16 --ema-decay 0.9",
]
TIERS = ("", "--offload optimizer", "--offload optimizer,params", "--optimizer-offload-path .")


def config_of(flags: str, world: int) -> Config:
    return parse([*BASE, *flags.split()], world_size=world)


def same(run: PlannedRun, case: object = "") -> PlannedRun:
    """Asserts that every rank holds what the closed forms say, to the byte. Returns the run with what was read."""
    built = with_held(run)
    assert built.held is not None, case
    for closed, read in zip(pipeline_memory(run), pipeline_memory(built), strict=True):
        assert {name: getattr(closed, name) for name in closed.by_term()} == {
            name: getattr(read, name) for name in read.by_term()
        }, case
        assert (closed.host, closed.file) == (read.host, read.file), case
    return built


@pytest.mark.in_turn
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_stage_version_and_place(rule: str) -> None:
    """Optimizers x ZeRO x weight versions x tiers, for ranks on CPUs and on GPUs."""
    seen = 0
    for stage, versions, tier, on_cpu in product(range(4), (1, 2), TIERS, (True, False)):
        late = " --pipeline-schedule 2bw" * (versions - 1)
        try:
            config = config_of(f"{rule} {tier} --zero-stage {stage} --ddp-bucket-size 10000{late}", 4)
        except ConfigError:  # a combination that no run may have
            continue
        run = PlannedRun.of(config, 4, on_cpu=on_cpu)
        same(run, (stage, versions, tier, on_cpu))
        seen += 1
        if tier == TIERS[3]:  # a part of the states is away, a part of that in a file
            plan = MemoryPlan(run.plan.recompute, 0.4, 0.2)
            same(dataclasses.replace(run, plan=plan), (stage, versions, "0.4, 0.2 in a file", on_cpu))
    assert seen >= 8


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("--tensor-model-parallel-size 2 --bf16 --zero-stage 2", 8),
        ("--tensor-parallel-mode 4d --tensor-parallel-grid 2,2,1 --tensor-model-parallel-size 4", 8),
        ("--context-parallel-size 2 --optimizer soap --zero-stage 1", 4),
        ("--num-experts 4 --expert-model-parallel-size 2 --bf16 --zero-stage 3", 8),
        ("--num-experts 4 --moe-router score_function=sigmoid --zero-stage 3 --fp64", 4),
        ("--num-experts 4 --offload optimizer,params --zero-stage 3", 4),
        (
            "--pipeline-model-parallel-size 4 --pipeline-schedule 2bw --staleness-correction predict "
            "--global-batch-size 8",
            8,
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule pipedream --clip-grad 0 "
            "--untie-embeddings-and-output-weights",
            2,
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule chimera --global-batch-size 8 --zero-stage 1", 4),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4", 2),
        ("--stage-meshes 1x2,2x1 --global-batch-size 4", 4),
        ("--lora rank=2 --load . --finetune --bf16 --zero-stage 3", 2),
        ("--lora rank=2 int8=true --load . --finetune --bf16 --tensor-model-parallel-size 2", 2),
        ("--lora rank=2 int8=true --load . --finetune --pipeline-model-parallel-size 2 --global-batch-size 4", 2),
        ("--untie-embeddings-and-output-weights --embedding-offload cpu --tensor-model-parallel-size 2 --bf16", 4),
        (
            "--untie-embeddings-and-output-weights --embedding-offload cpu --pipeline-model-parallel-size 2 "
            "--global-batch-size 4 --optimizer lion",
            2,
        ),
        ("--fp8-format hybrid --fp8-recipe delayed --bf16", 1),
        ("--num-distributed-optimizer-instances 2 --zero-stage 1 --bf16", 8),
        ("--zero-hpz-partition-size 2 --zero-stage 3 --bf16", 8),
    ],
)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_layouts(flags: str, world: int, on_cpu: bool) -> None:
    same(PlannedRun.of(config_of(flags, world), world, on_cpu=on_cpu))


def test_owners_of_two_families_of_whole_matrices() -> None:
    """The fullest owner of the one may not be that of the other: the closed forms take the fullest of each."""
    config = config_of("--optimizer muon --zero-stage 2 --num-experts 4 --expert-model-parallel-size 2", 4)
    run = PlannedRun.of(config, 4, on_cpu=True)
    closed, read = pipeline_memory(run)[0], pipeline_memory(with_held(run))[0]
    assert read.model_states == pytest.approx(closed.model_states, rel=0.01)


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(40))
def test_drawn_layouts(seed: int) -> None:
    """Of owners of whole matrices the closed forms add up the fullest of each family and stage: at most a little more
    than any rank has."""
    case = draw(random.Random(seed))
    config = parse([*TINY, *case.model, *case.layout], world_size=case.world_size)
    owners = OPTIMIZER_SPECS[config.optimizer.optimizer].whole is not None and config.parallel.zero_stage
    for on_cpu in (True, False):
        plan = within_budget(config, case.world_size, on_cpu=on_cpu)
        run = PlannedRun.of(config, case.world_size, on_cpu=on_cpu, plan=plan)
        for closed, read in zip(pipeline_memory(run), pipeline_memory(with_held(run)), strict=True):
            pairs = {name: (getattr(closed, name), getattr(read, name)) for name in HELD}
            said, true = (sum(pair[k] for pair in pairs.values()) for k in (0, 1))
            same = 0.75 * said <= true <= 1.05 * said if owners else all(a == b for a, b in pairs.values())
            assert same, f"{pairs}\nreplay: {case.command} --dry-run"


def test_what_a_search_takes_on_trust_a_rank_denies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the closed forms, as far as they say what is held, is in no table of a dry run."""
    run = PlannedRun.of(config_of("--bf16 --zero-stage 1", 4), 4, on_cpu=True)
    true = pipeline_memory(with_held(run))
    wrong = StateBytes(weights=1, gradients=2, master=3, moments=4)
    monkeypatch.setattr("megalite.planner.memory.state_bytes", lambda *_, **__: wrong)
    assert pipeline_memory(run)[0].weights == 1
    assert [each.by_term() for each in pipeline_memory(with_held(run))] == [each.by_term() for each in true]


@pytest.mark.parametrize("flags", ["--bf16", "--zero-stage 3", "--optimizer muon --bf16", "--optimizer adafactor"])
def test_a_rank_with_memory_holds_the_same(flags: str) -> None:
    config = config_of(flags, 1)
    run = PlannedRun.of(config, 1, on_cpu=True)
    model = build_model(config, run, ParallelMesh.single(), torch.device("cpu"))
    [buffers] = model.families
    for bucket in buffers.buckets:
        _ = bucket.gradient.reduced  # in stage 3 as in a step
    found, memory, read = held_bytes(buffers), model.optimizer.memory(), held_at(run, 0)
    assert (read.weights, read.gradients) == (found["weights"], found["gradients"])
    assert (read.master, read.moments) == (memory["master"], memory["state"])


def test_of_owners_of_whole_matrices_the_fullest_is_read() -> None:
    config = config_of("--optimizer muon --zero-stage 1 --bf16 --num-layers 3", 5)
    run = PlannedRun.of(config, 5, on_cpu=True)
    built = same(run)
    assert built.held is not None
    total = built.held[0].master // 4
    numbers = {owner: _masters(run, owner) for owner in range(5)}
    assert total == max(numbers.values()) and len(set(numbers.values())) > 1


def _masters(run: PlannedRun, owner: int) -> int:
    return sum(shard.tensor.numel() for shard in build_on_meta(run, owner).optimizer.masters)


def test_stages_alike_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("--pipeline-model-parallel-size 4 --num-layers 16 --global-batch-size 4", 4)
    run, built = PlannedRun.of(config, 4, on_cpu=True), []
    monkeypatch.setattr(
        "megalite.train.built_states.held_at", lambda run, rank: built.append(rank) or StateBytes(weights=rank)
    )
    held = with_held(run).held
    assert held is not None
    kinds = [first_alike(config.model, cut) for cut in run.cuts]
    assert len(built) == len(set(kinds)) == 3 and held[1] == held[2]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_a_module_of_the_users_own(zero: int, rule: str) -> None:
    flags = (
        f"--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --mock-data --vocab-size 32 "
        f"--lr 1e-3 --optimizer {rule} --zero-stage {zero} --model-module {Path(own_models.__file__)}:untied"
    )
    config = parse(flags.split(), world_size=4)
    program = ProgramCache(config).full(4)
    device = torch.device("meta")
    foreign = ForeignModel(config, Axis.single("tp"), program, device, torch.float32, ContextAxes(), probe=False)
    run = PlannedRun.before(config, 4, program, MemoryPlan(), foreign, on_cpu=True)
    read = with_held(run)
    assert read.held is not None
    for name in HELD:
        assert getattr(run.memory[0], name) == getattr(read.memory[0], name), name


def test_nothing_is_allocated_on_the_host() -> None:
    """Half a trillion parameters whose masters are there."""
    config = config_of("--bf16 --optimizer-cpu-offload --num-layers 96 --hidden-size 20480 --num-attention-heads 4", 1)
    [held] = with_held(PlannedRun.of(config, 1, on_cpu=False)).held or ()
    assert held.host > 5e12


def test_the_mover_of_ranks_on_meta_knows_what_is_the_hosts() -> None:
    mover = MetaMover(on_cpu=False)
    home, here = mover.empty([3], torch.float32), torch.empty(3, device="meta")
    assert mover.on_host(home[1:]) and not mover.on_host(here)
    mover.to_device([(here, home)]).wait()
    assert mover.apart and not MetaMover(on_cpu=True).apart
