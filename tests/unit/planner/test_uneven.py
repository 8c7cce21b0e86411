"""Stages that differ: the numbers are the smallest that fit, the cuts the best of all, and both run as they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megalite.config import Config
from megalite.config.cli import parse, read_unjudged
from megalite.config.legal import config_problems
from megalite.config.saved import dump_yaml
from megalite.inventory import given_plan, stage_layer_ranges
from megalite.planner.cost import LayerTimes, Roofline
from megalite.planner.hardware import Hardware, load_hardware
from megalite.planner.memory import (
    PlannedStages,
    rank_memory,
)
from megalite.planner.predict import predict, program_of
from megalite.planner.search import SearchResult, search
from megalite.planner.search_space import SEARCHED
from megalite.planner.uneven import MemoryHeadroom, deal, recomputing, recut, smallest_numbers
from megalite.schedule import SCHEDULES, build_program, compact_layout, partition, partition_of, schedule_problems
from megalite.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from megalite.schedule.stage_placement import loop

BASE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --global-batch-size 16 --train-iters 2 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --bf16 --micro-batch-size 1"
)


def _config(extra: str) -> Config:
    config, _ = read_unjudged(f"{BASE} {extra}".split())
    return config


def _hardware(usable: float) -> Hardware:
    return replace(load_hardware("h100"), memory_bytes=usable, reserved_bytes=0.0)


def _room(config: Config, usable: float) -> tuple[MemoryHeadroom, list[range]]:
    program = program_of(config, config.parallel.pipeline_model_parallel_size)
    ranks = config.parallel.pipeline_model_parallel_size
    hardware = _hardware(usable)
    cuts = stage_layer_ranges(config, program)
    room = MemoryHeadroom(config, ranks, program, cuts, given_plan(config), hardware.on_cpu, hardware.usable_bytes)
    return room, cuts


def _totals(config: Config, cuts: list[range]) -> list[float]:
    p = config.parallel.pipeline_model_parallel_size
    run = PlannedStages(config, p, program_of(config, p), cuts, given_plan(config))
    return [rank_memory(run, rank).total for rank in range(p)]


def _full(config: Config) -> Config:
    return replace(config, model=replace(config.model, recompute_granularity="full"))


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "interleaved", "zb-v", "chimera"])
def test_the_numbers_are_the_smallest_that_fit(schedule: str) -> None:
    chunks = " --virtual-pipeline-model-parallel-size 2" if schedule == "interleaved" else ""
    config = _config(f"--vocab-size 512 --pipeline-model-parallel-size 2 --pipeline-schedule {schedule}{chunks}")
    room, cuts = _room(config, 1.0)
    blocks = room.blocks
    choices = list(itertools.product(*(range(count + 1) for count in blocks)))
    needs = {choice: max(_totals(recomputing(config, choice, blocks), cuts)) for choice in choices}
    plain, lean = needs[(0,) * len(blocks)], min(needs.values())
    assert lean < plain
    for share in (0.3, 0.7):
        room, _ = _room(config, lean + share * (plain - lean))
        numbers = smallest_numbers(room)
        assert numbers is not None and any(numbers)
        usable = room.usable_bytes
        assert needs[tuple(numbers)] <= usable
        # every other choice that fits recomputes as many layers or more
        fewest = min(sum(choice) for choice in choices if needs[choice] <= usable)
        slack = 2 if schedule == "chimera" else 1  # stages of a rank share its number; two ranks share a stage
        assert sum(numbers) <= fewest + slack * (schedule not in ("1f1b", "eager-1f1b"))
    assert smallest_numbers(_room(config, 0.5 * lean)[0]) is None
    assert smallest_numbers(_room(config, 1.1 * plain)[0]) == [0] * len(cuts)


def test_early_ranks_recompute_more() -> None:
    config = _config("--vocab-size 512 --pipeline-model-parallel-size 4")
    room, cuts = _room(config, 1.0)
    plain, lean = max(_totals(config, cuts)), max(_totals(_full(config), cuts))
    numbers = smallest_numbers(_room(config, (plain + lean) / 2)[0])
    assert numbers is not None and list(numbers) == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]


def test_the_memory_of_a_stage_is_that_of_its_own_number() -> None:
    config = _config("--vocab-size 512 --pipeline-model-parallel-size 2")
    _, cuts = _room(config, 1.0)
    mixed = _totals(recomputing(config, (3, 1), (4, 4)), cuts)
    for rank, number in enumerate((3, 1)):
        alone = recomputing(config, (number, number), (4, 4))
        assert alone.model.recompute_num_layers == (number,)
        assert mixed[rank] == _totals(alone, cuts)[rank]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peaks_of_memory_are_those_of_a_walk(name: str) -> None:
    """The peak by the few moments that count, against a sum that is carried through every action."""
    from megalite.planner.activations import StageActivations
    from megalite.planner.memory import _peak

    rng = random.Random(name)
    shapes = [
        (p, m, v)
        for p in (2, 3, 4)
        for m in (4, 6, 12, 23)
        for v in (None, 2, 3)
        if not schedule_problems(name, p, m, v)
    ]
    for p, m, v in rng.sample(shapes, min(8, len(shapes))):
        program = build_program(name, p, m, v)
        kept = {stage: StageActivations(*(rng.uniform(0, 9) for _ in range(5))) for stage in range(program.num_stages)}
        transient = rng.uniform(0, 9)
        for rank in range(p):
            now, most = 0.0, 0.0
            for index in range(2 if program.asynchronous else 1):
                batch = program.batch(index, last=index == 1 or not program.asynchronous)
                for action in program.actions_for_batch(rank, batch):
                    for part in sorted(action.computations(), key=lambda part: part.kind != FORWARD):
                        of = kept[part.stage]
                        again = part.stage in program.recomputed
                        now += {
                            FORWARD: of.boundary if again else of.total,
                            RECOMPUTE: of.total - of.boundary,
                            BACKWARD: -of.total,
                            BACKWARD_INPUT: of.weight_only - of.total,
                            BACKWARD_WEIGHT: -of.weight_only,
                        }[part.kind]
                        if part.kind in (FORWARD, RECOMPUTE):
                            most = max(most, now + transient)
                        elif part.kind == BACKWARD_INPUT:
                            most = max(most, now + max(0.0, transient - of.weight_only_block))
            own = {stage: kept[stage] for stage, _ in program.placement.stages_of(rank)}
            assert sum(_peak(program, rank, own, transient)) == pytest.approx(most)


def test_layers_are_dealt_with_the_least_slowest_stage() -> None:
    rng = random.Random(3)
    for _ in range(200):
        stages, total = rng.randint(1, 4), rng.randint(2, 9)
        options = [range(rng.randint(0, 1), total + 1) for _ in range(stages)]
        table = {key: rng.randint(0, 9) for key in itertools.product(range(stages), range(total + 1), range(total + 1))}

        def seconds(stage: int, begin: int, count: int, table: dict[Any, int] = table) -> float | None:
            return table[stage, begin, count] + count if table[stage, begin, count] else None  # some do not fit

        def costs(way: Sequence[int], seconds: Any = seconds) -> list[Any]:
            return [seconds(s, sum(way[:s]), n) for s, n in enumerate(way)]

        ways = [way for way in itertools.product(*options) if sum(way) == total and None not in costs(way)]
        counts = deal(options, seconds, total)
        if not ways:
            assert counts is None
            continue
        assert counts is not None and sum(counts) == total
        assert max(costs(counts)) == min(max(costs(way)) for way in ways)


def test_a_cut_is_written_as_it_is_read() -> None:
    rng = random.Random(5)
    for _ in range(200):
        counts = [rng.randint(0, 2), *(rng.choice([1, 3, 3, 12]) for _ in range(rng.randint(0, 9))), rng.randint(0, 2)]
        cut = partition_of(sum(counts), counts)
        text = compact_layout(cut)
        assert partition(sum(counts), loop(len(counts)), layout=text) == cut
    assert compact_layout(partition_of(94, [5, *[6] * 14, 5])) == "Et*5|(t*6|)*14t*5L"


def _search(config: Config, devices: int, usable: float, *searched: str) -> SearchResult:
    hardware = _hardware(usable)
    return search(config, devices, hardware, Roofline(hardware), given=frozenset(SEARCHED) - set(searched))


def test_the_search_recomputes_where_memory_binds() -> None:
    config = _config("--vocab-size 512 --pipeline-model-parallel-size 4")
    _, cuts = _room(config, 1.0)
    plain, lean = max(_totals(config, cuts)), max(_totals(_full(config), cuts))
    usable = lean + 0.6 * (plain - lean)
    found = _search(config, 4, usable, "recompute_granularity")
    best = found.predictions[0]
    assert len(best.config.model.recompute_num_layers or ()) == 4
    assert best.memory_bytes <= usable and not config_problems(best.config, 4)
    whole = predict(_full(config), 4, _hardware(usable), Roofline(_hardware(usable)))
    assert best.step_time < whole.step_time
    # what the user gave stays
    given = _search(_full(config), 4, usable)
    assert [p.config.model for p in given.predictions] == [_full(config).model]


def test_cuts_follow_the_costs_of_the_ends(tmp_path) -> None:
    """A vocabulary that weighs more than a layer in memory and time: the stage of the head gives layers away."""
    config = _config("--vocab-size 65536 --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2")
    even = _search(config, 2, 80e9)
    cut = even.predictions[0]
    base = predict(config, 2, _hardware(80e9), Roofline(_hardware(80e9)))
    assert (
        cut.config.parallel.stage_layout.pipeline_model_parallel_layout is not None and cut.step_time < base.step_time
    )
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(cut.config))
    assert parse(["--config", str(path)], world_size=2) == cut.config
    program = program_of(cut.config, 2)
    layers = [len(range(max(1, c.start), min(9, c.stop))) for c in stage_layer_ranges(cut.config, program)]
    assert sum(layers) == 8 and layers[0] > layers[1]
    # a given cut stays
    kept = _config(f"{'--vocab-size 65536'} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4")
    plans = [p.config.parallel for p in _search(kept, 2, 80e9).predictions]
    layouts = [p.stage_layout for p in plans]
    assert [(a.pipeline_model_parallel_layout, a.decoder_first_pipeline_num_layers) for a in layouts] == [(None, 4)]


def test_the_time_source_says_what_a_layer_costs() -> None:
    """Whatever the FLOPs are: an embedding as slow as a layer, a head as slow as three (as a profile may find them)."""
    config = _config("--vocab-size 512 --pipeline-model-parallel-size 2")
    room, _ = _room(config, 80e9)
    measured = [LayerTimes(1.0, 1.0, 1.0)] * 9 + [LayerTimes(3.0, 3.0, 3.0)]
    found = recut(room, measured, flexible=False)
    assert found is not None and found[0].parallel.stage_layout.pipeline_model_parallel_layout == "Et*5|t*3L"
    assert found[1] == [range(0, 6), range(6, 10)]


def _ways(total: int, parts: int) -> list[tuple[int, ...]]:
    return [
        way for way in itertools.product(range(total + 1), repeat=parts) if sum(way) == total and 0 not in way[1:-1]
    ]


@pytest.mark.parametrize("vocabulary", [512, 16384])
def test_no_other_cut_would_be_much_faster(vocabulary: int) -> None:
    """Every way to deal the layers, with the fewest recomputed layers that fit, simulated."""
    config = _config(f"--vocab-size {vocabulary} --pipeline-model-parallel-size 3")
    _, cuts = _room(config, 1.0)
    plain, lean = max(_totals(config, cuts)), max(_totals(_full(config), cuts))
    usable = lean + 0.4 * (plain - lean)
    (room, _), hardware = _room(config, usable), _hardware(usable)
    times = []
    for counts in _ways(8, 3):
        stages = partition_of(8, counts)
        numbers = smallest_numbers(replace(room, cuts=stages))
        if numbers is not None:
            tried = recomputing(config, numbers, counts)
            times.append(predict(tried, 3, hardware, Roofline(hardware), stages).step_time)
    assert len(times) > 2
    found = _search(config, 3, usable, "recompute_granularity").predictions[0]
    assert min(times) <= found.step_time * (1 + 1e-9) <= 1.05 * min(times)


def test_a_cut_may_be_the_only_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.planner.memory.PRODUCT_WORKSPACE", 0)  # more than all of this model
    config = _config("--vocab-size 512 --pipeline-model-parallel-size 4 --seq-length 512")
    _, cuts = _room(config, 1.0)
    totals = _totals(config, cuts)
    usable = max(totals) * 0.97
    found = _search(config, 4, usable)
    assert found.rejected and found.predictions
    for prediction in found.predictions:
        assert prediction.config.parallel.stage_layout.pipeline_model_parallel_layout is not None
        assert prediction.memory_bytes <= usable and not config_problems(prediction.config, 4)


def test_a_plan_with_uneven_stages_is_read_back(tmp_path) -> None:
    config = recomputing(_config("--vocab-size 512 --pipeline-model-parallel-size 2"), (3, 1), (4, 4))
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(config))
    again = parse(["--config", str(path)], world_size=2, check_files=False)
    assert again.model == config.model
