"""The axes of a grid: which ranks of the tensor axis exchange what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.comm import Axis, ParallelMesh


@dataclass(frozen=True)
class Grid:
    """X x Y x Z tensor-parallel ranks: rank x + X (y + Y z) of the tensor axis is (x, y, z).

    inner: X, cuts the inputs of column layers and the outputs of row layers.
    outer: Y, cuts the outputs of column layers and the inputs of row layers.
    tokens: Z, cuts the samples of a micro-batch; each weight is dealt out over it.
    columns: X and Y together, which cut the features of a token.
    ranks: all, in the order in which they hold the vocabulary; it has no group.
    """

    inner: Axis
    outer: Axis
    tokens: Axis
    columns: Axis
    ranks: Axis

    @classmethod
    def of(cls, mesh: ParallelMesh, shape: tuple[int, int, int]) -> Grid:
        """That of `shape` = (X, Y, Z) over the tensor axis. Collective at first use."""
        x, y, z = shape
        wide, size = x * y, x * y * z
        assert mesh.size("tp") == size, f"{mesh.size('tp')} tensor-parallel ranks are no grid of {shape}"

        def axis(name: str, starts: list[int], step: int, count: int) -> Axis:
            found = mesh.over(
                "tp", apart=f"grid_{name}", parts=lambda ranks: [ranks[i : i + step * count : step] for i in starts]
            )
            return replace(found, name="tp")

        inner = axis("inner", list(range(0, size, x)), 1, x)
        outer = axis("outer", [i + wide * k for k in range(z) for i in range(x)], x, y)
        tokens = axis("tokens", list(range(wide)), wide, z)
        columns = axis("columns", list(range(0, size, wide)), 1, wide)
        everyone = replace(mesh["tp"], rank=columns.rank * z + tokens.rank, group=None, shared=None)
        return cls(inner, outer, tokens, columns, everyone)

    def features(self, size: int) -> slice:
        """This rank's part of `size` features of the residual stream."""
        width = size // self.columns.size
        begin = width * (self.inner.rank * self.outer.size + self.outer.rank)
        return slice(begin, begin + width)
