"""Launches of `pretrain_gpt.py` by a process that has imported torch already: each is a fork, as ranks are.

    WarmLauncher -- a line of JSON: flags, environment, log --> this file as a process -- fork --> pretrain_gpt.py
                 <-- process number, and its status in the end --

A launch is the leader of a process group of its own. What it runs is the entry script itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("torch._dynamo", "megalite.train", "s3fs")


class WarmLauncher:
    """Starts launches, one at a time. environment: of all of them."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = 0
        self.log = Path()
        self._status: int | None = None

    def start(self, flags: list[str], log: Path) -> None:
        """The next launch; the last one has ended."""
        self.log, self._status = log, None
        log.write_bytes(b"")
        self._stream("stdin").write(f"{json.dumps([flags, str(log)])}\n".encode())
        self.pid = int(self._stream("stdout").readline())

    def wait(self, seconds: float) -> int | None:
        """The status of the launch, as `subprocess` counts; None where it has not ended within `seconds`."""
        if self._status is None:
            answers = self._stream("stdout")
            if select.select([answers], [], [], max(0.0, seconds))[0]:
                self._status = int(answers.readline())
        return self._status

    def _stream(self, name: str) -> IO[bytes]:
        stream: IO[bytes] = getattr(self._process, name)
        return stream

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Starts what standard input asks for until that ends."""
    sys.path.insert(0, str(ROOT))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what is imported: no launch looks through it again
    for line in sys.stdin:
        flags, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(flags, log)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(flags: list[str], log: str) -> NoReturn:
    """The life of one launch."""
    try:
        os.setsid()
        with open(os.devnull, "rb") as nothing, open(log, "ab") as told:
            for number, file in enumerate((nothing, told, told)):
                os.dup2(file.fileno(), number)
        sys.argv = ["pretrain_gpt.py", *flags]
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    finally:
        os._exit(1)  # the script ends its process by itself


if __name__ == "__main__":
    serve()
