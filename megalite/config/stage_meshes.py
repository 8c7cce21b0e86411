"""`--stage-meshes`: a mesh of its own for each pipeline stage, as text and as numbers."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import islice, product
from typing import NamedTuple

from megalite.errors import ConfigError

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
    """`4x1,2x2` -> tp and replicas of each stage. Raises ConfigError."""
    found = []
    for word in text.split(","):
        match = _MESH.fullmatch(word.strip())
        if match is None:
            bad = f"'{word.strip()}' is not TPxREPLICAS, two numbers from 1 on; write it like 4x1,2x2"
            raise ConfigError(f"`stage_meshes`={text}: {bad}")
        found.append(StageMesh(int(match[1]), int(match[2])))
    return tuple(found)


def nearest_meshes(
    meshes: Sequence[StageMesh], world_size: int, microbatches: Sequence[int], tensor_sizes: Sequence[int]
) -> list[str]:
    """At most three lists of meshes of `world_size` ranks, those with the fewest changes first.

    microbatches: of the batches that occur, which replicas have to divide. tensor_sizes: that the model allows.
    """

    def near(mesh: StageMesh) -> list[tuple[int, StageMesh]]:
        replicas = [d for d in range(1, world_size + 1) if all(m % d == 0 for m in microbatches)]
        options = [StageMesh(tp, dp) for tp in tensor_sizes for dp in replicas if tp * dp <= world_size]
        ranked = sorted((abs(new.dp - mesh.dp) + 2 * abs(new.tp - mesh.tp), new) for new in options)
        return ranked[: max(2, int(_TRIED ** (1 / len(meshes))))]

    choices = islice(product(*map(near, meshes)), _TRIED)
    legal = (zip(*choice, strict=True) for choice in choices if sum(mesh.size for _, mesh in choice) == world_size)
    return [text for _, text in sorted((sum(costs), ",".join(map(str, found))) for costs, found in legal)[:3]]


def stage_sizes(text: str) -> dict[str, int]:
    """The sizes that meshes say, by name: alike, they are another spelling of two. Raises ConfigError."""
    meshes = parse_meshes(text)
    tensor = {"tensor_model_parallel_size": meshes[0].tp} if len(set(meshes)) == 1 else {}
    return {"pipeline_model_parallel_size": len(meshes), **tensor}
