"""What the ranks of a grid send one another for a layer (`parallel.grid`), in numbers; no torch."""

from collections.abc import Iterator
from typing import NamedTuple

from megalite.config import GridShape
from megalite.inventory.layers import Layer


class Exchange(NamedTuple):
    """Gathers, or sums that leave each rank its part: of `ranks` ranks, `stride` apart, each sends (ranks - 1) / ranks
    of `numel`.

    forward, backward: how many times. wide: in the dtype of main gradients.
    """

    ranks: int
    stride: int
    numel: float
    forward: int
    backward: int
    wide: bool = False

    @property
    def sent(self) -> float:
        """Numbers that a rank sends, forward and backward."""
        return (self.forward + self.backward) * self.numel * (self.ranks - 1) / self.ranks


def grid_exchanges(layer: Layer, shape: GridShape, tokens: float, *, again: bool = True) -> Iterator[Exchange]:
    """Those of a layer and a micro-batch of so many tokens. A grid of 1 x t x 1 is sequence parallelism over t ranks.

    again: inputs of products are gathered again in the backward; False: they are kept, as AxoNN does, whose all-reduces
    move as much as a gather and a sum.
    """
    x, y, z = shape
    wide, own, model = x * y, tokens / z, layer.model
    inner, outer, columns, rows = (x, 1), (y, x), (wide, 1), (z, wide)
    if not layer.is_block:  # both ends: the vocabulary's part of all tokens of a rank, and the residual stream
        vocabulary = model.padded_vocab_size(wide * z) * model.hidden_size / wide
        yield Exchange(*rows, vocabulary, 1, 1)
        yield Exchange(*columns, own * model.hidden_size, 1, 1)
        if layer.kind == "head":  # features for tokens
            yield Exchange(*columns, own * model.hidden_size / wide, 1, 1)
        return
    for product in (product for product in layer.products if not product.core):
        out, summed = (outer, inner) if product.cut == "n" else (inner, outer)
        weight = product.n * product.k / wide
        yield Exchange(*out, own * product.k / summed[0], 1, 1 + again)
        yield Exchange(*summed, own * product.n / out[0], 1, 1)
        yield Exchange(*rows, weight, 1, 1)
        yield Exchange(*rows, weight, 0, 1, wide=True)
    biases = sum(p.numel for p in layer.parameters if p.name.endswith(".bias") and "norm" not in p.name)
    yield Exchange(*rows, biases / wide, 1, 1)
    norms = sum("norm.weight" in p.name and p.shape == (model.hidden_size,) for p in layer.parameters)
    if model.normalization == "LayerNorm":
        yield Exchange(*columns, 2 * norms * own * wide, 1, 0, wide=True)
        yield Exchange(*columns, 2 * norms * own, 0, 2, wide=True)
    else:
        yield Exchange(*columns, norms * own, 2, 2, wide=True)


def moved_by_a_block(layer: Layer, shape: GridShape, replicas: int, tokens: float, *, again: bool = True) -> float:
    """Numbers that a rank sends in a step of a block on `replicas` such grids, with the sum of its gradients.

    tokens: of a replica.
    """
    x, y, z = shape
    gradients = sum(p.numel for p in layer.parameters) / (x * y * z)
    return sum(each.sent for each in grid_exchanges(layer, shape, tokens, again=again)) + (
        2 * (replicas - 1) / replicas * gradients
    )
