"""Packing of jobs: against all packings there are, closed forms, and the bound of the list rule."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from megalite.errors import ConfigError
from plan import main
from plan_jobs import Job, gang_seconds, job_lines, packed, read_jobs


def longest(tasks: list[float], devices: int) -> float:
    return max(sum(t[0] for t in own) for own in packed([(t, "a", i) for i, t in enumerate(tasks)], devices))


def best_of_all(tasks: list[float], devices: int) -> float:
    """Every way to put the tasks on devices."""
    ways = itertools.product(range(devices), repeat=len(tasks))
    return min(max(sum(t for t, d in zip(tasks, way, strict=True) if d == n) for n in range(devices)) for way in ways)


def test_a_packing_is_within_grahams_bound_of_the_best_of_all() -> None:
    rng = random.Random(1)
    above = 0
    for _ in range(60):
        devices, tasks = rng.choice([2, 3]), [rng.randint(1, 9) for _ in range(rng.randint(1, 7))]
        found, best = longest(tasks, devices), best_of_all(tasks, devices)
        assert best <= found <= (4 / 3 - 1 / (3 * devices)) * best
        above += found > best
    assert above, "no case in which the rule is not the best: the comparison shows nothing"
    assert longest([3, 3, 2, 2, 2], 2) == 7 and best_of_all([3, 3, 2, 2, 2], 2) == 6  # Graham's worst case of two


@pytest.mark.parametrize(("groups", "times"), [(2, 6 / 5), (3, 9 / 7), (4, 4 / 3)])
def test_full_packing_is_the_closed_form(groups: int, times: float, tmp_path: Path) -> None:
    """As many jobs as groups, backward twice the forward: gang takes 3 F a job, packed F + 2 F (k+1)/(2k)."""
    jobs = [Job(f"job{n}", groups, 1.0, 2.0, groups) for n in range(groups)]
    tasks = [task for job in jobs for task in job.tasks(0)]
    gang, most = gang_seconds(jobs, groups, 0), max(sum(t[0] for t in own) for own in packed(tasks, groups))
    assert gang == pytest.approx(3 * groups)
    ideal = groups * (1 + 2 * (groups + 1) / (2 * groups))
    assert gang / ideal == pytest.approx(times)
    assert ideal - 1e-9 <= most <= 1.04 * ideal  # three jobs of three do not divide evenly


def test_a_gang_waits_for_its_devices() -> None:
    """Two jobs that do not fit beside each other follow; a third beside the first costs nothing."""
    a, b, c = Job("a", 3, 1.0, 2.0), Job("b", 2, 1.0, 1.0), Job("c", 1, 0.5, 0.5)
    assert gang_seconds([a, b, c], 4, 0) == 5.0
    assert gang_seconds([a, c], 4, 0) == 3.0
    assert gang_seconds([a, b, c], 6, 0) == 3.0


def test_jobs_end_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three rounds of both, seven of one alone, which no packing makes shorter."""
    file = tmp_path / "jobs.yaml"
    file.write_text("a: {workers: 2, forward: 1, backward: 2, groups: 2, iterations: 3}\n"
                    "b: {workers: 2, forward: 1, backward: 2, groups: 2, iterations: 10}\n")  # fmt: skip
    gang, together = [float(line.split(" s,")[0].split()[-1]) for line in list(job_lines(str(file), 2))[1:3]]
    assert gang == 3 * 6 + 7 * 3 and together == 3 * 5 + 7 * 3
    assert main(["--num-devices", "2", "--jobs", str(file)]) == 0
    assert "1.083 x as fast" in capsys.readouterr().out
    for more in ("--what-if upgrades", "--num-layers 2"):
        assert main(["--num-devices", "2", "--jobs", str(file), *more.split()]) == 2
        assert f"says all of its jobs; drop {more.split()[0]}" in capsys.readouterr().err


WRONG = {
    "[1, 2]": "no jobs",
    "a: 3": "a: no settings",
    "a: {workers: 2, forward: 1}": "backward is None; give seconds",
    "a: {workers: 2.5, forward: 1, backward: 1}": "workers is 2.5; give a whole number from 1",
    "a: {workers: 2, forward: .nan, backward: 1}": "forward is nan; give seconds",
    "a: {workers: 2, forward: 1, backward: 1, groups: 0}": "groups is 0; give a whole number",
    "a: {workers: 2, forward: 1, backward: 1, layers: 0}": "layers is none of workers, forward",
    "a: {workers: 9, forward: 1, backward: 1}": "a has 9 workers, --num-devices=4",
    "a: &x [*x]": "no jobs",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_job_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(ConfigError, match=WRONG[text]) as error:
        read_jobs(str(tmp_path / "jobs.yaml"), 4)
    assert len(str(error.value).splitlines()) == 1
