"""`--elastic` under torchrun: hosts are lost, the run ends as if none had been; `pytest -s` shows how long it took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equivalence.layouts import saved_tensors
from torchrun_agents import Agents, undisturbed

from megalite.train.run_directory import ATTEMPTS_FILE

LENGTH = ["--train-iters", "80", "--save-interval", "10", "--global-batch-size", "12"]
CASES = {
    # nodes, ranks of each, agents, who is lost in turn (the agent of rank 0, or another), layout, ranks at the end
    "1:2, tp 2 x dp 2 -> 1": ("1:2", 2, 2, ["other"], ["--tensor-model-parallel-size", "2"], None),
    "1:3, tp 2 and a spare": ("1:3", 1, 3, ["first"], ["--tensor-model-parallel-size", "2"], 2),
    "1:3, dp 3 -> 2 -> 1": ("1:3", 1, 3, ["first", "first"], ["--zero-stage", "1"], None),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_hosts_are_lost_and_the_run_ends_as_if_none_were(case: str, tmp_path: Path) -> None:
    nodes, per_node, count, losses, layout, same = CASES[case]
    agents = Agents(tmp_path, nodes, per_node, [*LENGTH, *layout, "--elastic", "1"])
    try:
        for _ in range(count):
            agents.start()
        agents.wait_for(lambda: 12 in agents.iterations())
        for round_, who in enumerate(losses):
            first = next(n for n, p in enumerate(agents.processes) if p.poll() is None and "iteration" in agents.log(n))
            lost = first if who == "first" else next(n for n in range(count) if n != first)
            seen, before = len(agents.iterations()), agents.logs.count("error: ")
            killed = agents.lose(lost)
            noticed = agents.wait_for(lambda before=before: agents.logs.count("error: ") > before) - killed
            again = agents.wait_for(lambda seen=seen: len(agents.iterations()) > seen + 2) - killed
            print(f"\n{case}, loss {round_ + 1}: noticed after {noticed:.1f} s, training again after {again:.1f} s")
            if round_ + 1 < len(losses):
                agents.wait_for(lambda: 35 in agents.iterations())
        survivors = [n for n, process in enumerate(agents.processes) if process.poll() is None]
        agents.wait_for(lambda: all(agents.processes[n].poll() is not None for n in survivors))
        assert [agents.processes[n].returncode for n in survivors] == [0] * len(survivors), agents.logs
    finally:
        agents.close()
    assert (tmp_path / "run" / "COMPLETED").exists() and not (tmp_path / "run" / ATTEMPTS_FILE).exists()
    ranks = {"1:2": 4, "1:3": 2 if same else 3}[nodes]
    undisturbed(tmp_path / "quiet", ranks, [*LENGTH, *layout])
    disturbed, quiet = saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "quiet")
    assert disturbed.keys() == quiet.keys()
    for name, values in quiet.items():
        if same:
            assert torch.equal(disturbed[name], values), name
        else:
            torch.testing.assert_close(disturbed[name], values, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_what_is_wrong_with_the_flags_is_told_once(tmp_path: Path) -> None:
    """A second attempt would find the same: the agent is ended, though it has restarts left."""
    agents = Agents(tmp_path, "1:2", 2, ["--train-iters", "4", "--hidden-size", "33"])
    try:
        agents.start()
        agents.wait_for(lambda: agents.processes[0].poll() is not None, 60)
    finally:
        agents.close()
    assert agents.processes[0].returncode == 1
    assert agents.logs.count("error: --hidden-size=33") == 1


@pytest.mark.full
def test_a_host_that_computes_wrong_is_left_out_and_listed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'megalite.launch.host_check' in sys.orig_argv:\n"
        "    os.write(1, b'cuda:3: 7 numbers are wrong\\n')\n"
        "    os._exit(1)\n"
    )
    flags = ["--train-iters", "20", "--global-batch-size", "12", "--elastic", "1", "--check-hosts"]
    agents = Agents(tmp_path, "1:2", 1, flags)
    try:
        agents.start()
        agents.start(PYTHONPATH=str(tmp_path))
        agents.wait_for(lambda: agents.processes[0].poll() is not None and agents.processes[1].poll() is not None)
    finally:
        agents.close()
    assert [process.returncode for process in agents.processes] == [0, 1], agents.logs
    assert "is left out: cuda:3: 7 numbers are wrong" in (tmp_path / "run" / "left_out.txt").read_text()
    assert (tmp_path / "run" / "COMPLETED").exists()
