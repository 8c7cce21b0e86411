"""The harness is itself under test: results, blame, time-outs, and that nothing survives a case."""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from megalite.comm.world import World
from megalite.faults import fault_point
from megalite.testing import Fault, RanksFailed, run_ranks, run_single, try_ranks


def body_sum(world: World, scale: float) -> dict[str, object]:
    value = torch.full((3,), scale * (world.rank + 1), dtype=torch.float64)
    dist.all_reduce(value)
    return {"sum": value, "rank": world.rank, "bf16": torch.ones(2, dtype=torch.bfloat16), "empty": torch.empty(0, 4)}


def test_results_come_back_by_rank_with_tensors() -> None:
    results = run_ranks(body_sum, 3, 0.5)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(torch.equal(result["sum"], torch.full((3,), 3.0, dtype=torch.float64)) for result in results)
    assert results[0]["bf16"].dtype == torch.bfloat16
    assert results[0]["empty"].shape == (0, 4)


def body_optimizer(world: World) -> float:
    body_sum(world, 1.0)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    return time.process_time()


def test_a_rank_costs_a_fraction_of_a_cpu_second() -> None:
    # About 0.03 s. Importing torch and, for the first optimizer, torch._dynamo would cost 1.5 s in every rank.
    assert max(run_ranks(body_optimizer, 2)) < 0.4


def body_environment(world: World) -> tuple[str | None, int, bool]:
    return os.environ.get("MEGALITE_TEST_CANARY"), torch.get_num_threads(), dist.is_initialized()


def test_single_has_one_thread_no_group_and_its_environment() -> None:
    assert run_single(body_environment, env={"MEGALITE_TEST_CANARY": "x"}) == ("x", 1, False)
    assert run_ranks(body_environment, 2) == [(None, 1, True)] * 2


def body_raises(world: World, bad: int) -> None:
    if world.rank == bad:
        raise KeyError(f"rank {bad} is bad")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_rank_that_raised_is_named_and_not_those_that_lost_it(bad: int) -> None:
    with pytest.raises(RanksFailed, match=f"(?s)^rank {bad} failed: KeyError: .*raise KeyError"):
        run_ranks(body_raises, 3, bad)


def test_expect_wants_a_failure_that_matches() -> None:
    run_ranks(body_raises, 2, 1, expect="rank 1 is bad")
    with pytest.raises(RanksFailed, match="expected a failure"):
        run_ranks(body_raises, 2, 1, expect="something else")
    with pytest.raises(RanksFailed, match="all 2 ranks finished"):
        run_ranks(body_environment, 2, expect="anything")


def body_works_in_steps(world: World) -> None:
    for step in range(3):
        world.report_phase(f"step {step}")
        fault_point("test.step", step=step)  # The harness knows the rank.
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("action", "account"),
    [
        ("kill", "rank 1 was killed by SIGKILL .signal 9. in phase 'step 1'"),
        ("raise", "rank 1 failed in phase 'step 1': ValueError: injected fault"),
        ("stop", "rank 1 stopped answering in phase 'step 1'"),
    ],
)
def test_each_fault_is_bounded_and_blamed_on_its_rank(action: str, account: str) -> None:
    case = try_ranks(body_works_in_steps, 2, faults=[f"{action}@test.step:rank=1:step=1"], peer_timeout=1.5)
    assert case.outcome.culprit is not None
    assert case.outcome.seconds < 30  # 3 s on a quiet machine; without a bound it would be the default, 120 s
    assert re.search(account, case.describe()), case.describe()


def body_sleeps(world: World) -> None:
    time.sleep(600)


def test_time_out_ends_all_and_shows_stacks() -> None:
    case = try_ranks(body_sleeps, 2, timeout=1.0)
    assert case.outcome.timed_out
    assert case.outcome.seconds < 30  # 1.4 s on a quiet machine
    assert "in body_sleeps" in case.describe()


def body_leaves_a_child(world: World) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def test_what_a_rank_started_is_ended_with_it() -> None:
    for pid in run_ranks(body_leaves_a_child, 2):
        assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] in "ZX":
                    return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.02)
    return True


def test_fault_text_round_trip_counts_and_refuses_unknown_actions() -> None:
    fault = Fault.parse("raise@save.begin:rank=1:step=3:after=2")
    assert (fault.point, fault.where, fault.after) == ("save.begin", {"rank": "1", "step": "3"}, 2)
    assert Fault.parse(fault.text) == fault
    fault.reached("save.begin", {"rank": 1, "step": 2})
    fault.reached("save.begin", {"rank": 1, "step": 3})
    with pytest.raises(ValueError, match="injected"):
        fault.reached("save.begin", {"rank": 1, "step": 3})
    with pytest.raises(ValueError, match="choose from"):
        Fault.parse("explode@x")


def test_fault_points_do_nothing_here() -> None:
    fault_point("test.step", rank=0, step=0)
