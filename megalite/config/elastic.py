"""`--elastic`: how many of the ranks that were started train.

tp, pp, cp, ep never change; dp = the largest d for which the layout is legal with tp x cp x pp x d ranks

3 hosts of 4 ranks, tp 2, pp 2:   0 1 | 2 3    4 5 | 6 7    8 9 | 10 11      d = 3
a host is lost:                   0 1 | 2 3    4 5 | 6 7                     d = 2
global batch 9:                   0 1 | 2 3    4 5 | 6 7    + + | +  +       d = 1, or 3: it must divide the batch
"""

from collections.abc import Iterator

from megalite.config.legal import config_problems
from megalite.config.root import Config

DIVIDES = "their number times the micro-batch size must divide `global_batch_size`"
MOST_TRIALS = 8
TOLERABLE = 0.9  # part of the ranks that are left which should find work


def training_ranks(config: Config, started: int, local_size: int) -> int:
    """Ranks that train, of those that were started, `local_size` on a host. Where no number is legal, one of which the
    validator says what is wrong."""
    if not _counts(config):
        return started
    replica = config.parallel.ranks_together * config.parallel.pipeline_model_parallel_size
    most = seats(started, local_size, config.parallel.ranks_together) // replica * replica
    if most == 0:
        return started
    even = [ranks for ranks in range(most, 0, -replica) if _divides(config, ranks)] or [most]
    return next((ranks for ranks in even[:MOST_TRIALS] if not config_problems(config, ranks)), even[0])


def seats(started: int, local_size: int, together: int) -> int:
    """Ranks that can train if groups of `together` stay on a host."""
    if together > local_size:
        return started // together * together
    return started // local_size * (local_size // together * together)


def elastic_problems(config: Config, started: int, training: int) -> Iterator[str]:
    """Too few replicas, and a batch that would change with them."""
    floor = config.parallel.restarts.elastic
    if floor is None or not _counts(config):
        return
    if config.training.global_batch_size is None and config.training.batch_ramp.step_batch_size_schedule is None:
        yield f"`elastic`={floor}: the global batch would grow and shrink with the ranks; add `global_batch_size`"
    replicas = config.data_parallel_size(training)
    if replicas < floor:
        size, whole = config.training.global_batch_size, config.parallel.model_parallel_size
        better, room, micro = "start more of them", started // whole, config.training.micro_batch_size
        if size is not None and room >= floor:
            other = _dividing(size // micro, room)
            other = other if _most(other, room) >= floor else max(1, round(size / micro / floor)) * floor
            better = f"{DIVIDES}={size}; use {other * micro}"
        given = f"`elastic`={floor}: {started} ranks give {replicas} data-parallel ranks of {whole}"
        yield f"{given}; {better}, or lower it"


def elastic_warnings(config: Config, started: int, training: int) -> Iterator[str]:
    """Ranks without a place, and a global batch whose divisors leave many without work once the first is lost."""
    size, floor = config.training.global_batch_size, config.parallel.restarts.elastic
    if floor is None or size is None:
        return
    if started > training:
        rest = "wait as spares" if config.parallel.nprocs is None else "are not started (`nprocs` is of one host)"
        yield f"`elastic`={floor}: of {started} ranks {training} train, as the layout has room; the others {rest}"
    micro, replicas = config.training.micro_batch_size, config.data_parallel_size(training)
    left = replicas - 1
    train = _most(size // micro, left) if left >= floor else left
    if train >= TOLERABLE * left:
        return
    other = _dividing(size // micro, replicas)
    hint = f"; with {other * micro} there are {_most(other, left)}" if _most(other, left) > train else ""
    yield f"`elastic`={floor}: with one data-parallel rank fewer {train} of {left} train, since {DIVIDES}={size}{hint}"


def _dividing(microbatches: int, replicas: int) -> int:
    """The number of micro-batches within a tenth of this one that gives so many replicas, and those that are left when
    up to a sixteenth of them is lost, most of the work."""
    losses = [replicas - replicas * lost // 64 for lost in range(5)]
    near = range(max(1, microbatches * 9 // 10), microbatches * 11 // 10 + 1)
    return max(near, key=lambda number: (sum(_most(number, left) for left in losses), -abs(number - microbatches)))


def _most(microbatches: int, replicas: int) -> int:
    """The largest number of replicas, of so many at most, among which micro-batches are divided evenly."""
    return next(number for number in range(replicas, 0, -1) if microbatches % number == 0)


def _counts(config: Config) -> bool:
    """Whether ranks and samples can be counted: the validator has a line for a size that is not above 0."""
    parallel, training = config.parallel, config.training
    ranks = parallel.tensor_model_parallel_size, parallel.context.context_parallel_size
    samples = training.micro_batch_size, training.global_batch_size
    return all(size is None or size > 0 for size in (*ranks, parallel.pipeline_model_parallel_size, *samples))


def _divides(config: Config, ranks: int) -> bool:
    """Whether all batch sizes come out even."""
    unit = config.training.micro_batch_size * config.data_parallel_size(ranks)
    try:
        return unit > 0 and all(size % unit == 0 for size in config.batch_size_schedule(ranks).sizes)
    except ValueError:
        return True
