"""`--stage-meshes`: a mesh of its own for each pipeline stage, as text and as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

_MESH = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
_TRIED = 20_000
"""Lists of meshes that are looked at for advice."""


class StageMesh(NamedTuple):
    """Ranks of one stage: those that share each layer, times replicas, which take micro-batches in turn."""

    tp: int
    dp: int

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"{self.tp}x{self.dp}"


@cache
def parse_meshes(text: str) -> tuple[StageMesh, ...]:
    """`4x1,2x2` -> tp and replicas of each stage. Raises ValueError with what is wrong."""
    found = []
    for word in text.split(","):
        match = _MESH.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"'{word.strip()}' is not TPxREPLICAS, two numbers from 1 on; write it like 4x1,2x2")
        found.append(StageMesh(int(match[1]), int(match[2])))
    return tuple(found)


def shown(meshes: Sequence[StageMesh]) -> str:
    return ",".join(map(str, meshes))


def nearest_meshes(
    meshes: Sequence[StageMesh], world_size: int, microbatches: Sequence[int], tensor_sizes: Sequence[int]
) -> list[str]:
    """At most three lists of meshes of `world_size` ranks, those with the fewest changes first.

    microbatches: of the batches that occur, which replicas have to divide. tensor_sizes: that the model allows.
    """

    def near(mesh: StageMesh) -> list[tuple[int, StageMesh]]:
        sizes = [tp for tp in tensor_sizes if tp <= world_size]
        replicas = [d for d in range(1, world_size + 1) if all(m % d == 0 for m in microbatches)]
        options = [StageMesh(tp, dp) for tp in sizes for dp in replicas if tp * dp < world_size + (len(meshes) == 1)]
        ranked = sorted((abs(new.dp - mesh.dp) + 2 * abs(new.tp - mesh.tp), new) for new in options)
        return ranked[: max(2, int(_TRIED ** (1 / len(meshes))))]

    found: list[tuple[int, str]] = []
    for number, choice in enumerate(product(*(near(mesh) for mesh in meshes))):
        if number >= _TRIED:
            break
        if sum(mesh.size for _, mesh in choice) == world_size:
            found.append((sum(cost for cost, _ in choice), shown([mesh for _, mesh in choice])))
    return [text for _, text in sorted(found)[:3]]


def as_stage_mesh(line: str, stage: int, mesh: StageMesh, given: str) -> str:
    """A problem of one stage's sizes, which names a flag, in the words of `--stage-meshes`."""
    name = f"`tensor_model_parallel_size`={mesh.tp}"
    return f"`stage_meshes`={given}: " + line.replace(name, f"tp {mesh.tp} of stage {stage}")


def unlike(meshes: Sequence[StageMesh]) -> bool:
    """Whether stages differ."""
    return len(set(meshes)) > 1


def stages_by_tp(meshes: Sequence[StageMesh]) -> Iterator[tuple[int, StageMesh]]:
    """The first stage of each tensor-parallel size."""
    seen: set[int] = set()
    for stage, mesh in enumerate(meshes):
        if mesh.tp not in seen:
            seen.add(mesh.tp)
            yield stage, mesh
