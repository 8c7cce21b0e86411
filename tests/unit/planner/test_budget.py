"""A budget of device memory is kept with as little as it takes: few recomputed layers, few states, few transfers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config, dump_yaml, parse
from megalite.errors import ConfigError
from megalite.inventory import (
    DEFAULT_PLAN,
    MemoryPlan,
    Recompute,
    given_plan,
    stage_layer_ranges,
)
from megalite.planner import (
    SEARCHED,
    PlannedStages,
    RankMemory,
    Roofline,
    load_hardware,
    pipeline_memory,
    program_of,
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


def ranks_of(config: Config, plan: MemoryPlan | None = None) -> tuple[RankMemory, ...]:
    program = program_of(config, 4, plan or DEFAULT_PLAN)
    return pipeline_memory(
        PlannedStages(config, 4, program, stage_layer_ranges(config, program), plan or given_plan(config))
    )


def totals(config: Config, plan: MemoryPlan | None = None) -> list[float]:
    return [rank.total for rank in ranks_of(config, plan)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2"])
def test_states_leave_first_then_activations_then_nothing_is_enough(schedule: str) -> None:
    free = max(totals(config_of(schedule, 1)))
    seen = set()
    for share in range(100, 4, -12):
        budget = free * share / 99.99
        config = config_of(schedule, budget / 1e9)
        try:
            plan = within_budget(config, 4, on_cpu=False)
        except ConfigError as error:
            enough = re.search(r"host and activations that come and go; ([\d.e+-]+) are, or use", str(error))
            assert enough is not None and 1e9 * float(enough[1]) > budget
            config = config_of(schedule, 1.01 * float(enough[1]))
            assert max(totals(config, within_budget(config, 4, on_cpu=False))) < free
            seen.add("refused")
            continue
        assert max(totals(config, plan)) <= budget
        assert plan.room is None or plan.fraction == 1
        assert share < 100 or (plan.fraction == 0 and plan.room is None)
        if plan.room is not None:
            program = program_of(config, 4, plan)
            validate(program)
            cuts = stage_layer_ranges(config, program)
            rows = dict(startup_rows(PlannedStages(config, 4, program, cuts, plan)))
            transfers = max(sum(a.kind in ("EVICT", "PREFETCH") for a in actions) for actions in program.unroll(1))
            assert f"{transfers} transfers a batch" in rows["budget"]
            seen.add("activations")
        elif plan.fraction:
            assert max(totals(config, replace(plan, fraction=max(plan.fraction - 0.02, 0.0)))) > budget
            seen.add("states")
    assert seen >= {"states", "refused"} and (schedule != "gpipe" or "activations" in seen)


def on_host(config: Config, plan: MemoryPlan) -> float:
    return max(rank.host for rank in ranks_of(config, plan))


def within(*words: object) -> tuple[Config, MemoryPlan]:
    """What `config_of` gives, and what is decided for it."""
    config = config_of(*words)  # type: ignore[arg-type]  # a few words of flags
    return config, within_budget(config, 4, on_cpu=False)


@pytest.fixture(autouse=True)
def products_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS takes is more than all of models as small as these."""
    monkeypatch.setattr("megalite.planner.memory.PRODUCT_WORKSPACE", 0)


def test_what_the_host_has_no_room_for_goes_into_files(tmp_path: Path) -> None:
    free = max(totals(config_of("1f1b", 1)))
    budget, small = 0.6 * free / 1e9, "--recompute-granularity none --ddp-bucket-size 20000"
    folder = f"{small} --optimizer-offload-path {tmp_path}"
    host, file = within("1f1b", budget, small), within("1f1b", budget, folder)
    assert 0 < host[1].fraction == file[1].fraction == file[1].file_fraction < 1 and not host[1].file_fraction
    least, most = on_host(*file), on_host(*host)  # what travels, and that with the states
    for share in (0.95, 0.5, 0.1):
        room = least + share * (most - least)
        limited = f"--host-memory-budget-gb {room / 1e9!r}"
        config, plan = within("1f1b", budget, f"{folder} {limited}")
        assert plan.fraction == file[1].fraction and 0 < plan.file_fraction <= file[1].file_fraction
        assert max(totals(config, plan)) <= 1e9 * budget and on_host(config, plan) <= room
        assert on_host(config, replace(plan, file_fraction=plan.file_fraction - 0.01)) > room
        program = program_of(config, 4)
        cuts = stage_layer_ranges(config, program)
        row = dict(startup_rows(PlannedStages(config, 4, program, cuts, plan), "GPU"))["budget"]
        assert re.search(r"masters and moments: [\d.]+ MB of a rank on its host and [\d.]+ MB of a rank in a file", row)
        with pytest.raises(ConfigError, match=r"are needed; give as much, or a folder .*--optimizer-offload-path=DIR"):
            within_budget(config_of("1f1b", budget, f"{small} {limited}"), 4, on_cpu=False)
    enough = f"{folder} --host-memory-budget-gb {1.01 * most / 1e9}"
    assert within("1f1b", budget, enough)[1].file_fraction == 0
    with pytest.raises(ConfigError, match="are needed for what no file takes; give as much, or a larger --device"):
        within_budget(config_of("1f1b", budget, f"{folder} --host-memory-budget-gb {least / 2e9}"), 4, on_cpu=False)
    assert within("1f1b", 1.01 * free / 1e9, folder)[1].fraction == 0, "nothing has to leave"


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
            best = found.predictions[0]
            assert best.plan == within_budget(config, 4, on_cpu=False) and best.config == config
        else:
            assert "for what no file takes" in found.problems[0]


