"""The space of layouts: what may be chosen, and which choices are legal.

A layout is legal if the product's own validator (`config.legal.problems`) finds nothing. Before it is asked, only what
it would refuse for certain is left out (sizes that do not divide), so nothing legal is missed. Choices that run the
same thing are listed once: no schedule but 1f1b at one pipeline rank, no sequence parallelism at one tensor-parallel
rank, no expert-tensor size that is the tensor-parallel one, no ZeRO stage at one replica, no chunk number where the
schedule has its own. Sequences are not cut into parts of less than 4,096 tokens, which would only lose.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from megalite.config import SECTIONS, Config, all_options, build_section, config_problems, divisors, flat, schedule_file
from megalite.schedule import SCHEDULES, default_schedule, resolve_chunks, schedule_problems

LEAST_TOKENS = 4096  # tokens of a sequence on one rank, at least, where it is cut


class Sizes(NamedTuple):
    """Ranks of each axis."""

    tensor: int
    context: int
    pipeline: int
    data: int
    micro: int  # samples of a micro-batch
    expert: int = 1  # ranks over which experts are dealt out
    expert_tensor: int | None = None  # that share each; None: as many as tensor


@dataclass(frozen=True)
class Layout:
    """One point of the space. recompute: none, selective or full (of whole layers, one by one, or as the user gave)."""

    tensor_model_parallel_size: int
    context_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    sequence_parallel: bool
    pipeline_schedule: str
    zero_stage: int
    micro_batch_size: int
    recompute_granularity: str | None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None

    @property
    def chunks(self) -> int:
        return resolve_chunks(self.pipeline_schedule, self.virtual_pipeline_model_parallel_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of tensor, context, pipeline and expert parallelism."""
        return (
            self.tensor_model_parallel_size,
            self.context_parallel_size,
            self.pipeline_model_parallel_size,
            self.expert_model_parallel_size,
        )

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def as_dict(self, world_size: int) -> dict[str, Any]:
        """Fields by their flags' names, with the derived data-parallel size."""
        return asdict(self) | {"data_parallel_size": world_size // math.prod(self.sizes[:3])}


#: Fields of the configuration that are searched where the user did not give them.
SEARCHED = tuple(field.name for field in fields(Layout))


def apply(config: Config, layout: Layout) -> Config:
    """The configuration with this layout."""
    changed, sections = asdict(layout), ["parallel", "training"]
    if config.parallel.pipeline_schedule_file:
        changed["pipeline_schedule"] = None
    if layout.recompute_granularity != config.model.recompute_granularity:
        full = layout.recompute_granularity == "full"
        changed |= {"recompute_method": "uniform" if full else None, "recompute_num_layers": (1,) if full else None}
        sections.append("model")  # else it stays the same object, by which what is known of it is found
    values = {name: flat(getattr(config, name)) | changed for name in sections}
    return replace(config, **{name: build_section(SECTIONS[name], found) for name, found in values.items()})


def layout_of(config: Config) -> Layout:
    """The layout that a configuration has."""
    parallel = config.parallel
    return Layout(
        parallel.tensor_model_parallel_size,
        parallel.context.context_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.sequence_parallel,
        parallel.schedule,
        parallel.zero_stage,
        config.training.micro_batch_size,
        config.model.recompute_granularity,
        parallel.experts.expert_model_parallel_size,
        parallel.experts.expert_tensor_parallel_size,
    )


def _kept(here: Layout, given: frozenset[str], name: str, others: Sequence[Any]) -> Sequence[Any]:
    """The value that a given field keeps, or all others that it might have."""
    return [getattr(here, name)] if name in given else others


def layouts(config: Config, world_size: int, given: frozenset[str], *, stale: bool = False) -> Iterator[Layout]:
    """Every layout that might be legal. given: fields that keep the value they have; stale: asynchronous schedules
    too."""
    for sizes in shapes(config, world_size, given):
        yield from of_shape(config, given, sizes, stale=stale)


def shapes(config: Config, world_size: int, given: frozenset[str]) -> Iterator[Sizes]:
    """What divides: tensor-, context-, pipeline- and data-parallel sizes, the micro-batch, and the axes of experts."""
    here = layout_of(config)
    batch = config.training.global_batch_size
    assert batch is not None, "a plan needs the global batch size"
    sizes, length = divisors(world_size), config.model.seq_length
    cuts = [cp for cp in sizes if cp == 1 or (length // cp >= LEAST_TOKENS and length % cp == 0)]
    for tp in _kept(here, given, "tensor_model_parallel_size", sizes):
        if config.model.num_attention_heads % tp or config.model.ffn_size % tp:
            continue
        for pp in _kept(here, given, "pipeline_model_parallel_size", sizes):
            if world_size % (tp * pp) or (pp > config.model.num_layers and pp > 1):
                continue
            for cp in _kept(here, given, "context_parallel_size", cuts):
                dp, rest = divmod(world_size, tp * cp * pp)
                if rest or batch % dp:
                    continue
                micro = _kept(here, given, "micro_batch_size", divisors(batch // dp))
                dealt = list(_expert_axes(config, given, tp, world_size // pp))
                yield from (
                    Sizes(tp, cp, pp, dp, size, *axes) for size in micro if (batch // dp) % size == 0 for axes in dealt
                )


def _expert_axes(config: Config, given: frozenset[str], tp: int, stage_ranks: int) -> Iterator[tuple[int, int | None]]:
    """(Ranks over which experts are dealt out, ranks that share each), the latter 1 or None, as many as `tp`."""
    number, here = config.model.experts.num_experts, layout_of(config)
    if number is None:
        yield 1, None
        return
    for etp in _kept(here, given, "expert_tensor_parallel_size", [None, 1] if tp > 1 else [None]):
        for ep in _kept(here, given, "expert_model_parallel_size", divisors(number)):
            if stage_ranks % ((etp or tp) * ep) == 0:
                yield ep, etp


def of_shape(config: Config, given: frozenset[str], sizes: Sizes, *, stale: bool) -> Iterator[Layout]:
    """The layouts with these sizes: schedules, chunks, sequence parallelism, ZeRO stages, recomputation."""
    here = layout_of(config)
    tp, cp, pp, dp, micro, ep, etp = sizes
    assert config.training.global_batch_size is not None
    m = config.training.global_batch_size // dp // micro
    splits = _kept(here, given, "sequence_parallel", [False, True] if tp > 1 else [False])
    if etp is not None and etp < tp:  # each rank has tokens of its own
        splits = [split for split in splits if split]
    copies = tp * cp * dp // (ep * (etp or tp)) if config.model.experts.num_experts is not None else 1
    zeros = _kept(here, given, "zero_stage", [0, 1, 2, 3] if dp * cp > 1 or copies > 1 else [0])
    kinds: list[str | None] = [None, "full"]
    if here.recompute_granularity not in kinds:
        kinds.insert(0, here.recompute_granularity)
    for name, chunks in _schedules(config, given, here, pp, m, stale):
        for split in splits:
            for zero in zeros:
                for kind in _kept(here, given, "recompute_granularity", kinds):
                    yield Layout(tp, cp, pp, chunks, split, name, zero, micro, kind, ep, etp)


def _schedules(
    config: Config, given: frozenset[str], here: Layout, pp: int, m: int, stale: bool
) -> Iterator[tuple[str, int | None]]:
    """(Schedule, chunks per rank)."""
    if "pipeline_schedule" in given or config.parallel.pipeline_schedule_file is not None:
        names = [here.pipeline_schedule]
    elif pp == 1:
        names = [default_schedule(None)]
    else:
        # What arrives when is not known before the run; priced by equal times it is eager-1f1b.
        names = [n for n, each in SCHEDULES.items() if not each.takes_arrivals and (stale or not each.asynchronous)]
    fixed = "virtual_pipeline_model_parallel_size" in given
    for name in names:
        if fixed:
            chunks: list[int | None] = [here.virtual_pipeline_model_parallel_size]
        elif SCHEDULES[name].num_chunks is not None or pp == 1:
            chunks = [None]
        else:
            most = max(1, config.model.num_layers // pp)
            chunks = [v for v in range(max(2, SCHEDULES[name].min_chunks), most + 1)]
        for v in chunks:
            if config.parallel.pipeline_schedule_file is not None or not schedule_problems(name, pp, m, v):
                yield name, v


def legal_layouts(config: Config, world_size: int, given: frozenset[str], *, stale: bool = False) -> list[Layout]:
    """Every layout of the space for which the validator finds no problem."""
    found = layouts(config, world_size, given, stale=stale)
    return [layout for layout in found if not reasons_against(config, world_size, layout)]


def reasons_against(config: Config, world_size: int, layout: Layout) -> list[str]:
    """What the product's validator says of this layout; data, checkpoints and logging are not what is planned."""
    config = apply(config, layout)
    others = ("data", "checkpoint", "logging")
    not_planned = frozenset(name for name, option in all_options().items() if option.section in others)
    return config_problems(config, world_size, broken=not_planned) or list(schedule_file(config, world_size))
