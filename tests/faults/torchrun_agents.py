"""torchrun agents that a test can kill, as hosts are lost: what they said, and when."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORE = (
    "import torch.distributed, time; "
    "store = torch.distributed.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False); time.sleep(3600)"
)
ITERATION = re.compile(r"^ \[[^\]]*\] iteration +(\d+)/", re.M)
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --fp64 --device cpu --eval-iters 0 --log-interval 1"
).split()


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Agents:
    """Agents of one elastic launch on this machine, with a store apart from them: each can be lost."""

    def __init__(self, folder: Path, nodes: str, per_node: int, flags: list[str], restarts: int = 5) -> None:
        self._folder, port = folder, free_port()
        command = [sys.executable, "-c", STORE.format(port=port)]
        self._store = subprocess.Popen(command)
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"),
            *(f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *("--rdzv-id=test", "--rdzv-conf=last_call_timeout=3,is_host=0", "pretrain_gpt.py", *TINY, *flags),
            *("--save", str(folder / "run"), "--auto-resume"),
        ]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *, disk: str | None = None, disks: Path | None = None, **more: str) -> None:
        """One more agent. disk: makes it a host of this name (host0, host1, ...), with a folder of its own, of
        this name in `disks`, that it sees as `folder/disk`. more: variables of its environment."""
        command = self._command
        if disk is not None:
            own, seen = (disks or self._folder) / disk, self._folder / "disk"
            own.mkdir(parents=True, exist_ok=True)
            seen.mkdir(exist_ok=True)
            names = self._folder / "hosts"
            names.write_text("127.0.0.1 localhost " + " ".join(f"host{n}" for n in range(9)) + "\n")
            script = 'hostname "$1" && mount --bind "$2" "$3" && mount --bind "$4" /etc/hosts && shift 4 && exec "$@"'
            places = [disk, str(own), str(seen), str(names)]
            command = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", *places, *command]
        with (self._folder / f"agent{len(self.processes)}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment(**more), stdout=log, stderr=log, start_new_session=True
                )
            )

    def lose(self, number: int) -> float:
        """Kills an agent, as a host is lost (its ranks end with it); when."""
        self.processes[number].kill()
        self.processes[number].wait()
        return time.monotonic()

    def log(self, number: int) -> str:
        return (self._folder / f"agent{number}.log").read_text(errors="replace")

    @property
    def logs(self) -> str:
        return "".join(self.log(number) for number in range(len(self.processes)))

    def iterations(self) -> list[int]:
        return [int(number) for number in ITERATION.findall(self.logs)]

    def wait_for(self, what: Callable[[], object], seconds: float = 180.0) -> float:
        """Waits until `what()` is true; when that was."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.logs[-6000:]
            time.sleep(0.05)
        return time.monotonic()

    def first(self) -> int:
        """The agent whose rank 0 prints the iterations."""
        return next(number for number in range(len(self.processes)) if ITERATION.search(self.log(number)))

    def close(self) -> None:
        for process in [*self.processes, self._store]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def undisturbed(folder: Path, ranks: int, flags: list[str]) -> None:
    """The same run without a failure, by --nprocs."""
    command = [sys.executable, "pretrain_gpt.py", *TINY, *flags, "--nprocs", str(ranks), "--save", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