def test_the_fewest_layers_are_recomputed() -> None:
    plain = config_of("1f1b", 1)
    free, least = totals(plain), totals(config_of("1f1b", 1, "--recompute-granularity full"))
    for share in (0.8, 0.5, 0.2):
        budget = max(least) + share * (max(free) - max(least))
        config, plan = within("1f1b", budget / 1e9, "--recompute-granularity auto")
        numbers = [each.number for each in plan.recompute]
        assert max(totals(config, plan)) <= budget and plan.fraction == 0
        assert len(numbers) == 4 and numbers[0] >= numbers[-1]
        for rank, number in enumerate(numbers):
            if number:
                fewer = tuple(Recompute("block", n - (s == rank)) for s, n in enumerate(numbers))
                assert totals(config, replace(plan, recompute=fewer))[rank] > budget
    assert within("1f1b", 1, "--recompute-granularity auto")[1] == DEFAULT_PLAN


def by_brute_force(config: Config, budget: float) -> tuple[int, tuple[int, ...]] | None:
    """(Hundredths of the masters and moments on the host, recomputed layers of each stage of two): nothing moved where
    any numbers allow it, else the fewest layers beside all of them and then the fewest hundredths."""

    def totals_at(hundredths: int, number: int) -> list[float]:
        model = config.model if not number else replace(
            config.model, recompute_granularity="full", recompute_method="block", recompute_num_layers=(number,) * 4
        )  # fmt: skip
        offload = replace(config.optimizer.offload, optimizer_cpu_offload=hundredths > 0,
                          optimizer_offload_fraction=hundredths / 100 or 1.0)  # fmt: skip
        return totals(replace(config, model=model, optimizer=replace(config.optimizer, offload=offload)))

    def fewest(hundredths: int) -> tuple[int, ...] | None:
        rows = [totals_at(hundredths, number) for number in (0, 1, 2)]
        found = [[n for n in (0, 1, 2) if rows[n][rank] <= budget] for rank in range(4)]
        return tuple(min(each) for each in found) if all(found) else None

    alone, beside = fewest(0), fewest(100)
    if alone is not None or beside is None:
        return None if alone is None else (0, alone)
    fits = (h for h in range(101) if all(totals_at(h, n)[rank] <= budget for rank, n in enumerate(beside)))
    return next(fits), beside


@pytest.mark.parametrize("bucket", ["", pytest.param("--ddp-bucket-size 20000", marks=pytest.mark.landing)])
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
        _, found = within("1f1b", budget / 1e9, auto)
        assert found.fraction == hundredths / 100, (share, expected)
        blocks = [2 if how.method == "uniform" else how.number for how in found.recompute]
        assert tuple(blocks * 4)[:4] == numbers, (share, expected)
        kinds.add((hundredths > 0, any(numbers)))
        if hundredths and not any(numbers):
            assert budget < least, "no number of recomputed layers would have done alone"
            _, alone = within("1f1b", budget / 1e9, f"{bucket} --recompute-granularity none")
            assert alone == found, "the same as without auto"
    assert kinds >= {(False, False), (False, True), (True, False), (True, True)}, kinds


def test_a_budget_alone_recomputes_and_a_granularity_that_is_given_stays() -> None:
    """With `auto` given and with nothing given the same is decided; other kinds are what the user said."""
    free = totals(config_of("1f1b", 1))
    budget = 0.85 * max(free) / 1e9
    kinds = ("auto", "", "none", "selective", "full")
    found = [within("1f1b", budget, f"--recompute-granularity {kind}" if kind else "") for kind in kinds]
    automatic, alone, none, selective, full = (plan for _, plan in found)
    assert alone == automatic and sum(how.number for how in alone.recompute) > 0
    assert alone.fraction == 0 < none.fraction
    assert none.recompute == selective.recompute == (Recompute(),) and full.recompute == (Recompute("uniform", 1),)
    assert all(max(totals(config, plan)) <= 1e9 * budget for config, plan in found)


@pytest.mark.parametrize("kind", ["none", None])
def test_what_is_saved_of_a_run_is_what_was_given(kind: str | None, tmp_path: Path) -> None:
    """`config.yaml` of a run under one budget, with another: decided anew, and `none` is still none."""
    free = max(totals(config_of("1f1b", 1)))
    flags = "" if kind is None else f"--recompute-granularity {kind}"
    config, plan = within("1f1b", 0.85 * free / 1e9, flags)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    again = parse(["--config", str(path)], world_size=4)
    assert again == config and again.model.recompute_granularity == kind
    assert within_budget(again, 4, on_cpu=False) == plan != DEFAULT_PLAN
    less = parse(["--config", str(path), "--device-memory-budget-gb", str(0.7 * free / 1e9)], world_size=4)
    decided = within_budget(less, 4, on_cpu=False)
    assert decided == within("1f1b", 0.7 * free / 1e9, flags)[1] and (decided != plan or kind == "none")
    assert kind != "none" or decided.recompute == (Recompute(),)


@pytest.mark.parametrize("more", ["--cpu-offloading-num-layers 1", "--pipeline-schedule shifted-critical-path"])
def test_where_layers_cannot_be_recomputed_a_budget_alone_does_without(more: str) -> None:
    free = max(totals(config_of("1f1b", 1, more)))
    alone, none = (
        within("1f1b", 0.9 * free / 1e9, f"{more} {kind}")[1] for kind in ("", "--recompute-granularity none")
    )
    assert alone == none and alone.recompute == (Recompute(),) and alone.fraction > 0


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
    assert best.plan.room is not None and best.memory_bytes <= 1.05e9 * enough < free
    slow = replace(hardware, host_link=hardware.intra_node.bandwidth / 1000)
    slower = search(config, 4, slow, Roofline(slow), given=frozenset(SEARCHED)).predictions[0]
    assert slower.breakdown["pipeline"] > 1.5 * best.breakdown["pipeline"]
