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
from torch import Tensor, nn

from megalite.checkpoint import Checkpointer, resolve_checkpoint
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.gradient import sink_of
from megalite.inventory.families import AXIS_FAMILIES
from megalite.inventory.parameter_placement import ParameterPlacement
from megalite.parallel.zero import ShardedOptimizer, ZeroOptions, stage_buffers
from megalite.parallel.zero.reducer import GradientReducer
from megalite.testing import run_ranks, run_single

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
        p.placement = ParameterPlacement(  # type: ignore[attr-defined]
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
        saver.load(resolve_checkpoint(case.load), optimizer.shards())
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


@pytest.mark.in_turn
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
