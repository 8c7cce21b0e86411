"""Idle time, memory and versions of every schedule equal the formulas of its paper, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from schedule_shapes import uneven

from megalite.schedule import (
    SCHEDULES,
    Action,
    Costs,
    build_program,
    find_schedule,
    schedule_problems,
    schedule_warnings,
    simulate,
)
from megalite.schedule.action import overlap
from megalite.schedule.memory import peak_activations

HALF = Fraction(1, 2)


def cost(f: str, i: str, w: str, c: str = "0") -> Costs:
    return Costs(Fraction(f), Fraction(i), Fraction(w), Fraction(c))


SHAPES = [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16)]
UNEQUAL = [("1", "1", "1"), ("1", "1.2", "0.8"), ("1", "1.4", "0.6"), ("2", "3", "1")]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "dapple", "pipedream-flush"])
@pytest.mark.parametrize(("p", "m"), [*SHAPES, (1, 3), (3, 5), (4, 2)])
def test_gpipe_and_1f1b_idle(name: str, p: int, m: int) -> None:
    for f, i, w in UNEQUAL:
        run = simulate(build_program(name, p, m), cost(f, i, w))
        forward_and_backward = Fraction(f) + Fraction(i) + Fraction(w)
        assert run.idle_per_rank == ((p - 1) * forward_and_backward,) * p
        assert run.bubble_over_ideal == Fraction(p - 1, m)
        assert run.bubble_over_total == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize(("p", "m"), [*SHAPES, (3, 2), (4, 1)])
def test_activations_of_one_chunk_schedules(p: int, m: int) -> None:
    def peak(name: str) -> tuple[Fraction | float, ...]:
        return simulate(build_program(name, p, m)).peak_activations_per_rank

    assert peak("gpipe") == (m,) * p
    assert peak("1f1b") == tuple(min(m, p - r) for r in range(p))
    assert peak("eager-1f1b") == tuple(min(m, 2 * (p - r) - 1) for r in range(p))


@pytest.mark.parametrize(("name", "least"), [("2bw", 2), ("pipedream", None)])
@pytest.mark.parametrize(("p", "m", "batches"), [(4, 4, 10), (2, 1, 5), (3, 2, 6), (8, 8, 3), (1, 2, 3)])
def test_asynchronous_schedules_pay_one_bubble_a_run(
    name: str, least: int | None, p: int, m: int, batches: int
) -> None:
    run = simulate(build_program(name, p, m), batches=batches)
    assert run.idle_per_rank == ((p - 1) * 3,) * p
    assert run.peak_activations_per_rank == tuple(p - r for r in range(p))
    if least is None:
        assert run.weight_versions_per_rank == tuple(p - r for r in range(p))
    else:  # a rank whose STEP stands at the end of its slack needs the old version no longer
        assert max(run.weight_versions_per_rank) == least


def test_2bw_against_flush() -> None:
    """The published example: p = m = 4, ten batches: 9 units of idle time against 90."""
    assert sum(simulate(build_program("2bw", 4, 4), batches=10).idle_per_rank) == 4 * 9
    assert sum(simulate(build_program("1f1b", 4, 4), batches=10).idle_per_rank) == 4 * 90


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_2bw_hides_the_global_norm_in_its_slack(p: int) -> None:
    for m in (p, p + 1, 2 * p):
        program = build_program("2bw", p, m)
        assert simulate(program, batches=6, global_norm=True).makespan == simulate(program, batches=6).makespan
    if p > 2:  # m = p - 1 leaves rank 0 no slack
        tight = build_program("2bw", p, p - 1)
        waiting = simulate(tight, cost("1", "1", "1", "0.5"), batches=6, global_norm=True)
        assert waiting.makespan > simulate(tight, cost("1", "1", "1", "0.5"), batches=6).makespan


@pytest.mark.parametrize("name", ["interleaved", "breadth-first"])
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_chunks_divide_the_bubble(name: str, v: int, p: int, m: int) -> None:
    run = simulate(build_program(name, p, m, v), cost("1", "1.4", "0.6"))
    assert run.idle_per_rank == (Fraction((p - 1) * 3, v),) * p
    chunks = [(v - 1) * p + 2 * (p - 1 - r) + 1 if name == "interleaved" else m * v for r in range(p)]
    assert run.peak_activations_per_rank == tuple(Fraction(count, v) for count in chunks)


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_zb_h1_and_h2(p: int, m: int) -> None:
    for f, i, w in UNEQUAL[:3]:
        costs = cost(f, i, w)
        h1, h2 = simulate(build_program("zb-h1", p, m), costs), simulate(build_program("zb-h2", p, m), costs)
        assert h1.idle_per_rank == ((p - 1) * (costs.forward + costs.backward_input - costs.backward_weight),) * p
        skew = (p - 1) * costs.forward  # the parallelogram: what lies outside a rank's own work
        inside = (p - 1) * (costs.forward + costs.backward_input - 2 * costs.backward_weight)
        assert max(h2.idle_inside_per_rank) == max(inside, 0)
        assert h2.idle_per_rank[0] >= skew - (p - 1) * costs.backward_weight
    for weight_share in (Fraction(0), HALF, Fraction(1)):
        lists = [build_program(name, p, m).unroll(1) for name in ("zb-h1", "zb-h2")]
        peaks = [[peak_activations(actions, weight_share) for actions in each] for each in lists]
        assert peaks[0] == [p - r + r * weight_share for r in range(p)]
        assert peaks[1] == [2 * (p - r) - 1 + 2 * r * weight_share for r in range(p)]


@pytest.mark.parametrize(("p", "m"), [*SHAPES, (3, 5), (1, 4)])
def test_zb_v(p: int, m: int) -> None:
    run = simulate(build_program("zbv", p, m))
    assert run.idle_inside_per_rank == (0,) * p
    assert run.idle_per_rank == (Fraction(p - 1, 2),) * p
    assert run.peak_activations_per_rank == (min(m, p),) * p


def test_zb_v_is_bubble_free_only_at_equal_times() -> None:
    assert max(simulate(build_program("zb-v", 4, 8), cost("1", "1.2", "0.8")).idle_inside_per_rank) == Fraction("1.2")
    assert max(simulate(build_program("zb-v", 4, 8), cost("1", "1.4", "0.6")).idle_inside_per_rank) == Fraction("2.4")


@pytest.mark.parametrize(("p", "f"), [(2, 1), (4, 1), (4, 2), (6, 1), (6, 3), (8, 1), (8, 2), (16, 2)])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_chimera(p: int, f: int, units: int) -> None:
    m = units * p
    program = build_program("chimera", p, m, num_pairs=f)
    run = simulate(program, Costs(Fraction(1), HALF, HALF))
    assert run.idle_per_rank == (Fraction(p - 2 * f, 2 * f) * 2,) * p
    assert run.bubble_over_total == Fraction(p - 2 * f, 2 * f * m + p - 2 * f)
    peaks = run.peak_activations_per_rank
    assert min(peaks) == p - p // (2 * f) + 1
    assert max(peaks) <= p
    assert f != 1 or max(peaks) == p
    assert program.placement.num_replicas == 2 * f


@pytest.mark.parametrize(("p", "f"), [(2, 1), (4, 1), (4, 2), (6, 1), (6, 3), (8, 1), (8, 2), (8, 4), (16, 2)])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_forward_doubling_and_backward_halving(p: int, f: int, units: int) -> None:
    """Li and Hoefler 2021, table 2 at tB = 2 tF, with the two forwards of a slot as one kernel; apart: less."""
    m = 2 * p * units
    program = build_program("chimera-doubling", p, m, num_pairs=f)
    run = simulate(program)
    assert run.idle_per_rank == (Fraction(p - 2 * f, 2 * f) * 3,) * p
    assert max(run.peak_activations_per_rank) == 2 * p
    assert run.peak_activations_per_rank == tuple(peak.full for peak in program.peak_activations)
    merged = simulate(program.with_order(lambda rank, batch: pairs_merged(program.order(rank, batch))))
    assert merged.idle_per_rank == (Fraction(p - 2 * f, f) * 2,) * p
    assert merged.bubble_over_total == Fraction(p - 2 * f) / (Fraction(3 * m * f, 2) + p - 2 * f)
    units_apart = simulate(build_program("chimera", p, m, num_pairs=f))
    assert p == 2 * f or run.makespan < units_apart.makespan


def pairs_merged(actions: list[Action]) -> list[Action]:
    """Two forwards of a slot as one action, which takes as long as both."""
    merged: list[Action] = []
    for action in actions:
        if action.kind == "F" and action.microbatch % 2:
            merged[-1] = overlap(merged[-1], action)
        else:
            merged.append(action)
    return merged


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_dualpipe_v(p: int, m: int) -> None:
    run = simulate(build_program("dualpipe-v", p, m))
    chunk = HALF  # F&B + tB - 3 tW in chunk times: 3 + 2 - 3 of 1/2 each
    assert run.idle_per_rank == ((p - 1) * (3 + 2 - 3) * chunk,) * p
    assert run.peak_activations_per_rank == (Fraction(2 * p + 1, 2),) * p


def test_the_shifted_critical_path_takes_what_its_paper_says() -> None:
    """Merak, arXiv 2206.04959, at tF = tR = 1, tB = 2: p + 2 less than 1F1B with a forward more in each backward."""

    def makespan(name: str, p: int, m: int, costs: Costs | None = None) -> Fraction | float:
        return simulate(build_program(name, p, m), costs).makespan

    recomputing = cost("1", "2", "1")
    table = {(4, 4): (28, 22), (4, 8): (44, 38), (8, 32): (156, 146)}
    for (p, m), figures in table.items():
        assert (makespan("1f1b", p, m, recomputing), makespan("shifted-critical-path", p, m)) == figures
    for p in range(2, 9):
        for m in range(p, 3 * p + 1):  # of two micro-batches on two ranks the last stage alone takes 3 * 2 + 3
            expected = max(4 * (m + p - 1) - (p + 2), 3 * (m + p - 1))
            assert makespan("shifted-critical-path", p, m) == expected, (p, m)
            assert (p, m) == (2, 2) or expected == 4 * (m + p - 1) - (p + 2)


def test_a_hop_costs_1f1b_every_slot_and_eager_only_the_ramps() -> None:
    def idle(name: str, p: int, m: int) -> Fraction | float:
        return simulate(build_program(name, p, m), cost("1", "1", "1", "0.5")).idle_per_rank[0]

    assert [idle(name, 4, 16) for name in ("1f1b", "eager-1f1b", "gpipe")] == [23, 12, 12]
    assert [idle(name, 8, 32) for name in ("1f1b", "eager-1f1b", "gpipe")] == [55, 28, 28]


def test_head_and_embedding_show_as_imbalance() -> None:
    heavy_head = uneven([Fraction(1)] * 3 + [Fraction(2)])
    assert simulate(build_program("1f1b", 4, 8), heavy_head).makespan == 3 * 3 + 8 * 6
    exact = Costs(exact={(0, "F"): Fraction(5)})
    assert simulate(build_program("gpipe", 2, 3), exact).busy_per_rank == (15 + 6, 9)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "reason"),
    [
        ("2bw", 4, 2, None, r"m >= p-1 = 3\); raise --global-batch-size"),
        ("pipedream", 5, 3, None, "beyond the next batch"),
        ("interleaved", 4, 6, 2, "not a multiple of p = 4"),
        ("interleaved", 4, 8, 1, "needs 2 or more chunks"),
        ("breadth-first", 4, 3, 2, "fewer than p = 4"),
        ("zb-h1", 4, 3, None, "fewer than p = 4"),
        ("zb-h2", 4, 6, None, "fewer than 2p-1 = 7"),
        ("zb-v", 4, 8, 3, "has 2 chunks per rank"),
        ("1f1b", 4, 8, 2, "has 1 chunk per rank"),
        ("chimera", 3, 6, None, "multiple of 2f = 2"),
        ("chimera", 4, 6, None, "not a multiple of p = 4"),
        ("chimera-doubling", 4, 12, None, "not a multiple of 2p = 8 for p = 4 ranks"),
        ("chimera-doubling", 5, 10, None, "chimera-doubling: p = 5 ranks cannot hold 2"),
        ("dualpipe-v", 4, 7, None, "fewer than 2p = 8"),
        ("gpipe", 0, 4, None, "number of ranks = 0"),
    ],
)
def test_illegal_shapes_are_refused_with_the_reason(name: str, p: int, m: int, v: int | None, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        build_program(name, p, m, v)
    assert len(schedule_problems(name, p, m, v)) == 1


def test_the_table() -> None:
    names = "gpipe 1f1b eager-1f1b message-driven pipedream 2bw interleaved breadth-first zb-h1 zb-h2 zb-v"
    assert " ".join(SCHEDULES) == f"{names} chimera chimera-doubling dualpipe-v shifted-critical-path"
    assert {find_schedule(alias).name for alias in ("dapple", "pipedream-flush")} == {"1f1b"}
    assert find_schedule("chimera-halving").name == "chimera-doubling"
    assert find_schedule("interleaved-1f1b").name == "interleaved" and find_schedule("zbv").name == "zb-v"
    with pytest.raises(Exception, match="no such schedule; one of gpipe, 1f1b"):
        find_schedule("2f2b")
    assert "no slack" in schedule_warnings("2bw", 4, 3)[0] and not schedule_warnings("2bw", 4, 4)
