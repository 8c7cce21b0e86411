"""Where a parameter lies: which rectangle of its logical tensor a rank holds, and what that means for its gradient."""

from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
NO_AXES: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ParameterPlacement:
    """The rectangle of one logical tensor that a rank's parameter holds, and how it is initialised and updated.

    Args:
        global_shape: shape of the logical tensor, without padding.
        offset: where the local rectangle begins. The local shape may reach past `global_shape` (vocabulary padding);
            what lies outside is zero, is never stored and never counted.
        sharded: names of the axes that cut the tensor (see `comm.mesh`). Along every other axis of a stage all ranks
            hold the same rectangle.
        partial: names of the axes along which each rank computes only its share of the gradient, so that the shares
            must be summed (norms under sequence parallelism, query/key norms of split heads).
        decay: whether weight decay applies (matrices and embeddings: yes; biases and norms: no).
        init_std: standard deviation of the normal initial values; None: constant `init_value`.
        family: see `families`.
    """

    global_shape: Shape
    offset: Shape
    sharded: frozenset[str] = NO_AXES
    partial: frozenset[str] = NO_AXES
    decay: bool = True
    init_std: float | None = None
    init_value: float = 0.0
    family: str = "dense"

    def valid_shape(self, local_shape: Shape) -> Shape:
        """The part of `local_shape` that lies inside the logical tensor (extents may be 0)."""
        return tuple(
            max(0, min(extent, total - start))
            for extent, total, start in zip(local_shape, self.global_shape, self.offset, strict=True)
        )


def placement_of(parameter: Any) -> ParameterPlacement:
    """The parameter's `.placement`. A parameter without one is whole on every rank, and decays if it is a matrix."""
    placement: ParameterPlacement | None = getattr(parameter, "placement", None)
    if placement is None:
        shape = tuple(parameter.shape)
        return ParameterPlacement(shape, (0,) * len(shape), decay=len(shape) > 1)
    return placement
