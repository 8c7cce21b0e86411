"""Families of parameters on axes of their own: counted, saved and stepped as plain torch does it in one process.

The model has a dense layer and a layer with stacked (3-D) matrices of experts; no layer of the product has them yet, so
gradients are given, in unequal shares, to the ranks that would compute them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.checkpoint import Checkpointer
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.gradient import sink_of
from megalite.inventory.families import AXIS_FAMILIES
from megalite.inventory.placement import Placement
from megalite.nn.norm import Norm
from megalite.parallel.zero import ShardedOptimizer, ZeroOptions, stage_buffers
from megalite.parallel.zero.reducer import GradientReducer
from megalite.testing import run_ranks, run_single
from megalite.train.run import open_run

STEPS, LR, DECAY = 3, 1e-2, 0.1


class Spec(NamedTuple):
    """cut: dimension -> the axis that cuts it. partial: the axis along which a rank computes a part of the gradient."""

    name: str
    shape: tuple[int, ...]
    family: str
    cut: dict[int, str]
    partial: str = ""


SPECS = [
    Spec("layers.0.fc.weight", (8, 6), "dense", {0: "tp"}),
    Spec("layers.0.norm.weight", (6,), "dense", {}, "tp"),
    Spec("layers.1.proj.weight", (6, 8), "dense", {1: "tp"}),
    Spec("layers.1.router.weight", (4, 6), "dense", {}),
    Spec("layers.1.experts.fc1", (4, 10, 6), "expert", {0: "ep", 1: "etp"}),
    Spec("layers.1.experts.fc2", (4, 6, 10), "expert", {0: "ep", 2: "etp"}),
    Spec("layers.1.experts.bias", (4, 6), "expert", {0: "ep"}, "etp"),
]


def whole(spec: Spec, draw: int) -> Tensor:
    seed = 100 * draw + SPECS.index(spec)
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def offset_and_shape(spec: Spec, mesh: ParallelMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = tuple(n // mesh.size(spec.cut[d]) if d in spec.cut else n for d, n in enumerate(spec.shape))
    return tuple(mesh.coordinate(spec.cut[d]) * n if d in spec.cut else 0 for d, n in enumerate(shape)), shape


def local(spec: Spec, values: Tensor, mesh: ParallelMesh) -> Tensor:
    for d, (begin, extent) in enumerate(zip(*offset_and_shape(spec, mesh), strict=True)):
        values = values.narrow(d, begin, extent)
    return values.clone()


def share(spec: Spec, mesh: ParallelMesh) -> float:
    """This rank's part of the gradient: 1, 2, 3 ... parts along the axes that the gradient is summed over."""
    family = AXIS_FAMILIES[spec.family]
    result = 1.0
    for name in [*family.shard, *family.replicate, *([spec.partial] if spec.partial else [])]:
        size = mesh.size(name)
        result *= (1 + mesh.coordinate(name)) / (size * (size + 1) / 2)
    return result


def make_parameters(mesh: ParallelMesh) -> list[tuple[str, nn.Parameter]]:
    named = []
    for spec in SPECS:
        if mesh.size("pp") > 1 and mesh.coordinate("pp") != int(spec.name.split(".")[1]):
            continue
        p = nn.Parameter(local(spec, whole(spec, 0), mesh))
        p.placement = Placement(  # type: ignore[attr-defined]
            spec.shape,
            offset_and_shape(spec, mesh)[0],
            frozenset(axis for axis in spec.cut.values() if mesh.size(axis) > 1),
            frozenset({spec.partial} if spec.partial and mesh.size(spec.partial) > 1 else ()),
            decay=len(spec.shape) > 1,
            family=spec.family,
        )
        named.append((spec.name, p))
    return named


class Case(NamedTuple):
    sizes: dict[str, int]
    stage: int
    load: str = ""
    save: str = ""
    steps: tuple[int, ...] = tuple(range(1, STEPS + 1))
    mutation: str = ""


Result = tuple[list[float], list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor, int]]]


