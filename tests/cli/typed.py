"""Commands as a reader types them, in a process that already has torch."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from megalite.comm import World
from megalite.testing import run_single

ROOT = Path(__file__).resolve().parents[2]


def run_file(path: str, argv: list[str]) -> int:
    """What `python path *argv` does, in this process; its exit status."""
    sys.argv = [path, *argv]
    if path == "pretrain_gpt.py":  # which ends its process
        return int(runpy.run_path(str(ROOT / path))["main"](argv))
    try:
        runpy.run_path(str(ROOT / path) if (ROOT / path).exists() else path, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run_command(command: str) -> tuple[int, str]:
    """Exit status and output of a command that begins with python or torchrun, or with variables before that."""
    words = shlex.split(command)
    begin = next(place for place, word in enumerate(words) if word.endswith(".py"))
    os.environ.update(word.split("=", 1) for word in words[:begin] if "=" in word)
    argv = words[begin + 1 :] + (["--nprocs", "2"] if "torchrun" in words else [])
    answer = argv.pop(argv.index(">") + 1) if ">" in argv else ""
    argv = [word for word in argv if word != ">"]
    with open("output", "w+") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
        status = run_file(words[begin], argv)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        output.seek(0)
        text = output.read()
    if answer:
        Path(answer).write_text(text)
    return status, text


def body_command(world: World, folder: str, command: str) -> tuple[int, str]:
    """`run_command` in a folder: a case for `run_single`."""
    os.chdir(folder)
    return run_command(command)


def body_apart(world: World, path: str, argv: list[str]) -> tuple[int, str, str]:
    """`run_file` in the repository's root: status, standard output, standard error."""
    os.chdir(ROOT)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        for number, file in ((1, output), (2, error)):
            os.dup2(file.fileno(), number)
        status = run_file(path, argv)
        texts = []
        for stream, file in ((sys.stdout, output), (sys.stderr, error)):
            stream.flush()
            file.seek(0)
            texts.append(file.read())
    return status, texts[0], texts[1]


def run_warm(path: str, *argv: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """What `python path *argv` does, in a process that is forked where torch is imported already."""
    status, output, error = run_single(body_apart, path, [*argv], timeout=timeout)
    return subprocess.CompletedProcess([path, *argv], status, output, error)
