"""A budget of device memory is kept with as little as it takes: few recomputed layers, few states, few transfers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config, parse
from megalite.errors import ConfigError
from megalite.inventory import stage_layer_ranges
from megalite.planner import (
    SEARCHED,
    Roofline,
    load_hardware,
    program_of,
    rank_memory,
    search,
    startup_rows,
    within_budget,
)
from megalite.schedule import validate

BASE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --global-batch-size 16 --train-iters 2 "
    "--lr 1e-3 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 512 --bf16 "
    "--pipeline-model-parallel-size 4 --pipeline-schedule"
)


def config_of(schedule: str, gigabytes: float, more: str = "--recompute-granularity none") -> Config:
    flags = f"{BASE} {schedule} --device-memory-budget-gb {gigabytes} {more}".split()
    return parse(flags, world_size=4)


def totals(config: Config) -> list[float]:
    program = program_of(config, 4)
    cuts = stage_layer_ranges(config, program)
    return [rank_memory(config, 4, program=program, cuts=cuts, rank=rank).total for rank in range(4)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2"])
def test_states_leave_first_then_activations_then_nothing_is_enough(schedule: str) -> None:
    free = max(totals(config_of(schedule, 1)))
    seen = set()
    for share in range(100, 4, -12):
        budget = free * share / 99.99
        try:
            config = within_budget(config_of(schedule, budget / 1e9), 4, on_cpu=False)
        except ConfigError as error:
            enough = re.search(r"host and activations that come and go; ([\d.e+-]+) are, or use", str(error))
            assert enough is not None and 1e9 * float(enough[1]) > budget
            assert max(totals(within_budget(config_of(schedule, 1.01 * float(enough[1])), 4, on_cpu=False))) < free
            seen.add("refused")
            continue
        assert max(totals(config)) <= budget
        fraction = config.optimizer.offload.fraction
        assert config.room is None or fraction == 1
        assert share < 100 or (fraction == 0 and config.room is None)
        if config.room is not None:
            program = program_of(config, 4)
            validate(program)
            rows = dict(startup_rows(config, 4, program=program, cuts=stage_layer_ranges(config, program)))
            transfers = max(sum(a.kind in ("EVICT", "PREFETCH") for a in actions) for actions in program.unroll(1))
            assert f"{transfers} transfers a batch" in rows["budget"]
            seen.add("activations")
        elif fraction:
            offload = replace(config.optimizer.offload, optimizer_offload_fraction=max(fraction - 0.02, 0.0))
            offload = replace(offload, optimizer_cpu_offload=fraction > 0.02)
            less = replace(config, optimizer=replace(config.optimizer, offload=offload))
            assert max(totals(less)) > budget
            seen.add("states")
    assert seen >= {"states", "refused"} and (schedule != "gpipe" or "activations" in seen)


def on_host(config: Config) -> float:
    program = program_of(config, 4)
    cuts = stage_layer_ranges(config, program)
    return max(rank_memory(config, 4, program=program, cuts=cuts, rank=rank).host for rank in range(4))


def test_what_the_host_has_no_room_for_goes_into_files(tmp_path: Path) -> None:
    free = max(totals(config_of("1f1b", 1)))
    budget, small = 0.6 * free / 1e9, "--recompute-granularity none --ddp-bucket-size 20000"
    folder = f"{small} --optimizer-offload-path {tmp_path}"
    host = within_budget(config_of("1f1b", budget, small), 4, on_cpu=False)
    file = within_budget(config_of("1f1b", budget, folder), 4, on_cpu=False)
    assert 0 < host.optimizer.offload.fraction == file.optimizer.offload.fraction == file.file_fraction < 1
    least, most = on_host(file), on_host(host)  # what travels, and that with the states
    for share in (0.95, 0.5, 0.1):
        room = least + share * (most - least)
        limited = f"--host-memory-budget-gb {room / 1e9!r}"
        config = within_budget(config_of("1f1b", budget, f"{folder} {limited}"), 4, on_cpu=False)
        assert config.optimizer.offload == file.optimizer.offload and 0 < config.file_fraction <= file.file_fraction
        assert max(totals(config)) <= 1e9 * budget and on_host(config) <= room
        assert config.in_file is not None and on_host(replace(config, in_file=config.in_file - 0.01)) > room
        program = program_of(config, 4)
        cuts = stage_layer_ranges(config, program)
        row = dict(startup_rows(config, 4, program=program, cuts=cuts, device="GPU"))["budget"]
        assert re.search(r"masters and moments: [\d.]+ MB of a rank on its host and [\d.]+ MB of a rank in a file", row)
        with pytest.raises(ConfigError, match=r"are needed; give as much, or a folder .*--optimizer-offload-path=DIR"):
            within_budget(config_of("1f1b", budget, f"{small} {limited}"), 4, on_cpu=False)
    enough = f"{folder} --host-memory-budget-gb {1.01 * most / 1e9}"
    assert within_budget(config_of("1f1b", budget, enough), 4, on_cpu=False).file_fraction == 0
    with pytest.raises(ConfigError, match="are needed for what no file takes; give as much, or a larger --device"):
        within_budget(config_of("1f1b", budget, f"{folder} --host-memory-budget-gb {least / 2e9}"), 4, on_cpu=False)
    spacious = within_budget(config_of("1f1b", 1.01 * free / 1e9, folder), 4, on_cpu=False)
    assert spacious.optimizer.offload.fraction == 0, "nothing has to leave"


def test_the_plan_says_what_goes_into_files(tmp_path: Path) -> None:
    free = max(totals(config_of("1f1b", 1)))
    hardware = replace(load_hardware("a100-80gb"), memory_bytes=0.6 * free, reserved_bytes=0.0)
    flags = f"--recompute-granularity none --ddp-bucket-size 20000 --optimizer-offload-path {tmp_path} "
    flags += "--host-memory-budget-gb"
    for gigabytes, fits in ((0.02, True), (1e-4, False)):
        config = config_of("1f1b", 0.6 * free / 1e9, f"{flags} {gigabytes}")
        found = search(config, 4, hardware, Roofline(hardware), given=frozenset(SEARCHED))
        assert bool(found.predictions) == fits
        if fits:
            assert found.predictions[0].config == within_budget(config, 4, on_cpu=False)
        else:
            assert "for what no file takes" in found.problems[0]


def test_the_fewest_layers_are_recomputed() -> None:
    plain = config_of("1f1b", 1)
    free, least = totals(plain), totals(config_of("1f1b", 1, "--recompute-granularity full"))
    for share in (0.8, 0.5, 0.2):
        budget = max(least) + share * (max(free) - max(least))
        config = within_budget(config_of("1f1b", budget / 1e9, "--recompute-granularity auto"), 4, on_cpu=False)
        numbers = config.model.recompute_num_layers
        assert max(totals(config)) <= budget and config.optimizer.offload.fraction == 0
        assert numbers is not None and len(numbers) == 4 and numbers[0] >= numbers[-1]
        for rank, number in enumerate(numbers):
            if number:
                fewer = tuple(n - (s == rank) for s, n in enumerate(numbers))
                assert totals(replace(config, model=replace(config.model, recompute_num_layers=fewer)))[rank] > budget
    whole = within_budget(config_of("1f1b", 1, "--recompute-granularity auto"), 4, on_cpu=False)
    assert whole.model.recompute_granularity is None


def rank_totals(config: Config) -> list[float]:
    program, cuts = program_of(config, 4), stage_layer_ranges(config, program_of(config, 4))
    return [rank_memory(config, 4, program=program, cuts=cuts, rank=rank).total for rank in range(4)]


def by_brute_force(config: Config, budget: float) -> tuple[int, tuple[int, ...]] | None:
    """(Hundredths of the masters and moments on the host, recomputed layers of each stage of two): nothing moved where
    any numbers allow it, else the fewest layers beside all of them and then the fewest hundredths."""

    def totals_at(hundredths: int, number: int) -> list[float]:
        model = config.model if not number else replace(
            config.model, recompute_granularity="full", recompute_method="block", recompute_num_layers=(number,) * 4
        )  # fmt: skip
        offload = replace(config.optimizer.offload, optimizer_cpu_offload=hundredths > 0,
                          optimizer_offload_fraction=hundredths / 100 or 1.0)  # fmt: skip
        return rank_totals(replace(config, model=model, optimizer=replace(config.optimizer, offload=offload)))

    def fewest(hundredths: int) -> tuple[int, ...] | None:
        rows = [totals_at(hundredths, number) for number in (0, 1, 2)]
        found = [[n for n in (0, 1, 2) if rows[n][rank] <= budget] for rank in range(4)]
        return tuple(min(each) for each in found) if all(found) else None

    alone, beside = fewest(0), fewest(100)
    if alone is not None or beside is None:
        return None if alone is None else (0, alone)
    fits = (h for h in range(101) if all(totals_at(h, n)[rank] <= budget for rank, n in enumerate(beside)))
    return next(fits), beside


@pytest.mark.parametrize("bucket", ["", "--ddp-bucket-size 20000"])
def test_auto_recomputes_and_moves_no_more_than_it_takes(bucket: str) -> None:
    """Also where no number of recomputed layers is enough by itself: then masters move, and often nothing need be
    recomputed."""
    plain = config_of("1f1b", 1, bucket)
    least = max(totals(config_of("1f1b", 1, f"{bucket} --recompute-granularity full")))
    free, kinds = max(totals(plain)), set()
    for share in (1.01, 0.93, 0.85, 0.8, 0.7, 0.62, 0.55, 0.5, 0.47, 0.44, 0.41, 0.38, 0.3):
        budget = share * free
        expected = by_brute_force(plain, budget)
        auto = f"{bucket} --recompute-granularity auto"
        if expected is None:
            with pytest.raises(ConfigError, match="MB are needed, and what recomputation keeps stays where it is"):
                within_budget(config_of("1f1b", budget / 1e9, auto), 4, on_cpu=False)
            continue
        hundredths, numbers = expected
        found = within_budget(config_of("1f1b", budget / 1e9, auto), 4, on_cpu=False)
        assert found.optimizer.offload.fraction == hundredths / 100, (share, expected)
        given = found.model.recompute_num_layers
        blocks = (2,) * 4 if found.model.recompute_method == "uniform" else (given or (0,))
        assert (blocks * 4)[:4] == numbers, (share, expected)
        kinds.add((hundredths > 0, any(numbers)))
        if hundredths and not any(numbers):
            assert budget < least, "no number of recomputed layers would have done alone"
            alone = within_budget(
                config_of("1f1b", budget / 1e9, f"{bucket} --recompute-granularity none"), 4, on_cpu=False
            )
            assert alone.optimizer == found.optimizer, "the same as without auto"
    assert kinds >= {(False, False), (False, True), (True, False), (True, True)}, kinds


def test_a_budget_alone_recomputes_and_a_granularity_that_is_given_stays() -> None:
    """With `auto` given and with nothing given the same is decided; other kinds are what the user said."""
    free = totals(config_of("1f1b", 1))
    budget = 0.85 * max(free) / 1e9
    automatic, alone, none, selective, full = (
        within_budget(config_of("1f1b", budget, f"--recompute-granularity {kind}" if kind else ""), 4, on_cpu=False)
        for kind in ("auto", "", "none", "selective", "full")
    )
    assert alone == automatic and sum(alone.model.recompute_num_layers or ()) > 0
    assert alone.optimizer.offload.fraction == 0 < none.optimizer.offload.fraction
    assert none.model.recompute_granularity is None and none.model.recompute_num_layers is None
    assert selective.model.recompute_granularity == "selective"
    assert (full.model.recompute_granularity, full.model.recompute_num_layers) == ("full", None)
    assert all(max(totals(config)) <= 1e9 * budget for config in (alone, none, selective, full))


@pytest.mark.parametrize("more", ["--cpu-offloading-num-layers 1", "--pipeline-schedule shifted-critical-path"])
def test_where_layers_cannot_be_recomputed_a_budget_alone_does_without(more: str) -> None:
    free = max(totals(config_of("1f1b", 1, more)))
    alone, none = (
        within_budget(config_of("1f1b", 0.9 * free / 1e9, f"{more} {kind}"), 4, on_cpu=False)
        for kind in ("", "--recompute-granularity none")
    )
    assert alone == none and alone.model.recompute_granularity is None and alone.optimizer.offload.fraction > 0


@pytest.mark.parametrize("kind", ["auto", "none"])
def test_a_kind_that_a_budget_is_needed_for(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--recompute-granularity={kind}: needs --device-memory-budget-gb; leave it"
    ):
        parse(f"{BASE} 1f1b --recompute-granularity {kind}".split(), world_size=4)


@pytest.mark.parametrize(
    ("schedule", "more", "why"),
    [
        ("2bw", "--recompute-granularity none", "2bw never drains, so that activations outlive their batch and stay"),
        ("gpipe", "--recompute-granularity full", "what recomputation keeps stays where it is"),
        ("shifted-critical-path", "", "what recomputation keeps stays where it is"),
        ("gpipe", "--recompute-granularity none --compile", "--compile decides what is kept"),
        ("gpipe", "--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers says which activations leave"),
    ],
)
def test_what_cannot_move_is_said(schedule: str, more: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device-memory-budget-gb=0.001: .* are needed, and {why}; give as much"):
        within_budget(config_of(schedule, 0.001, more), 4, on_cpu=False)


def test_the_plan_prices_what_a_budget_moves() -> None:
    config = config_of("gpipe", 1)
    free = max(totals(config))
    with pytest.raises(ConfigError) as error:
        within_budget(config_of("gpipe", 0.1 * free / 1e9), 4, on_cpu=False)
    enough = float(re.findall(r"come and go; ([\d.e+-]+) are", str(error.value))[0])
    config = config_of("gpipe", 1.05 * enough)
    hardware = load_hardware("a100-80gb")
    hardware = replace(hardware, memory_bytes=1.05e9 * enough, reserved_bytes=0.0)
    found = search(config, 4, hardware, Roofline(hardware), given=frozenset(SEARCHED))
    (best,) = found.predictions
    assert best.config.room is not None and best.memory_bytes <= 1.05e9 * enough < free
    slow = replace(hardware, host_link=hardware.intra_node.bandwidth / 1000)
    slower = search(config, 4, slow, Roofline(slow), given=frozenset(SEARCHED)).predictions[0]
    assert slower.breakdown["pipeline"] > 1.5 * best.breakdown["pipeline"]
