"""A stage's parameters, family by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalite.comm import FamilyAxes
from megalite.inventory import AXIS_FAMILIES, placement_of
from megalite.parallel.zero.bucket import overlaps
from megalite.parallel.zero.frozen import share_frozen
from megalite.parallel.zero.options import StageOptions, ZeroOptions
from megalite.parallel.zero.parameter_buffers import NamedParameters, ParameterBuffers
from megalite.parallel.zero.rank_memory import RankMemory
from megalite.parallel.zero.reducer import ReductionOrder


def stage_buffers(
    versions: Sequence[NamedParameters],
    families: Mapping[str, FamilyAxes],
    *,
    options: ZeroOptions,
    pipeline_stage: StageOptions | None = None,
    memory: RankMemory | None = None,
) -> list[ParameterBuffers]:
    """One `ParameterBuffers` for each family and dtype of a stage, in the same order on every rank: that of the table
    of families, narrow dtypes first; those that require no gradient apart.

    versions: for each weight version the (logical name, parameter) in forward order.
    memory: of the rank, shared by all its stages (None: this is the only one).
    """
    grouped: dict[tuple[int, int, str, bool], list[list[Any]]] = {}
    order = list(AXIS_FAMILIES)
    for number, version in enumerate(versions):
        for name, parameter in version:
            family = placement_of(parameter).family
            key = (order.index(family), parameter.dtype.itemsize, family, not parameter.requires_grad)
            grouped.setdefault(key, [[] for _ in versions])[number].append((name, parameter))
            memory = memory or RankMemory(parameter.device, options)
    made: list[ParameterBuffers] = []
    orders = {name: ReductionOrder(options) for name in families}
    for (_, _, family, frozen), own in sorted(grouped.items(), key=lambda item: item[0]):
        shared = replace(options, stage=0) if frozen and options.stage < 3 else options  # nothing but weights to share
        made.append(
            ParameterBuffers(
                own[:1] if frozen else own,
                axes=families[family],
                options=shared,
                pipeline_stage=pipeline_stage,
                memory=memory,
                order=orders[family],
                frozen=frozen,
            )
        )
        if frozen:
            share_frozen(made[-1], own[1:])
    return made


def where_not_finite(families: Sequence[ParameterBuffers], *, overwritten: bool) -> str:
    """Which of this rank's reduced gradients are not, as text. overwritten: they are those of another batch by now."""
    if overwritten:
        return "of which tensor is not known: its gradients have been overwritten since"
    found = []
    for bucket in (bucket for family in families for bucket in family.buckets):
        for range_, _, own in overlaps(bucket.plan.ranges, bucket.owned_start, bucket.owned_stop):
            if not bool(bucket.gradient.reduced[own].isfinite().all()):
                found.append((range_.entry.index, range_.entry.name))
    if not found:
        return "from gradients of other ranks"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"here in the gradient of {min(found)[1]}{more}"
