"""`--elastic`: how many of the ranks that were started train.

tp, pp, cp, ep never change; dp = the largest d for which the layout is legal with tp x cp x pp x d ranks

3 hosts of 4 ranks, tp 2, pp 2:   0 1 | 2 3    4 5 | 6 7    8 9 | 10 11      d = 3
a host is lost:                   0 1 | 2 3    4 5 | 6 7                     d = 2
global batch 9:                   0 1 | 2 3    4 5 | 6 7    + + | +  +       d = 1, or 3: it must divide the batch
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.legal import config_problems
from megalite.config.root import Config

MOST_TRIALS = 8


def training_ranks(config: Config, started: int, local_size: int) -> int:
    """Ranks that train, of those that were started, `local_size` on a host. Where no number is legal, one of which the
    validator says what is wrong."""
    together, stages = ranks_together(config), config.parallel.pipeline_model_parallel_size
    groups = seats(started, local_size, together) // together
    most = groups // stages
    if most == 0:
        return started
    legal = [d for d in range(most, 0, -1) if _divides(config, together * stages * d)]
    for d in legal[:MOST_TRIALS]:
        if not config_problems(config, together * stages * d):
            return together * stages * d
    return together * stages * (legal[0] if legal else most)


def ranks_together(config: Config) -> int:
    """Ranks that share a layer or a sequence, and stay on one host where that has room for them."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.context.context_parallel_size


def seats(started: int, local_size: int, together: int) -> int:
    """Ranks that can train if groups of `together` stay on a host."""
    if together > local_size:
        return started // together * together
    return started // local_size * (local_size // together * together)


def elastic_problems(config: Config, started: int, training: int) -> Iterator[str]:
    """Too few replicas, and a batch that would change with them."""
    floor = config.parallel.restarts.elastic
    if floor is None:
        return
    if config.training.global_batch_size is None and config.training.batch_ramp.step_batch_size_schedule is None:
        yield f"`elastic`={floor}: the global batch would grow and shrink with the ranks; add `global_batch_size`"
    replicas = config.data_parallel_size(training)
    if replicas < floor:
        yield (
            f"`elastic`={floor}: {started} ranks give {replicas} data-parallel ranks of "
            f"{config.parallel.model_parallel_size}; start more of them, or lower it"
        )


def _divides(config: Config, ranks: int) -> bool:
    """Whether all batch sizes come out even."""
    unit = config.training.micro_batch_size * config.data_parallel_size(ranks)
    try:
        return all(size % unit == 0 for size in config.batch_size_schedule(ranks).sizes)
    except ValueError:
        return True
