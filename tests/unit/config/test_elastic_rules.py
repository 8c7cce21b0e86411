"""`--elastic`: as many replicas as the ranks are enough for, and legal; the others have no place."""

from __future__ import annotations

import itertools

import pytest
from config_arguments import argv, problems_of

from megalite.config import config_problems, parse, parse_with_origins
from megalite.config.elastic import seats
from megalite.errors import ConfigError
from megalite.launch.environment import LaunchEnvironment
from megalite.launch.spares import take_seat

ELASTIC = "--elastic 1 --save run --auto-resume --global-batch-size 12"


TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize("layout", ["", TP, PP, f"{TP} {PP} --zero-stage 1"])
def test_the_largest_legal_number_of_ranks_trains(layout: str) -> None:
    """Compared with trying every number, in the order of the numbers, with the validator."""
    plain = f"--global-batch-size 12 {layout}"
    for hosts, local in itertools.product((1, 2, 3), (1, 2, 3, 4)):
        config = parse(argv("--global-batch-size 12"))
        legal = []
        for ranks in range(1, hosts * local + 1):
            try:
                config = parse(argv(plain), world_size=ranks)
            except ConfigError:
                continue
            if ranks <= seats(hosts * local, local, config.parallel.tensor_model_parallel_size):
                assert not config_problems(config, ranks)
                legal.append(ranks)
        if legal:
            chosen = parse_with_origins(argv(f"{ELASTIC} {layout}"), world_size=hosts * local, local_size=local).ranks
            assert chosen == legal[-1], (hosts, local)
        else:
            assert problems_of(argv(f"{ELASTIC} {layout}"), world_size=hosts * local)[0].startswith("world size")


@pytest.mark.parametrize(
    ("hosts", "local", "together", "ranks", "places"),
    [
        (2, 3, 2, 4, [0, 1, None, 2, 3, None]),
        (2, 3, 2, 2, [0, 1, None, None, None, None]),
        (3, 1, 2, 2, [0, 1, None]),
        (2, 4, 1, 6, [0, 1, 2, 3, 4, 5, None, None]),
        (2, 2, 1, 4, [0, 1, 2, 3]),
    ],
)
def test_groups_stay_on_their_host(hosts: int, local: int, together: int, ranks: int, places: list[int | None]) -> None:
    started = [LaunchEnvironment("torchrun", n, hosts * local, n % local, local) for n in range(hosts * local)]
    taken = [take_seat(place, ranks, together) for place in started]
    assert [None if place is None else place.rank for place in taken] == places
    for place, before in zip(taken, started, strict=True):
        if place is not None:
            here = [other for other, at in zip(taken, started, strict=True) if at.rank // local == before.rank // local]
            assert (place.size, place.local_rank) == (ranks, before.local_rank)
            assert place.local_size == sum(other is not None for other in here)


def test_ranks_that_are_dealt_out_over_hosts_have_no_groups() -> None:
    with pytest.raises(ConfigError, match="--elastic: rank 1 is number 0 of 2 on its host; start as many ranks on eve"):
        take_seat(LaunchEnvironment("srun", 1, 4, 0, 2), 2, 2)


@pytest.mark.parametrize(
    ("flags", "world", "line"),
    [
        (ELASTIC.replace("1", "2", 1), 1, "--elastic=2: 1 ranks give 1 data-parallel ranks of 1; start more of them, "),
        ("--elastic 1 --global-batch-size 2", 2, "--elastic=1: the next attempt would begin anew; add --save DIR "),
        ("--elastic 1 --save a --auto-resume", 2, "--elastic=1: the global batch would grow and shrink with the ranks"),
        ("--max-restarts 2 --save a --auto-resume", 2, "--max-restarts=2: restarts the ranks of --nprocs; torchrun"),
        ("--max-restarts 2 --nprocs 2", None, "--max-restarts=2: the next attempt would begin anew; add --save DIR "),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(flags: str, world: int | None, line: str) -> None:
    (problem,) = problems_of(argv(flags), world_size=world)
    assert problem.startswith(line)


def test_local_ranks_without_a_place_are_not_started() -> None:
    parsed = parse_with_origins(argv(f"{ELASTIC} --nprocs 3 --tensor-model-parallel-size 2"))
    assert (parsed.ranks, parsed.config.parallel.nprocs) == (2, 2)


def test_a_batch_that_leaves_half_of_the_ranks_idle_after_a_loss_is_named() -> None:
    """64 hosts of one tensor-parallel group each: 1,024 samples go to 32 of 63 replicas, 960 to 60."""
    flags = "--elastic 60 --save run --auto-resume --tensor-model-parallel-size 8 --num-attention-heads 8"
    for batch, hosts, train, line in (
        (1024, 64, 64, "with one data-parallel rank fewer 32 of 63 train, since"),
        (960, 64, 64, ""),
        (960, 63, 60, ""),
        (960, 60, 60, ""),
    ):
        found = parse_with_origins(argv(f"{flags} --global-batch-size {batch}"), world_size=8 * hosts, local_size=8)
        assert found.ranks == 8 * train
        told = [doubt for doubt in found.warnings if "one data-parallel rank fewer" in doubt]
        assert len(told) == bool(line) and all(line in doubt for doubt in told)
        assert all(doubt.endswith("--global-batch-size=1024; with 960 there are 60") for doubt in told)
    (line,) = problems_of(argv(f"{flags} --global-batch-size 1024"), world_size=504)
    assert line.endswith("must divide --global-batch-size=1024; use 1020, or lower it")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--micro-batch-size 0", "--micro-batch-size=0: must be >= 1; try 1"),
        ("--global-batch-size -1", "--global-batch-size=-1: must be >= 1; try 1"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size=0: must be >= 1; try 1"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size=0: must be >= 1; try 1"),
        ("--stage-meshes 2x1,1x1", "--stage-meshes=2x1,1x1: 3 ranks in all, the world has 8; use --nprocs 3, or"),
    ],
)
@pytest.mark.parametrize("floor", [1, 9])
def test_sizes_that_count_nothing_are_named(flags: str, line: str, floor: int) -> None:
    found = problems_of(argv(f"{ELASTIC} --elastic {floor} --num-layers 4 {flags}"), 8)
    assert found[0].startswith(line)


def test_ranks_without_a_place_are_counted() -> None:
    """7 ranks, a batch of 12: 6 train. Under --nprocs the seventh is not started, else it waits."""
    local = [line for line in parse_with_origins(argv(f"{ELASTIC} --nprocs 7")).warnings if "elastic" in line]
    assert local and "of 7 ranks 6 train" in local[0] and "are not started" in local[0]
    spread = [line for line in parse_with_origins(argv(ELASTIC), world_size=7).warnings if "elastic" in line]
    assert spread and "of 7 ranks 6 train" in spread[0] and "wait as spares" in spread[0]
    assert not [line for line in parse_with_origins(argv(ELASTIC), world_size=6).warnings if " train, as " in line]
