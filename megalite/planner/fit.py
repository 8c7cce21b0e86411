"""What cannot fit: by how much, on which term, and the smallest change that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.config import Config
from megalite.planner.cost import TimeSource
from megalite.planner.hardware import Hardware
from megalite.planner.memory import TERMS
from megalite.planner.search import Misfit, Quick, search
from megalite.planner.space import SEARCHED, Layout, apply, layout_of, layouts, reasons_against

__all__ = ["Remedy", "explain", "remedy"]

GIB = 2**30

#: From the least intrusive change to the most.
ORDER = (
    "zero_stage",
    "sequence_parallel",
    "micro_batch_size",
    "recompute_granularity",
    "pipeline_schedule",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
)


@dataclass(frozen=True)
class Remedy:
    """changes: field -> value of the smallest change that fits; devices: of the cluster, if more are needed."""

    changes: dict[str, object]
    devices: int

    def __str__(self) -> str:
        flags = [f"--{name.replace('_', '-')}={_value(value)}" for name, value in self.changes.items()]
        return " ".join(flags) or f"{self.devices} devices"


def _value(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def explain(misfit: Misfit, hardware: Hardware) -> str:
    """One line: by how much it does not fit, and on which term."""
    rank = misfit.memory.index(misfit.fullest)
    terms = {name: getattr(misfit.fullest, name) for name in TERMS}
    largest = max(terms, key=lambda name: terms[name])
    over = misfit.fullest.total - hardware.usable_bytes
    return (
        f"does not fit: pipeline rank {rank} needs {misfit.fullest.total / GIB:.1f} GiB, "
        f"{over / GIB:.1f} GiB more than the {hardware.usable_bytes / GIB:.1f} GiB of a {hardware.name}; "
        f"the largest term is {largest} with {terms[largest] / GIB:.1f} GiB"
    )


def remedy(
    misfit: Misfit, world_size: int, hardware: Hardware, source: TimeSource, *, stale: bool = False
) -> Remedy | None:
    """The smallest change: the fewest fields of the layout, then the least intrusive, then the fastest; if no layout
    of this cluster fits, the smallest cluster (in doublings) on which one does. None: none up to 64 times as large."""
    config = misfit.config
    here = layout_of(config)
    quick = Quick(config, world_size, hardware, source)
    ranked = sorted(_changes(quick, here, stale), key=lambda item: item[:3])
    for *_, layout, changed in ranked[:400]:
        if reasons_against(config, world_size, layout):
            continue
        _, memory = quick.exact_memory(apply(config, layout))
        if max(rank.total for rank in memory) <= hardware.usable_bytes:
            return Remedy({name: getattr(layout, name) for name in changed}, world_size)
    for factor in (2, 4, 8, 16, 32, 64):
        if _fits_lean(_roomy(config, world_size * factor), world_size * factor, hardware, source):
            return Remedy({}, world_size * factor)
    return None


def _fits_lean(config: Config, world_size: int, hardware: Hardware, source: TimeSource) -> bool:
    """Whether a layout fits that shards and recomputes everything, one sample at a time."""
    leanest = replace(
        layout_of(config),
        sequence_parallel=True,
        pipeline_schedule="1f1b",
        virtual_pipeline_model_parallel_size=None,
        zero_stage=3,
        micro_batch_size=1,
        recompute_granularity="full",
    )
    given = frozenset(SEARCHED) - {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    return bool(search(apply(config, leanest), world_size, hardware, source, given=given, top=1).predictions)


def _roomy(config: Config, world_size: int) -> Config:
    """A batch that at least a full cluster of replicas divides."""
    batch = config.training.global_batch_size or 1
    training = replace(config.training, global_batch_size=batch if world_size <= batch else world_size)
    return replace(config, training=training)


def _changes(quick: Quick, here: Layout, stale: bool) -> Iterator[tuple[int, int, float, Layout, tuple[str, ...]]]:
    """(Number of changed fields, how intrusive, seconds, layout, fields) of what may fit."""
    stale = stale or here.pipeline_schedule in ("2bw", "pipedream")
    for layout in layouts(quick.config, quick.world_size, frozenset(), stale=stale):
        changed = tuple(name for name in SEARCHED if getattr(layout, name) != getattr(here, name))
        if layout.pipeline_model_parallel_size * layout.tensor_model_parallel_size == quick.world_size:
            changed = tuple(name for name in changed if name != "zero_stage")  # there is nothing to shard over
        if layout.pipeline_model_parallel_size == 1:
            changed = tuple(name for name in changed if name != "pipeline_schedule")
        if not changed or len(changed) > 3:
            continue
        seconds, nbytes = quick.estimate(layout)
        if nbytes <= quick.hardware.usable_bytes:
            yield len(changed), sum(2 ** ORDER.index(name) for name in changed), seconds, layout, changed
