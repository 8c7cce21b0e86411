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

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from megalite.config import Config, HostOffload, config_problems
from megalite.errors import ConfigError, ScheduleError
from megalite.inventory import MemoryPlan, Recompute, given_plan, stage_layer_ranges
from megalite.planner.activations import stage_activations, workspace_bytes
from megalite.planner.host_params import with_weight_chunks
from megalite.planner.memory import RankMemory, pipeline_memory, weights_moved
from megalite.planner.predict import program_of
from megalite.planner.uneven import MemoryHeadroom, recompute_of, smallest_numbers
from megalite.progress import in_units
from megalite.schedule import ActivationRoom, Program


class _TooLittle(ConfigError):
    """A budget that nothing keeps. enough: bytes that would be."""

    def __init__(self, problems: Iterable[str] | str, enough: float = 0.0) -> None:
        super().__init__(problems)
        self.enough = enough


def within_budget(config: Config, world_size: int, *, on_cpu: bool) -> MemoryPlan:
    """Where memory lies: what flags say, and what their budget decides. config: legal, with its vocabulary resolved.

    Raises ConfigError where nothing is enough.
    """
    gigabytes = config.parallel.hardware.device_memory_budget_gb
    budget = _Budget(config, world_size, 1e9 * (gigabytes or 0.0), on_cpu)
    plan = given_plan(config)
    plan = budget.hosted(plan) if plan.hosts_params else plan
    if gigabytes is None or config.training.skip_train:
        return plan
    return budget.within_host(budget.recomputing(plan) if budget.may_recompute else budget.within_device(plan))


def _first_of(*ways: Callable[[], MemoryPlan]) -> MemoryPlan:
    """What the first possible way leads to. Raises the error of the one that is nearest."""
    refused: list[_TooLittle] = []
    for way in ways:
        try:
            return way()
        except _TooLittle as error:
            refused.append(error)
    raise min(refused, key=lambda error: error.enough)


