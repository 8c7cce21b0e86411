"""`--device-memory-budget-gb`: what lies where, so that every rank keeps to its budget, decided before the run.

What is needed last goes first (the rule of Belady, by which the activations are chosen too):

    recomputation          unless --recompute-granularity says another kind: the fewest layers of each stage with which
                           nothing moves; where even all would not do, the fewest beside what then has to move
    masters and moments    needed by STEP alone: as many hundredths as must go to the host, which updates them there
    activations            moved by EVICT and PREFETCH, micro-batch by micro-batch (`schedule.insert_transfers`)
    weights and gradients  where --param-offload allows it: those of the layers in use are there, and as many more as
                           there is room for (`schedule.plan_chunks`); activations then move if even that is too much

With `--optimizer-offload-path` masters and moments go into files: all that leave the device, or, where
`--host-memory-budget-gb` says what the host may take, as few hundredths as that needs. A budget that all of it cannot
keep is refused, with the least one that could be.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megalite.config import Config, config_problems
from megalite.errors import ConfigError, ScheduleError
from megalite.inventory import stage_layer_ranges
from megalite.planner.activations import stage_activations, workspace_bytes
from megalite.planner.host_params import with_weight_chunks
from megalite.planner.memory import RankMemory, rank_memory, weights_moved
from megalite.planner.predict import program_of
from megalite.planner.startup_table import in_units
from megalite.planner.uneven import MemoryHeadroom, recomputing, smallest_numbers
from megalite.schedule import ActivationRoom, Program


@dataclass(frozen=True)
class _Device:
    """What `MemoryHeadroom` asks of the hardware."""

    usable_bytes: float
    on_cpu: bool


class _TooLittle(ConfigError):
    """A budget that nothing keeps. enough: bytes that would be."""

    def __init__(self, problems: Iterable[str] | str, enough: float = 0.0) -> None:
        super().__init__(problems)
        self.enough = enough


def within_budget(config: Config, world_size: int, *, on_cpu: bool) -> Config:
    """The configuration with what its budget decides. config: legal, with its vocabulary resolved.

    Raises ConfigError where nothing is enough.
    """
    gigabytes = config.parallel.hardware.device_memory_budget_gb
    if config.optimizer.offload.hosts_params:
        config = _hosted(config, world_size)
    if gigabytes is None or config.training.skip_train:
        return config
    device = _Device(1e9 * gigabytes, on_cpu)
    config = _with_recomputation_decided(config, world_size)
    if config.model.recompute_granularity == "auto":
        placed = _recomputing(config, world_size, device)
    else:
        placed = _within_device(config, world_size, device)
    return _within_host(placed, world_size, device)


def _with_recomputation_decided(config: Config, world_size: int) -> Config:
    """A granularity that was not given becomes auto, where whole layers may be recomputed; `none` becomes None."""
    kind: str | None = config.model.recompute_granularity
    if kind is None:
        full = replace(config.model, recompute_granularity="full")
        kind = None if config_problems(replace(config, model=full), world_size) else "auto"
    elif kind == "none":
        kind = None
    return replace(config, model=replace(config.model, recompute_granularity=kind))


def _within_device(config: Config, world_size: int, device: _Device) -> Config:
    """As little as it takes is elsewhere than on the device. Raises ConfigError."""
    if config.chunks is not None:
        return _more_weights(config, world_size, device)
    moved = _smallest_fraction(config, world_size, device)
    if _fits(moved, world_size, device):
        return moved
    hosted = _on_host(config, world_size)
    if hosted is None:
        return _with_room(moved, world_size, device)
    return _first_of(lambda: _with_room(moved, world_size, device), lambda: _more_weights(hosted, world_size, device))


def _first_of(*ways: Callable[[], Config]) -> Config:
    """What the first possible way leads to. Raises the error of the one that is nearest."""
    refused: list[_TooLittle] = []
    for way in ways:
        try:
            return way()
        except _TooLittle as error:
            refused.append(error)
    raise min(refused, key=lambda error: error.enough)


def _within_host(config: Config, world_size: int, device: _Device) -> Config:
    """As few masters and moments in files as it takes; `config` where nothing is said of the host.

    Raises ConfigError where they are not enough.
    """
    gigabytes, fraction = config.parallel.hardware.host_memory_budget_gb, config.optimizer.offload.fraction
    if gigabytes is None:
        return config

    def placed(hundredths: int) -> Config:
        return replace(config, in_file=min(fraction, hundredths / 100))

    def on_host(config: Config) -> float:
        return max(rank.host for rank in _memory(config, world_size, device)[2])

    def kept(hundredths: int) -> bool:
        given = placed(hundredths)
        return on_host(given) <= 1e9 * gigabytes and _fits(given, world_size, device)

    has_folder = config.optimizer.offload.optimizer_offload_path is not None
    most = math.ceil(100 * fraction) if has_folder else 0
    found = bisect_left(range(most), True, key=kept)
    if kept(found):
        return placed(found)
    needed = f"--host-memory-budget-gb={gigabytes:g}: {in_units(on_host(placed(found)), 'B')} of a rank are needed"
    if not has_folder and fraction:
        raise ConfigError(f"{needed}; give as much, or a folder for masters and moments (--optimizer-offload-path=DIR)")
    raise ConfigError(f"{needed} for what no file takes; give as much, or a larger --device-memory-budget-gb")


def _on_host(config: Config, world_size: int) -> Config | None:
    """With weights and gradients on the host, where they may go there."""
    offload = config.optimizer.offload
    given = replace(offload, param_offload="cpu", optimizer_offload_fraction=1.0)
    hosted = replace(config, optimizer=replace(config.optimizer, offload=given))
    if offload.param_offload != "auto" or config_problems(hosted, world_size):
        return None
    return _hosted(hosted, world_size)


def _hosted(config: Config, world_size: int) -> Config:
    """With the least room for weights that live on the host."""
    config = replace(config, chunks=None)
    return with_weight_chunks(config, world_size, stage_layer_ranges(config, program_of(config, world_size)))


def _more_weights(config: Config, world_size: int, device: _Device) -> Config:
    """Weights that live on the host have what room is left; activations move, if there is none. Raises ConfigError."""
    if not _fits(config, world_size, device):
        return _with_room(config, world_size, device)
    program, _, memory = _memory(config, world_size, device)
    least = [weights_moved(program, rank).peak for rank in range(program.num_ranks)]
    left = (int(device.usable_bytes - rank.total) for rank in memory)
    assert config.chunks is not None
    capacity = tuple(peak + more for peak, more in zip(least, left, strict=True))
    return replace(config, chunks=config.chunks._replace(capacity=capacity))


def _memory(config: Config, world_size: int, device: _Device) -> tuple[Program, list[range], list[RankMemory]]:
    program = program_of(config, world_size)
    cuts = stage_layer_ranges(config, program)
    ranks = range(program.num_ranks)
    memory = [
        rank_memory(config, world_size, program=program, cuts=cuts, rank=rank, on_cpu=device.on_cpu) for rank in ranks
    ]
    return program, cuts, memory


def _fits(config: Config, world_size: int, device: _Device) -> bool:
    return all(rank.total <= device.usable_bytes for rank in _memory(config, world_size, device)[2])


def _recomputing(config: Config, world_size: int, device: _Device) -> Config:
    """`--recompute-granularity auto`: the fewest layers with which it fits as it is; where even all of them are not
    enough, the fewest beside masters and moments on the host, then beside weights and gradients there. Raises
    ConfigError.
    """
    config = replace(config, model=replace(config.model, recompute_granularity=None))
    for given in (config, _with_fraction(config, world_size, 100), _on_host(config, world_size)):
        found = None if given is None else _fewest_recomputed(given, world_size, device)
        if found is not None:
            return _within_device(replace(config, model=found.model), world_size, device)
    model = replace(config.model, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=(1,))
    recomputed = replace(config, model=model)
    return _first_of(  # activations come and go where nothing is recomputed
        lambda: _within_device(config, world_size, device), lambda: _within_device(recomputed, world_size, device)
    )


def _fewest_recomputed(config: Config, world_size: int, device: _Device) -> Config | None:
    """With as few recomputed layers in each stage as make it fit; None: not even all of them do."""
    program = program_of(config, world_size)
    cuts = stage_layer_ranges(config, program)
    room = MemoryHeadroom(config, world_size, device, program)
    blocks = [room.blocks(cut) for cut in cuts]
    found = smallest_numbers(room, cuts)
    if found is None:
        return None
    numbers = list(found)
    if config.parallel.pipeline_schedule_file is not None and len(set(numbers)) > 1:
        numbers = blocks if len(set(blocks)) > 1 else [max(numbers)] * len(numbers)  # one number for all is written
    return recomputing(config, numbers, blocks)


def _smallest_fraction(config: Config, world_size: int, device: _Device) -> Config:
    """As few masters and moments off the device as it takes; all of them where that is not enough, none where the
    optimizer cannot have them there. What --optimizer-cpu-offload says stays as it is."""
    if _with_fraction(config, world_size, 100) is None:
        return config

    def placed(hundredths: int) -> Config:
        return _with_fraction(config, world_size, hundredths) or config

    found = bisect_left(range(101), True, key=lambda hundredths: _fits(placed(hundredths), world_size, device))
    return placed(min(found, 100))


def _with_fraction(config: Config, world_size: int, hundredths: int) -> Config | None:
    """With so many masters and moments on the host; None where flags say how many, or where they cannot be there."""
    offload = config.optimizer.offload
    given = replace(
        offload,
        optimizer_cpu_offload=hundredths > 0,
        optimizer_offload_fraction=hundredths / 100 if hundredths else 1.0,
        optimizer_offload_path=offload.optimizer_offload_path if hundredths else None,
    )
    placed = replace(config, optimizer=replace(config.optimizer, offload=given))
    illegal = hundredths > 0 and config_problems(placed, world_size)
    return None if offload.optimizer_cpu_offload or illegal else placed


def _with_room(config: Config, world_size: int, device: _Device) -> Config:
    """Activations move. Raises ConfigError where they cannot, or where it is not enough."""
    program, cuts, memory = _memory(config, world_size, device)
    flag = f"--device-memory-budget-gb={config.parallel.hardware.device_memory_budget_gb:g}"
    least = max(rank.total for rank in memory)
    why = _immovable(config, program)
    if why is not None:
        raise _TooLittle(f"{flag}: {in_units(least, 'B')} are needed, and {why}; give as much", least)
    longest = config.at_length(max(length for length, _ in config.phases(world_size)))
    own = [longest.for_stage(stage) for stage in range(len(cuts))]
    kept = [stage_activations(own[s], cut, on_cpu=device.on_cpu) for s, cut in enumerate(cuts)]
    chunk = [workspace_bytes(own[s], cut, on_cpu=device.on_cpu)[0] for s, cut in enumerate(cuts)]
    full = tuple(each.full + each.head for each in kept)
    stages = [[stage for stage, _ in program.placement.stages_of(rank)] for rank in range(program.num_ranks)]
    heads = [memory[rank].logits - max(chunk[stage] for stage in held) for rank, held in enumerate(stages)]
    others = [rank.total - rank.activations - head for rank, head in zip(memory, heads, strict=True)]
    waiting = tuple(each.weight_only for each in kept)

    def roomy(usable: float) -> Config:
        return replace(config, room=ActivationRoom(full, waiting, tuple(max(0.0, usable - other) for other in others)))

    def possible(usable: float) -> bool:
        try:
            return _fits(roomy(usable), world_size, _Device(usable, device.on_cpu))
        except ScheduleError:
            return False

    if possible(device.usable_bytes):
        return roomy(device.usable_bytes)
    steps = [max(others) + (least - max(others)) * step / 100 for step in range(101)]
    enough = steps[min(100, bisect_left(steps, True, key=possible))]
    states = "masters and moments" if config.chunks is None else "weights, gradients, masters and moments"
    raise _TooLittle(
        f"{flag}: not enough with {states} on the host and activations that come and go; "
        f"{enough / 1e9:.3g} are, or use a smaller --micro-batch-size or more ranks",
        enough,
    )


def _immovable(config: Config, program: Program) -> str | None:
    """Why activations stay where they are."""
    if program.asynchronous:
        return f"{program.name} never drains, so that activations outlive their batch and stay"
    if program.recomputed or config.model.recompute_granularity == "full":
        return "what recomputation keeps stays where it is"
    if config.model.cpu_offloading_num_layers:
        return "--cpu-offloading-num-layers says which activations leave"
    if config.training.compile:
        return "--compile decides what is kept"
    return None
