"""What cannot fit: by how much, on which term, and the smallest change that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.config import Config, HostOffload
from megalite.inventory import given_plan
from megalite.planner import (
    SEARCHED,
    TERMS,
    FastEstimator,
    Hardware,
    Layout,
    OverBudget,
    Roofline,
    apply,
    layout_of,
    layout_text,
    layouts,
    reasons_against,
    search,
)
from megalite.progress import in_units
from megalite.schedule import default_schedule, find_schedule

GB = 1e9

#: From the least intrusive change to the most.
ORDER = (
    "zero_stage",
    "sequence_parallel",
    "micro_batch_size",
    "recompute_granularity",
    "pipeline_schedule",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
)


@dataclass(frozen=True)
class Remedy:
    """changes: field -> value of the smallest change that fits; devices: of the cluster, if more are needed; layout: on
    them, as text."""

    changes: dict[str, object]
    devices: int
    layout: str = ""

    def __str__(self) -> str:
        flags = [_flag(name, value) for name, value in self.changes.items()]
        return " ".join(flags) or f"{self.devices:,} devices ({self.layout})"


def _flag(name: str, value: object) -> str:
    """As it is typed."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"(and no --{name})" if value is None else f"--{name}={value}"


def explain(misfit: OverBudget, world_size: int, hardware: Hardware) -> str:
    """One line: by how much it does not fit, and on which term."""
    rank = misfit.memory.index(misfit.fullest)
    terms = {name: getattr(misfit.fullest, name) for name in TERMS}
    largest = max(terms, key=lambda name: terms[name])
    needed, usable = misfit.fullest.total, hardware.usable_bytes
    return (
        f"does not fit: {layout_text(misfit.config, world_size)}: pipeline rank {rank} needs {size(needed)}, "
        f"{size(needed - usable)} more than the {size(usable)} of one {hardware.name}; "
        f"the largest term is {largest} with {size(terms[largest])}"
    )


def shortage(misfit: OverBudget, hardware: Hardware) -> str:
    """A few words: by how much it does not fit, and on which term."""
    over = misfit.fullest.total - hardware.usable_bytes
    terms = {name: getattr(misfit.fullest, name) for name in TERMS}
    return f"does not fit: {size(over)} too much, most of it {max(terms, key=lambda name: terms[name])}"


def size(nbytes: float) -> str:
    """`322.8 GB`, or what is less than a tenth of one in smaller units."""
    return f"{nbytes / GB:,.1f} GB" if nbytes >= GB / 10 else in_units(nbytes, "B")


def remedy(
    misfit: OverBudget, world_size: int, hardware: Hardware, source: Roofline, *, stale: bool = False
) -> Remedy | None:
    """The smallest change: the fewest flags, then the least intrusive, then the fastest, of the layout, or to keep
    optimizer states on the host; if nothing fits this cluster, the smallest one (in doublings) on which a layout does.
    None: none up to 64 times as large."""
    config = misfit.config
    offloaded = replace(config, optimizer=replace(config.optimizer, offload=HostOffload(optimizer_cpu_offload=True)))
    moved: dict[str, object] = {"optimizer_cpu_offload": True}
    may_move = not hardware.on_cpu and not given_plan(config).fraction
    changes = _smallest(FastEstimator(config, world_size, hardware, source), stale)
    if may_move and (changes is None or len(changes) > 1):
        host = FastEstimator(offloaded, world_size, hardware, source)
        if _fits(host, layout_of(config)):
            changes = moved
        elif changes is None and (more := _smallest(host, stale)) is not None:
            changes = more | moved
    if changes is not None:
        return Remedy(changes, world_size)
    for factor in (2, 4, 8, 16, 32, 64):
        roomy = _roomy(config, world_size * factor)
        if found := _lean(roomy, world_size * factor, hardware, source):
            return Remedy({}, world_size * factor, layout_text(apply(roomy, found), world_size * factor))
    return None


def _smallest(quick: FastEstimator, stale: bool) -> dict[str, object] | None:
    """The smallest change of the layout that fits."""
    ranked = sorted(_changes(quick, layout_of(quick.config), stale), key=lambda item: item[:3])
    for *_, layout, changed in ranked[:400]:
        if _fits(quick, layout):
            return {name: getattr(layout, name) for name in changed}
    return None


def _fits(quick: FastEstimator, layout: Layout) -> bool:
    if reasons_against(quick.config, quick.world_size, layout):
        return False
    _, memory = quick.exact_memory(apply(quick.config, layout))
    return max(rank.total for rank in memory) <= quick.hardware.usable_bytes


def _lean(config: Config, world_size: int, hardware: Hardware, source: Roofline) -> Layout | None:
    """A layout that fits and shards and recomputes everything, one sample at a time."""
    leanest = replace(
        layout_of(config),
        sequence_parallel=True,
        pipeline_schedule=default_schedule(None),
        virtual_pipeline_model_parallel_size=None,
        zero_stage=3,
        micro_batch_size=1,
        recompute_granularity="full",
    )
    given = frozenset(SEARCHED) - {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    found = search(apply(config, leanest), world_size, hardware, source, given=given, top=1, even=True)
    return layout_of(found.predictions[0].config) if found.predictions else None


def _roomy(config: Config, world_size: int) -> Config:
    """A batch that at least a full cluster of replicas divides."""
    batch = config.training.global_batch_size or 1
    training = replace(config.training, global_batch_size=batch if world_size <= batch else world_size)
    return replace(config, training=training)


def _changes(
    quick: FastEstimator, here: Layout, stale: bool
) -> Iterator[tuple[int, int, float, Layout, tuple[str, ...]]]:
    """(Number of changed fields, how intrusive, seconds, layout, fields) of what may fit."""
    stale = stale or find_schedule(here.pipeline_schedule).asynchronous
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