@dataclass(frozen=True)
class _Budget:
    """What each rank of a run may have. usable_bytes: on its device."""

    config: Config
    world_size: int
    usable_bytes: float
    on_cpu: bool

    @property
    def _flag(self) -> str:
        return f"`device_memory_budget_gb`={self.config.parallel.hardware.device_memory_budget_gb:g}"

    @property
    def may_recompute(self) -> bool:
        """Whether it is left open which layers are recomputed: `auto`, or no word of it where whole layers may be."""
        kind = self.config.model.recompute_granularity
        full = replace(self.config, model=replace(self.config.model, recompute_granularity="full"))
        return kind == "auto" or (kind is None and not config_problems(full, self.world_size))

    @cached_property
    def cuts(self) -> list[range]:
        return stage_layer_ranges(self.config, program_of(self.config, self.world_size))

    def memory(self, plan: MemoryPlan) -> tuple[RankMemory, ...]:
        """Of each pipeline coordinate. Raises ScheduleError where there is no room at some moment."""
        return pipeline_memory(self.headroom(plan))

    def headroom(self, plan: MemoryPlan) -> MemoryHeadroom:
        program = program_of(self.config, self.world_size, plan)
        return MemoryHeadroom(self.config, self.world_size, program, self.cuts, plan, self.on_cpu, self.usable_bytes)

    def fits(self, plan: MemoryPlan) -> bool:
        return all(rank.total <= self.usable_bytes for rank in self.memory(plan))

    def _illegal(self, offload: HostOffload) -> bool:
        """Whether flags that said the same would be refused."""
        changed = replace(self.config, optimizer=replace(self.config.optimizer, offload=offload))
        return bool(config_problems(changed, self.world_size))

    def within_device(self, plan: MemoryPlan) -> MemoryPlan:
        """As little as it takes is elsewhere than on the device. Raises ConfigError."""
        if plan.hosts_params:
            return self._more_weights(plan)
        moved = self._smallest_fraction(plan)
        if self.fits(moved):
            return moved
        hosted = self._on_host(plan)
        if hosted is None:
            return self._with_room(moved)
        return _first_of(lambda: self._with_room(moved), lambda: self._more_weights(hosted))

    def within_host(self, plan: MemoryPlan) -> MemoryPlan:
        """As few masters and moments in files as it takes; `plan` where nothing is said of the host. Raises ConfigError
        where they are not enough."""
        gigabytes = self.config.parallel.hardware.host_memory_budget_gb
        if gigabytes is None:
            return plan
        has_folder = self.config.optimizer.offload.optimizer_offload_path is not None

        def placed(hundredths: int) -> MemoryPlan:
            return replace(plan, file_fraction=min(plan.fraction, hundredths / 100) if has_folder else 0.0)

        def on_host(plan: MemoryPlan) -> float:
            return max(rank.host for rank in self.memory(plan))

        def kept(hundredths: int) -> bool:
            return on_host(placed(hundredths)) <= 1e9 * gigabytes and self.fits(placed(hundredths))

        most = math.ceil(100 * plan.fraction) if has_folder else 0
        found = bisect_left(range(most), True, key=kept)
        if kept(found):
            return placed(found)
        needed = f"`host_memory_budget_gb`={gigabytes:g}: {in_units(on_host(placed(found)), 'B')} of a rank are needed"
        if not has_folder and plan.fraction:
            raise ConfigError(
                f"{needed}; give as much, or a folder for masters and moments (`optimizer_offload_path`=DIR)"
            )
        raise ConfigError(f"{needed} for what no file takes; give as much, or a larger `device_memory_budget_gb`")

    def _on_host(self, plan: MemoryPlan) -> MemoryPlan | None:
        """With weights and gradients on the host, where they may go there."""
        offload = self.config.optimizer.offload
        if offload.param_offload != "auto":
            return None
        if self._illegal(replace(offload, param_offload="cpu", optimizer_offload_fraction=1.0)):
            return None
        in_file = 0.0 if offload.optimizer_offload_path is None else 1.0
        return self.hosted(replace(plan, hosts_params=True, fraction=1.0, file_fraction=in_file))

    def hosted(self, plan: MemoryPlan) -> MemoryPlan:
        """With the least room for weights that live on the host."""
        return with_weight_chunks(self.config, self.world_size, self.cuts, replace(plan, chunks=None))

    def _more_weights(self, plan: MemoryPlan) -> MemoryPlan:
        """Weights that live on the host have what room is left; activations move, if there is none. Raises
        ConfigError."""
        if not self.fits(plan):
            return self._with_room(plan)
        program, memory = self.headroom(plan).program, self.memory(plan)
        least = [weights_moved(program, rank).peak for rank in range(program.num_ranks)]
        left = (int(self.usable_bytes - rank.total) for rank in memory)
        assert plan.chunks is not None
        capacity = tuple(peak + more for peak, more in zip(least, left, strict=True))
        return replace(plan, chunks=plan.chunks._replace(capacity=capacity))

    def recomputing(self, plan: MemoryPlan) -> MemoryPlan:
        """The fewest recomputed layers with which it fits as it is; where even all of them are not enough, the fewest
        beside masters and moments on the host, then beside weights and gradients there. Raises ConfigError."""
        for given in (plan, self._with_fraction(plan, 100), self._on_host(plan)):
            found = None if given is None else self._fewest_recomputed(given)
            if found is not None:
                return self.within_device(self._with_recompute(plan, found))
        everything = self._with_recompute(plan, (Recompute("uniform", 1),))
        return _first_of(  # activations come and go where nothing is recomputed
            lambda: self.within_device(plan), lambda: self.within_device(everything)
        )

    def _with_recompute(self, plan: MemoryPlan, found: tuple[Recompute, ...]) -> MemoryPlan:
        """Of weights that come and go, the order in which a backward reads them is another then."""
        plan = replace(plan, recompute=found)
        return self.hosted(plan) if plan.hosts_params else plan

    def _fewest_recomputed(self, plan: MemoryPlan) -> tuple[Recompute, ...] | None:
        """As few recomputed layers in each stage as make it fit; None: not even all of them do."""
        room = self.headroom(plan)
        blocks, numbers = room.blocks, smallest_numbers(room)
        if numbers is None:
            return None
        if self.config.parallel.pipeline_schedule_file is not None and len(set(numbers)) > 1:
            # flags of such a run give one number for all stages
            numbers = blocks if len(set(blocks)) > 1 else [max(numbers)] * len(numbers)
        return recompute_of(numbers, blocks)

    def _smallest_fraction(self, plan: MemoryPlan) -> MemoryPlan:
        """As few masters and moments off the device as it takes; all of them where that is not enough, none where the
        optimizer cannot have them there. What --optimizer-cpu-offload says stays as it is."""
        if self._with_fraction(plan, 100) is None:
            return plan

        def placed(hundredths: int) -> MemoryPlan:
            return self._with_fraction(plan, hundredths) or plan

        return placed(min(bisect_left(range(101), True, key=lambda hundredths: self.fits(placed(hundredths))), 100))

    def _with_fraction(self, plan: MemoryPlan, hundredths: int) -> MemoryPlan | None:
        """With so many masters and moments on the host; None where flags say how many, or where they cannot be."""
        offload, fraction = self.config.optimizer.offload, hundredths / 100
        if offload.optimizer_cpu_offload:
            return None
        given = replace(offload, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction or 1.0)
        if hundredths and self._illegal(given):
            return None
        in_file = offload.optimizer_offload_path is not None
        return replace(plan, fraction=fraction, file_fraction=fraction if in_file else 0.0)

    def _with_room(self, plan: MemoryPlan) -> MemoryPlan:
        """Activations move. Raises ConfigError where they cannot, or where it is not enough."""
        room, memory, cuts = self.headroom(plan), self.memory(plan), self.cuts
        least = max(rank.total for rank in memory)
        why = _immovable(self.config, plan, room.program)
        if why is not None:
            raise _TooLittle(f"{self._flag}: {in_units(least, 'B')} are needed, and {why}; give as much", least)
        longest = self.config.at_length(max(length for length, _ in self.config.phases(self.world_size)))
        nothing = Recompute()
        kept = [stage_activations(longest, cut, nothing, on_cpu=self.on_cpu) for cut in cuts]
        chunk = [workspace_bytes(longest, cut, nothing, on_cpu=self.on_cpu)[0] for cut in cuts]
        full = tuple(each.full + each.head for each in kept)
        held = map(room.stages_of, range(len(memory)))
        heads = [rank.logits - max(chunk[stage] for stage in own) for rank, own in zip(memory, held, strict=True)]
        others = [rank.total - rank.activations - head for rank, head in zip(memory, heads, strict=True)]
        waiting = tuple(each.weight_only for each in kept)

        def roomy(usable: float) -> MemoryPlan:
            return replace(plan, room=ActivationRoom(full, waiting, tuple(max(0.0, usable - one) for one in others)))

        def possible(usable: float) -> bool:
            try:
                return replace(self, usable_bytes=usable).fits(roomy(usable))
            except ScheduleError:
                return False

        if possible(self.usable_bytes):
            return roomy(self.usable_bytes)
        steps = [max(others) + (least - max(others)) * step / 100 for step in range(101)]
        enough = steps[min(100, bisect_left(steps, True, key=possible))]
        states = "weights, gradients, masters and moments" if plan.hosts_params else "masters and moments"
        raise _TooLittle(
            f"{self._flag}: not enough with {states} on the host and activations that come and go; "
            f"{enough / 1e9:.3g} are, or use a smaller `micro_batch_size` or more ranks",
            enough,
        )


def _immovable(config: Config, plan: MemoryPlan, program: Program) -> str | None:
    """Why activations stay where they are."""
    if program.asynchronous:
        return f"{program.name} never drains, so that activations outlive their batch and stay"
    if program.recomputed or plan.recompute[0].method:
        return "what recomputation keeps stays where it is"
    if config.model.cpu_offloading_num_layers:
        return "`cpu_offloading_num_layers` says which activations leave"
    if config.training.compile:
        return "`compile` decides what is kept"
    return None
