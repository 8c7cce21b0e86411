"""Hosts that compute wrong are left out before ranks meet (`--check-hosts`), and listed.

The question is asked in a process of its own, `host_check`: a device that hangs is ended with it, and the rank that
asks has touched none yet.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

from megalite.config import ParallelConfig
from megalite.errors import HostProblem
from megalite.launch.environment import LaunchEnvironment

LIMIT_SECONDS = 120.0


def host_problem(ranks: int, device: str) -> str:
    """What is wrong with this host; empty where it computes right."""
    command = [sys.executable, "-m", "megalite.launch.host_check", str(ranks), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its devices did not answer for {LIMIT_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    lines = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()[-1:]]
    return lines[0] if lines else f"its check ended with status {done.returncode}"


def check_host(parallel: ParallelConfig, place: LaunchEnvironment) -> None:
    """Asks on one rank a host, where `--check-hosts` says so. Raises HostProblem."""
    if parallel.restarts.check_hosts and place.local_rank == 0:
        problem = host_problem(place.local_size, parallel.hardware.device)
        if problem:
            raise HostProblem(f"host {socket.gethostname()} is left out: {problem}")


def list_host(path: Path, line: str) -> None:
    """Adds a line to the list of hosts that were left out."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')} {line}\n")
