"""The cable between two hosts is pulled while they train: no connection breaks, and yet both sides say who is lost.

Hosts are network namespaces with a pair of veth between them (needs root and iproute2); `pytest --full -s` shows times.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchrun_agents import ITERATION, ROOT, TINY, environment

MAY = os.geteuid() == 0 and subprocess.run(["ip", "netns", "list"], check=False, capture_output=True).returncode == 0
NAMED = re.compile(r"^error: .*(?:did not answer any more|is this host cut off\?)", re.M)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    names = [f"megalite{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.78.0.1{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.full
@pytest.mark.skipif(not MAY, reason="hosts as network namespaces need root and iproute2")
@pytest.mark.parametrize("pulled", [0, 1])
def test_both_hosts_say_who_is_lost(pulled: int, hosts: list[str], tmp_path: Path) -> None:
    logs = [tmp_path / f"{end}.log" for end in "ab"]
    agents = []
    for number, name in enumerate(hosts):
        launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)]
        launch += ["--master-addr", "10.78.0.10", "--master-port", "6000", "pretrain_gpt.py", *TINY]
        launch += ["--tensor-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "100000"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', f"host-{'ab'[number]}", sys.executable, *launch]
        with logs[number].open("wb") as log:
            command = ["ip", "netns", "exec", name, "unshare", "--uts", *named]
            env = environment(GLOO_SOCKET_IFNAME="eth0")
            agents.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True))
    try:
        wait(lambda: len(ITERATION.findall(logs[0].read_text())) > 5, logs)
        ip("-n", hosts[pulled], "link", "set", "eth0", "down")
        began, seen = time.monotonic(), {}

        def all_have_said() -> bool:
            for end, log in zip("ab", logs, strict=True):
                if end not in seen and NAMED.search(log.read_text()):
                    seen[end] = time.monotonic() - began
            return len(seen) == 2 and all(agent.poll() is not None for agent in agents)

        ended = wait(all_have_said, logs) - began
        times = f"named by a after {seen['a']:.1f} s, by b after {seen['b']:.1f} s, over after {ended:.1f} s"
        print(f"\nhost {'ab'[pulled]} is cut off: {times}")
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    told = r"^error: rank 2 \(host host-b\) and the others of its host did not answer"
    assert re.search(told, logs[0].read_text(), re.M), logs[0].read_text()[-3000:]
    assert "is this host cut off?" in logs[1].read_text(), logs[1].read_text()[-3000:]
    assert all(agent.returncode == 1 for agent in agents)


def wait(what: Callable[[], object], logs: list[Path]) -> float:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline, [log.read_text()[-3000:] for log in logs]
        time.sleep(0.05)
    return time.monotonic()
