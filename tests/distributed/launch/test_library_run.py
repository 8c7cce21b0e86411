"""`megalite.run`: what rank 0 returns, what cannot be returned, and ranks of a process that has computed."""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import megalite
from megalite.comm import World
from megalite.testing import run_single

SHARED = torch.arange(6).bfloat16()
PLAIN: dict[Any, Any] = {
    "losses": [1.5, math.inf, -0.0, 0.1 + 0.2],
    3: (None, True, "é", ()),
    "tensors": [SHARED, SHARED[1:3], torch.tensor(2.5, dtype=torch.float64), torch.zeros(0, 3)],
    "dict": {"tensor": 1, "tuple": []},
}


def give(world: World) -> Any:
    return PLAIN if world.rank == 0 else nn.Linear(1, 1)  # only rank 0's leaves its process


def refuse(world: World) -> Any:
    return [{"model": nn.Linear(1, 1)}]


def fail(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank one is unwell")


def threads(world: World) -> int:
    torch.randn(600, 600) @ torch.randn(600, 600)
    return torch.get_num_threads()


def body_returns(world: World) -> bool:
    found = megalite.run(give, nprocs=2, device="cpu")
    assert repr(found) == repr(PLAIN)
    assert [x.dtype for x in found["tensors"]] == [x.dtype for x in PLAIN["tensors"]]
    alone = megalite.run(lambda world: world, device="cpu")  # nothing has to leave a process
    return isinstance(alone, World)


def ended(function: Any) -> tuple[object, str]:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            megalite.run(function, nprocs=2, device="cpu")
        except SystemExit as end:
            return end.code, errors.getvalue()
    return None, errors.getvalue()


def body_fails(world: World) -> list[tuple[object, str]]:
    return [ended(refuse), ended(fail)]


def body_has_computed(world: World, cores: int) -> tuple[list[int], list[str]]:
    torch.set_num_threads(2)
    torch.randn(600, 600) @ torch.randn(600, 600)
    with warnings.catch_warnings(record=True) as told, mock.patch("os.cpu_count", lambda: cores):
        warnings.simplefilter("default")
        found = [megalite.run(threads, nprocs=2, device="cpu", timeout_minutes=0.2) for _ in range(2)]
    return found, [f"{Path(one.filename).name}: {one.message}" for one in told]


def test_a_run_returns_what_rank_0_returns() -> None:
    assert run_single(body_returns)


def test_what_does_not_leave_its_rank_is_one_line_and_a_failure_ends_with_its_status() -> None:
    (status, line), (other, text) = run_single(body_fails)
    assert status == 2
    assert line.splitlines() == [
        "error: refuse returns Linear, which does not leave its rank; return numbers, strings, tensors, or lists, "
        "tuples and dicts of them"
    ]
    assert other == 1 and "error: rank 1 failed in phase 'fail': ValueError: rank one is unwell" in text
    assert "in fail" in text and "megalite/launch" not in text and "ranks.py" not in text, text


def linger(world: World) -> None:
    time.sleep(2.0 if world.rank == 0 else 0.0)


def test_a_rank_that_waits_for_others_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """They may wait for it, in what all ranks must call."""
    with mock.patch("megalite.library.ranks.ALONE_SECONDS", 0.5):
        megalite.run(linger, nprocs=2, device="cpu")
    assert capfd.readouterr().err.startswith("rank 1 returned from linger 0.5 s ago and waits for the others; what all")
    megalite.run(linger, nprocs=2, device="cpu")
    assert "returned from" not in capfd.readouterr().err


def test_a_script_that_goes_on_after_the_run_waits_for_nobody(tmp_path: Path) -> None:
    """Under torchrun the ranks are the user's own processes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, megalite.library.ranks as ranks\nranks.ALONE_SECONDS = 0.5\n"
        # in one piece: the ranks share the pipe, and `print` may write the end of a line by itself
        "sys.stdout.write(f'{ranks.run(lambda world: world.size, device=\"cpu\")}\\n')\ntime.sleep(1.5)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    root = Path(megalite.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "2"]), done.stderr
    assert "waits for the others" not in done.stderr


def test_a_failure_does_not_close_pythons_prompt() -> None:
    lines = """import megalite
def train(world):
    return 1 / world.rank

megalite.run(train, nprocs=2, device="cpu")
print("still", "here")
"""
    root = Path(megalite.__file__).parents[1]
    prompt = [sys.executable, "-q", "-i"]
    done = subprocess.run(prompt, input=lines, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert "rank 0" in done.stderr and "ZeroDivisionError" in done.stderr
    assert "RuntimeFailure: megalite.run failed with status 1" in done.stderr and "still here" in done.stdout


def test_ranks_of_a_process_that_has_computed_do_not_wait_for_its_threads() -> None:
    """As a cell of a notebook has; with two threads each they would hang (libgomp)."""
    for cores in 2, 4:  # two ranks on two cores have one thread each anyway
        found, told = run_single(body_has_computed, cores, env={"OMP_NUM_THREADS": "2"})
        assert found == [1, 1] and len(told) == (cores == 4)
        assert all(line.startswith(f"{Path(__file__).name}: ranks compute with one thread each") for line in told)