def train(world: World, case: Case) -> Result:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, **case.sizes)
    parameters = make_parameters(mesh)
    families = {name: mesh.family(name) for name in AXIS_FAMILIES}
    buffers = stage_buffers([parameters], families, options=ZeroOptions(case.stage, overlap_grad_reduce=True))
    optimizer = ShardedOptimizer(
        buffers, make_optimizer=lambda groups: torch.optim.AdamW(groups, eps=1e-5, fused=True), norm_axis=mesh.world
    )
    if case.load:
        saver = Checkpointer(case.load, world=mesh.world)
        saver.load(saver.find(case.load), optimizer.shards())
        optimizer.after_load()
    norms = []
    for step in case.steps:
        for family in buffers:
            family.gradients.begin_batch(1)
        for name, p in reversed(parameters):
            (spec,) = [spec for spec in SPECS if spec.name == name]
            sink = sink_of(p)
            assert sink is not None
            sink.add(local(spec, whole(spec, step), mesh) * share(spec, mesh))
        for family in buffers:
            family.gradients.start_reduce()
        for family in buffers:
            family.gradients.finish_reduce()
        norms.append(float(optimizer.grad_norm()))
        optimizer.step(lr=LR, weight_decay=DECAY)
    if case.save:
        Checkpointer(case.save, world=mesh.world).save(1, optimizer.shards(), {})
    return norms, [(s.name, s.global_shape, s.offset, s.local.clone(), s.replica) for s in optimizer.shards()]


def oracle() -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch on whole tensors: the norm of each step, weights and moments after the last."""
    named = {spec.name: nn.Parameter(whole(spec, 0)) for spec in SPECS}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    rule = torch.optim.AdamW(groups, lr=LR, eps=1e-5)
    norms = []
    for step in range(1, STEPS + 1):
        for spec in SPECS:
            named[spec.name].grad = whole(spec, step)
        norms.append(math.sqrt(sum(float(whole(spec, step).square().sum()) for spec in SPECS)))
        rule.step()
    found = {name: p.detach() for name, p in named.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        found |= {f"optimizer/{moment}/{name}": rule.state[p][moment] for name, p in named.items()}
    return norms, found


def check(results: list[Result], steps: tuple[int, ...], what: object) -> None:
    """All ranks have the oracle's norms; their rectangles hold its values, each element with replica 0 once."""
    norms, tensors = oracle()
    written = {name: torch.zeros(values.shape) for name, values in tensors.items()}
    for found, shards in results:
        assert found == pytest.approx([norms[step - 1] for step in steps], rel=1e-13), what
        for name, shape, offset, values, replica in shards:
            if name == "optimizer/step":
                continue
            place = tuple(slice(begin, begin + n) for begin, n in zip(offset, values.shape, strict=True))
            assert shape == tensors[name].shape, (what, name)
            assert torch.allclose(values, tensors[name][place], rtol=1e-12, atol=1e-13), (what, name)
            written[name][place] += replica == 0
    for name, counts in written.items():
        assert torch.equal(counts, torch.ones_like(counts)), (what, f"{name} is not written exactly once")
    steps_written = sum(r == 0 for _, shards in results for name, *_, r in shards if name == "optimizer/step")
    assert steps_written == 1, what


