"""A small layout of the run on real values: as its ranks compute, and with streams that work as late as they may.

A race that the clocks have found gives other numbers here, and numbers that differ without a race are a fault of ours.
"""

from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from megalite.comm import World
from megalite.config import from_dict, to_dict
from megalite.errors import RuntimeFailure
from megalite.proof import shrink
from megalite.rehearsal.device import watched_gpu
from megalite.rehearsal.late import COMPUTE, OTHERS
from megalite.rehearsal.match import Fault, differ
from megalite.rehearsal.rank import Rehearsed
from megalite.rehearsal.streams import DEVICE
from megalite.testing import run_ranks
from megalite.train import open_run

STEPS, MOST_RANKS = 4, 8
NAMES = {COMPUTE: "the compute stream", OTHERS: "all streams but the compute stream"}
Seen = tuple[list[str], list[str], list[str]]
"""(Loss and norm of each iteration, races, what else went wrong)"""


def trained(world: World, settings: dict[str, Any], late: str | None) -> Seen:
    """A few iterations on a device of which some streams are late."""
    numbers = []
    with watched_gpu(late=late) as gpu:
        try:
            with open_run(from_dict(settings), replace(world, device=DEVICE)) as run:
                for step in range(STEPS):
                    stats = run.trainer.train_step(drain=step + 1 == STEPS)
                    loss, norm = (None if x is None else float(x).hex() for x in (stats.lm_loss, stats.grad_norm))
                    numbers.append(f"loss {loss}, norm {norm}")
        except RuntimeFailure as error:  # what is not finite ends a run
            numbers.append(str(error))
        return numbers, gpu.races, getattr(gpu.kernels, "wrong", [])


def with_values(run: Rehearsed) -> tuple[list[Fault], tuple[str, str]]:
    """(What differs, a line of what was run). Raises ConfigError where no small layout is like this one."""
    small = shrink(run.full, run.size, steps=STEPS, most_ranks=MOST_RANKS)
    with TemporaryDirectory() as folder:
        settings = to_dict(replace(small.config, data=replace(small.config.data, data_cache_path=folder)))
        runs = {late: run_ranks(trained, small.world_size, settings, late) for late in (None, *NAMES)}
    faults = []
    for late, name in NAMES.items():
        for rank, (numbers, races, wrong) in enumerate(runs[late]):
            right = runs[None][rank][0]
            if (at := differ(numbers, right)) is None and not wrong:
                continue
            what = f"has {numbers[at]} in iteration {at + 1}, else {right[at]}" if at is not None else wrong[0]
            cause = races[0] if races else "no race explains it: the device of bookkeeping is wrong"
            faults.append(Fault("values", f"with {name} late rank {rank} {what}\n    {cause}"))
    seen = "they differ" if faults else "equal bits"
    return faults[:1], ("values", f"{STEPS} steps of {small.world_size} ranks on real values, thrice: {seen}")
