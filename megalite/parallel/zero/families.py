"""A stage's parameters, family by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.comm import FamilyAxes
from megalite.inventory import AXIS_FAMILIES, placement_of
from megalite.parallel.zero.options import ZeroOptions
from megalite.parallel.zero.parameter_buffers import NamedParameters, ParameterBuffers
from megalite.parallel.zero.reducer import ReductionOrder


def stage_buffers(
    versions: Sequence[NamedParameters],
    families: Mapping[str, FamilyAxes],
    *,
    options: ZeroOptions,
    beside: Sequence[ParameterBuffers] = (),
    **more: Any,
) -> list[ParameterBuffers]:
    """One `ParameterBuffers` for each family and dtype of a stage, in the same order on every rank: that of the table
    of families, narrow dtypes first.

    versions: for each weight version the (logical name, parameter) in forward order.
    beside: the buffers of this rank's other stages.
    more: as in `ParameterBuffers`.
    """
    grouped: dict[tuple[int, int, str], list[list[Any]]] = {}
    order = list(AXIS_FAMILIES)
    for number, version in enumerate(versions):
        for name, parameter in version:
            family = placement_of(parameter).family
            key = (order.index(family), parameter.dtype.itemsize, family)
            grouped.setdefault(key, [[] for _ in versions])[number].append((name, parameter))
    made: list[ParameterBuffers] = []
    orders = {name: ReductionOrder(options) for name in families}
    for (_, _, family), own in sorted(grouped.items(), key=lambda item: item[0]):
        settings = {**more, "beside": [*beside, *made], "order": orders[family]}
        made.append(ParameterBuffers(own, axes=families[family], options=options, **settings))
    return made