LAYOUTS: list[dict[str, int]] = [
    {"ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "etp": 1},
    {"ep": 2, "etp": 2},
    {"cp": 2, "ep": 4},
    {"cp": 2, "tp": 2},
    {"pp": 2, "ep": 2},  # the first stage has no experts
    {"tp": 2, "pp": 2},
    {"ep": 2, "dp_replicate": 2},
]


def body_cases(world: World, cases: list[Case]) -> list[Result]:
    return [train(world, case) for case in cases]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_families_train_as_one_process_does(sizes: dict[str, int]) -> None:
    cases = [Case(sizes, stage) for stage in range(4)]
    by_rank = run_ranks(body_cases, 4, cases)
    for case, *results in zip(cases, *by_rank, strict=True):
        check(results, case.steps, case)


def test_a_checkpoint_of_families_goes_on_in_any_layout(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "abc"]
    chain = [
        (4, Case({"ep": 2, "etp": 2}, 2, save=folders[0], steps=(1,))),
        (4, Case({"tp": 2, "ep": 4, "etp": 1}, 3, load=folders[0], save=folders[1], steps=(2,))),
        (2, Case({"ep": 2}, 1, load=folders[1], save=folders[2], steps=())),
    ]
    for size, case in chain:
        run_ranks(body_cases, size, [case])
    (result,) = run_single(body_cases, [Case({}, 0, load=folders[2], steps=(3,))])
    check([result], (3,), "the end of the chain")


# ---- each way to be wrong is seen ------------------------------------------------------------------------------------


def every_copy_is_the_first() -> AbstractContextManager[Any]:
    return patch("megalite.parallel.zero.sharded_optimizer.replica_of", lambda *_, **__: 0)


def copies_are_counted() -> AbstractContextManager[Any]:
    return patch.object(ShardedOptimizer, "_counts", lambda self, segment: True)


def shares_are_not_summed() -> AbstractContextManager[Any]:
    return patch.object(GradientReducer, "_sum_partial_gradients", lambda self: None)


def experts_are_reduced_like_the_rest() -> AbstractContextManager[Any]:
    right = ParallelMesh.family

    def wrong(self: ParallelMesh, name: str = "dense") -> Any:
        return replace(right(self, name), shard=right(self).shard, replicate=right(self).replicate)

    return patch.object(ParallelMesh, "family", wrong)


def nothing() -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


MUTATIONS: list[Callable[[], AbstractContextManager[Any]]] = [
    every_copy_is_the_first,
    copies_are_counted,
    shares_are_not_summed,
    experts_are_reduced_like_the_rest,
]


def body_mutated(world: World, names: list[str]) -> list[Result]:
    results = []
    for name in names:
        (mutation,) = [m for m in [*MUTATIONS, nothing] if m.__name__ == name]
        with mutation():
            results.append(train(world, Case({"tp": 2, "ep": 2, "etp": 2, "dp_replicate": 1}, 0)))
    return results


def test_each_way_to_be_wrong_is_seen() -> None:
    names = [m.__name__ for m in [nothing, *MUTATIONS]]
    right, *wrong = zip(*run_ranks(body_mutated, 8, names), strict=True)
    check(list(right), (1, 2, 3), "without a mutation")
    for name, results in zip(names[1:], wrong, strict=True):
        with pytest.raises(AssertionError):
            check(list(results), (1, 2, 3), name)


# ---- fp32 inside bf16 ------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A bf16 matrix and an fp32 gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.gate = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(F.linear(x.float(), self.gate.weight))
        return x + (torch.tanh(self.linear(x)) * gate).to(x.dtype)


def gated_layers() -> tuple[list[Gated], list[tuple[str, nn.Parameter]]]:
    torch.manual_seed(0)
    layers = [Gated(16) for _ in range(3)]
    return layers, [(f"layers.{i}.{n}", p) for i, layer in enumerate(layers) for n, p in layer.named_parameters()]


def gated_loss(layers: list[Gated], step: int, sample: int) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + sample)).bfloat16()
    for layer in layers:
        x = layer(x)
    return x.float().square().mean()


def body_gated(world: World, options: list[ZeroOptions]) -> list[tuple[list[float], dict[str, Tensor], list[str]]]:
    """For each of the options norms, masters, and the dtypes of the families in their order."""
    found = []
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    for option in options:
        layers, named = gated_layers()
        buffers = stage_buffers([named], {"dense": mesh.family()}, options=option)
        buffers[0].weights.attach(layers, *(family.weights for family in buffers[1:]))
        optimizer = ShardedOptimizer(
            buffers, make_optimizer=lambda g: torch.optim.AdamW(g, eps=1e-5, fused=True), norm_axis=mesh.world
        )
        norms = []
        for step in range(3):
            for family in buffers:
                family.gradients.begin_batch(2 // world.size)
            for sample in range(world.rank, 2, world.size):
                gated_loss(layers, step, sample).backward()
            for family in buffers:
                family.gradients.start_reduce()
            for family in buffers:
                family.gradients.finish_reduce()
            norms.append(float(optimizer.grad_norm()))
            optimizer.step(lr=LR, weight_decay=DECAY)
        masters = {name: torch.full(p.shape, math.nan) for name, p in named}
        for shard in optimizer.shards():
            if shard.name in masters:
                place = tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.local.shape, strict=True))
                masters[shard.name][place] = shard.local
        for family in buffers:
            family.weights.unshard()
        for name, p in named:  # what computes is the master, in the family's own precision
            kept = ~masters[name].isnan()
            assert torch.equal(p.detach()[kept], masters[name].to(p.dtype)[kept]), name
        found.append((norms, masters, [str(family.dtype) for family in buffers]))
    return found


