"""Does this host compute right? `--check-hosts` asks before ranks meet: `python -m megalite.launch.host_check 8 auto`.

Matrices of small whole numbers have a product that is known to the last bit in every number format whose sums are in
fp32; a device that gets it wrong once is broken. A process of its own: a device that hangs is ended with it, and the
rank that asks has touched none yet. Takes seconds; `tools/prove_layout.py --preflight` compares whole steps.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megalite.config import ParallelConfig
from megalite.errors import HostProblem
from megalite.launch.environment import LaunchEnvironment

LIMIT_SECONDS = 120.0
SIZE = 1024


def host_problem(ranks: int, device: str) -> str:
    """What is wrong with this host; empty where it computes right."""
    command = [sys.executable, "-m", __name__, str(ranks), device]
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


def main(argv: list[str]) -> int:
    """Prints the first problem; the exit status."""
    import torch

    ranks, kind = int(argv[0]), argv[1]
    count = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cuda" and count == 0:
        sys.stdout.write("torch sees no GPU\n")
        return 1
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        sys.stdout.write(f"its folder of temporary files cannot be written ({error.strerror})\n")
        return 1
    names = [f"cuda:{number}" for number in range(min(count, ranks))] or ["cpu"]
    problem = next((f"{name}: {wrong}" for name in names if (wrong := device_problem(name))), "")
    if problem:
        sys.stdout.write(f"{problem}\n")
    return int(bool(problem))


def device_problem(name: str) -> str:
    """Products of whole numbers on a device, several times, compared with those of int64 on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (SIZE, SIZE), generator=generator) for _ in range(2))
    exact = a.double() @ b.double()  # whole numbers below 2**17: exact in every order
    device = torch.device(name)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = a.to(device, dtype), b.to(device, dtype)
        for _ in range(3):
            wrong = int(((x @ y).cpu() != exact.to(dtype)).sum())
            if wrong:
                return f"{wrong:,} of {SIZE * SIZE:,} numbers of a {dtype} product are wrong"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
