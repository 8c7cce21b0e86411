"""The dynamic programme over layers and submeshes is as good as trying everything."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import StageMesh
from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.planner.cost import Roofline
from megalite.planner.hardware import load_cluster, load_hardware
from megalite.planner.inter_operator import Cost, StageCost, StagePlan, plan_stages
from megalite.planner.search import search
from megalite.planner.unlike_stages import DeviceClass, UnlikePlan, best_unlike
from plan_unlike import flags_of, unlike_lines

MESHES = [StageMesh(1, 1), StageMesh(1, 2), StageMesh(2, 1), StageMesh(1, 3), StageMesh(2, 2), StageMesh(1, 4)]


def everything(layers: int, devices: int) -> Iterator[list[tuple[int, int, StageMesh, int]]]:
    """All pipelines, by recursion."""

    def rest(begin: int, left: int) -> Iterator[list[tuple[int, int, StageMesh, int]]]:
        if begin == layers and left == 0:
            yield []
        for end in range(begin + 1, layers + 1):
            for mesh in MESHES:
                if mesh.size <= left:
                    for others in rest(end, left - mesh.size):
                        yield [(begin, end, mesh, left), *others]

    yield from rest(0, devices)


def bounded(work: list[float], weights: list[float], room: float, scale: float, m: int) -> Cost:
    """With memory for weights and for what is in flight, and a reduction."""

    def cost(begin: int, end: int, mesh: StageMesh, left: int) -> StageCost | None:
        held = sum(weights[begin:end]) / mesh.tp + 0.3 * (end - begin) * -(-left // mesh.size)
        if held > room:
            return None
        latency = sum(work[begin:end]) / mesh.tp**0.8
        reduce = sum(weights[begin:end]) / mesh.tp * (mesh.dp - 1) / mesh.dp
        return StageCost(scale * latency, scale * (latency / mesh.dp + reduce / m))

    return cost


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_it_is_as_good_as_trying_everything(scale: float) -> None:
    rng = random.Random(str(scale))
    for _ in range(70):
        layers, devices, m = rng.randint(1, 6), rng.randint(1, 6), rng.choice([1, 2, 7, 40])
        work = [rng.choice([1, 1, 2, 5, rng.random() * 9]) for _ in range(layers)]
        weights, room = [rng.random() * 4 for _ in range(layers)], rng.choice([3.0, 8.0, 1e9])
        endless = rng.random() < 0.3

        cost = bounded(work, weights, room, scale, m)
        best = None
        for stages in everything(layers, devices):
            costs = [cost(*stage) for stage in stages]
            if None in costs:
                continue
            fill = 0 if endless else sum(one.latency for one in costs)
            seconds = fill + (m - (not endless)) * max(one.pace for one in costs)
            best = seconds if best is None else min(best, seconds)
        found = plan_stages(layers, devices, MESHES, cost, m, asynchronous=endless)
        assert (found is None) == (best is None)
        if isinstance(found, StagePlan) and best is not None:
            assert found.seconds == pytest.approx(best, rel=1e-12)
            assert sum(stage.mesh.size for stage in found.stages) == devices


BASE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --global-batch-size 32 "
    "--vocab-size 8000 --bf16 --lr 1e-4 --train-iters 10 --mock-data --micro-batch-size 1"
)


def made(devices: list[int], names: list[str], more: str = "") -> UnlikePlan | None:
    config = parse([*BASE.split(), *more.split()], world_size=1, check_files=False)
    kinds = [load_hardware(name) for name in names]
    cluster = [DeviceClass(n, kind, Roofline(kind)) for n, kind in zip(devices, kinds, strict=True)]
    return best_unlike(config, cluster)


def test_what_is_planned_can_be_pasted_into_a_launch() -> None:
    found = made([6], ["a100-80gb"])
    assert found is not None and sum(stage.mesh.size for stage in found.stages.stages) == 6
    words = shlex.split(flags_of(found.config))
    flags = [word for word in BASE.split() if word not in ("--micro-batch-size", "1")]
    flags = flags[: flags.index("--global-batch-size")] + flags[flags.index("--global-batch-size") + 2 :]
    config = parse([*flags, *words], world_size=6, check_files=False)
    assert config.parallel.stage_meshes == found.config.parallel.stage_meshes


def test_where_it_helps_little_the_plan_says_so() -> None:
    """Eight devices of one kind: one stage is best. On six, what is said depends on what equal stages take."""
    config, kind = parse(BASE.split(), world_size=1, check_files=False), load_hardware("a100-80gb")
    for devices, factor, doubt in ((8, 1.0, True), (6, 1.1, False), (6, 1.03, True), (6, 0.5, True)):
        alike = search(config, devices, kind, Roofline(kind), top=1).predictions[0]
        alike = replace(alike, step_time=factor * alike.step_time)
        said = "\n".join(unlike_lines(alike, [DeviceClass(devices, kind, Roofline(kind))], False))
        assert ("plain replicas" in said) == doubt, said
        assert ("to run it, add: --stage-meshes" in said) == (devices == 6)


def test_a_stage_lies_on_devices_of_one_kind_and_the_faster_ones_get_more() -> None:
    found = made([2, 2], ["a100-80gb", "h100"])
    assert found is not None
    left, layers = [2, 2], [0, 0]
    for stage, kind in zip(found.stages.stages, found.kinds, strict=True):
        left[kind] -= stage.mesh.size
        layers[kind] += stage.end - stage.begin
    assert left == [0, 0] and layers[1] > layers[0]


def half_as_fast(devices: int, work: list[float], part: int | None = None) -> Cost:
    """The first half of the devices at half the speed, blocks that cannot be split; part: layers of every stage."""

    def cost(begin: int, end: int, mesh: StageMesh, left: int) -> StageCost | None:
        place = devices - left
        if place < devices // 2 < place + mesh.size or mesh.tp > 1 or (part and end - begin != part):
            return None
        latency = sum(work[begin:end]) * (2.0 if place < devices // 2 else 1.0)
        return StageCost(latency, latency / mesh.dp)

    return cost


def test_cuts_and_meshes_together_are_never_behind_either_alone() -> None:
    """A mixed cluster: of 60 small ones the exact optimum of each freedom."""
    rng, gains = random.Random(4), []
    for _ in range(60):
        layers, devices, m = rng.randint(2, 6), rng.choice([4, 6]), 24
        work = [rng.choice([1.0, 1.0, 2.0, 3.0]) for _ in range(layers)]
        both = plan_stages(layers, devices, MESHES, half_as_fast(devices, work), m)
        ways = [plan_stages(layers, devices, MESHES[:1], half_as_fast(devices, work), m)]
        for part in range(1, layers + 1):
            if layers % part == 0:
                ways.append(plan_stages(layers, devices, MESHES, half_as_fast(devices, work, part), m))
        alone = [way.seconds for way in ways if way is not None]
        assert both is not None and all(both.seconds <= seconds * (1 + 1e-12) for seconds in alone)
        gains += [min(alone) / both.seconds] if alone else []
    assert max(gains) > 1.1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("classes: [{hardware: h100, devices: 3}]", "its classes have 3 devices; use --num-devices 3"),
        ("classes: [h100]", "classes: expected a list of {hardware: NAME, devices: N}"),
        ("classes: [{hardware: h100, devices: 0}]", "classes: expected a list of {hardware: NAME, devices: N}"),
        ("classes: []", "classes: expected a list of {hardware: NAME, devices: N}"),
    ],
)
def test_bad_classes(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path), 4)
    assert said in str(caught.value)