def gated_oracle() -> tuple[list[float], dict[str, Tensor]]:
    layers, named = gated_layers()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in named}
    rule = torch.optim.AdamW(masters.values(), lr=LR, eps=1e-5, weight_decay=DECAY)
    norms = []
    for step in range(3):
        total = {name: torch.zeros(p.shape) for name, p in named}
        for sample in range(2):
            for _, p in named:
                p.grad = None
            gated_loss(layers, step, sample).backward()
            for name, p in named:
                assert p.grad is not None
                total[name] += p.grad.float()
        for name, p in masters.items():
            p.grad = total[name]
        norms.append(float(torch.nn.utils.get_total_norm(total.values())))
        rule.step()
        with torch.no_grad():
            for name, p in named:
                p.copy_(masters[name])
    return norms, {name: p.detach() for name, p in masters.items()}


def test_fp32_parameters_inside_a_bf16_stage_keep_their_precision_at_every_zero_stage() -> None:
    options = [ZeroOptions(stage, overlap, overlap) for stage in range(4) for overlap in (False, True)]
    want_norms, want = gated_oracle()
    for world_size in (1, 2):
        by_rank = run_ranks(body_gated, 2, options) if world_size == 2 else [run_single(body_gated, options)]
        for option, *results in zip(options, *by_rank, strict=True):
            covered = {name: torch.zeros_like(values) for name, values in want.items()}
            for norms, masters, dtypes in results:
                assert dtypes == ["torch.bfloat16", "torch.float32"]
                assert norms == pytest.approx(want_norms, rel=1e-4), option
                for name, values in masters.items():
                    known = ~values.isnan()
                    covered[name] += known
                    assert torch.allclose(values[known], want[name][known], rtol=1e-4, atol=1e-5), (option, name)
            assert all(bool((counts > 0).all()) for counts in covered.values())


RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 4 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-2 --clip-grad 0 --bf16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 61 --eval-iters 0 --num-workers 0 --untie-embeddings-and-output-weights --no-exit-signal-handler"
).split()


def body_run(world: World, flags: list[str]) -> tuple[list[float], list[tuple[str, int]]]:
    """Losses of a run whose norms are kept in fp32, and (dtype, number of parameters) of its families."""
    make, compute = Norm.__init__, Norm.forward

    def in_fp32(self: Norm, size: int, config: Any, ctx: Any, **more: Any) -> None:
        make(self, size, config, replace(ctx, dtype=torch.float32), **more)

    with (
        patch.object(Norm, "__init__", in_fp32),
        patch.object(Norm, "forward", lambda self, x: compute(self, x).to(x.dtype)),
        open_run(parse([*RUN, *flags], world_size=world.size), world) as run,
    ):
        losses = [float(run.trainer.train_step(drain=step == 2).lm_loss) for step in range(3)]
        families = run.state.model.optimizer.buffers
        return losses, [(str(f.dtype), sum(len(plan.slots) for plan in f.plans)) for f in families]


def test_a_run_with_norms_in_fp32_is_the_same_at_every_layout() -> None:
    losses, families = run_single(body_run, [])
    assert families == [("torch.bfloat16", 4 * 8 + 3), ("torch.float32", 4 * 4 + 2)]
    pipeline = ["--pipeline-model-parallel-size", "2"]
    for flags in (pipeline, ["--zero-stage", "1"], ["--zero-stage", "3"]):
        for found, held in run_ranks(body_run, 2, flags):
            assert found == losses, flags
            assert [dtype for dtype, _ in held] == ["torch.bfloat16", "torch.float32"]
    for found, _ in run_ranks(body_run, 2, [*pipeline, "--pipeline-schedule", "2bw"]):
        assert found[0] == losses[0] and all(map(math.isfinite, found))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --zero-stage 2"),
        (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --zero-stage 3"),
        (4, "--pipeline-model-parallel-size 2 --pipeline-schedule chimera --zero-stage 1"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
        (2, "--zero-stage 1 --store-param-remainders"),
        (2, "--zero-stage 1 --optimizer-cpu-offload"),
        (2, "--zero-stage 1 --optimizer adafactor"),
        (2, "--zero-stage 1 --optimizer muon"),
    ],
)
def test_families_get_along_with_everything_else(world_size: int, flags: str) -> None:
    argv = [*flags.split(), "--micro-batch-size", "1", "--global-batch-size", "8"]
    optimizer = argv[argv.index("--optimizer") :][:2] if "--optimizer" in argv else []
    want, _ = run_single(body_run, [*argv[-4:], *optimizer])
    for found, _ in run_ranks(body_run, world_size, argv):
        assert found == pytest.approx(want, rel=1e-3)
