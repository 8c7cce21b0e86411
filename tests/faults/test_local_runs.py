"""Runs that keep their saves on the hosts: a host is lost with its disk, and no byte of the run with it.

Agents of torchrun play hosts, each with a name and a disk of its own (namespaces: needs root, and `unshare`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from equivalence.layouts import saved_tensors
from torchrun_agents import Agents, undisturbed

MAY_UNSHARE = os.geteuid() == 0 and subprocess.run(["unshare", "--uts", "--mount", "true"], check=False).returncode == 0
LENGTH = ["--train-iters", "80", "--save-interval", "1000", "--global-batch-size", "12"]
CASES = {
    # layout, whether the ranks that are left have the same; the host of rank 0 is lost
    "dp 3 -> 2": (["--zero-stage", "1"], False),
    "tp 2 and a spare": (["--tensor-model-parallel-size", "2"], True),
}


@pytest.mark.full
@pytest.mark.skipif(not MAY_UNSHARE, reason="hosts as namespaces need root and unshare")
@pytest.mark.parametrize("kind", ["local", "in_memory"])
@pytest.mark.parametrize("case", CASES)
def test_a_host_is_lost_with_its_disk(case: str, kind: str, tmp_path: Path) -> None:
    """`--save` holds nothing yet: the run continues from what the others keep of it."""
    layout, same = CASES[case]
    shared = Path("/dev/shm") / f"megalite-{os.getpid()}" if kind == "in_memory" else tmp_path
    folder = ["--non-persistent-local-ckpt-dir", str(tmp_path / "disk")]
    local = ["--non-persistent-save-interval", "5", "--non-persistent-ckpt-type", kind, *folder, "--replication"]
    agents = Agents(tmp_path, "1:3", 1, [*LENGTH, *layout, "--elastic", "1", *local])
    try:
        for number in range(3):
            agents.start(disk=f"host{number}", disks=shared)
        agents.wait_for(lambda: 22 in agents.iterations())
        lost = agents.first()
        killed = agents.lose(lost)
        shutil.rmtree(shared / f"host{lost}")
        seen = len(agents.iterations())
        again = agents.wait_for(lambda: len(agents.iterations()) > seen + 2) - killed
        print(f"\n{case}, {kind}: training again after {again:.1f} s, with iteration {agents.iterations()[seen]}")
        left = [number for number in range(3) if number != lost]
        agents.wait_for(lambda: all(agents.processes[number].poll() is not None for number in left))
        assert [agents.processes[number].returncode for number in left] == [0, 0], agents.logs
        assert not [*shared.glob("host*/*/iter_*")], "nothing is left when the training is complete"
    finally:
        agents.close()
        if shared != tmp_path:
            shutil.rmtree(shared, ignore_errors=True)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if record["kind"] == "start"][-1] in (20, 25)
    undisturbed(tmp_path / "quiet", 2 if same else 3, [*LENGTH, *layout])
    disturbed, quiet = saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "quiet")
    assert disturbed.keys() == quiet.keys()
    for name, values in quiet.items():
        if same:
            assert torch.equal(disturbed[name], values), name
        else:
            torch.testing.assert_close(disturbed[name], values, rtol=1e-12, atol=1e-12)
