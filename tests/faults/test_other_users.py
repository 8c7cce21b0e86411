"""Files of several users: what the umask lets another one read is used, all else is one line and status 2."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_run_ends import command

import inspect_checkpoint
import preprocess_data
import pretrain_gpt
from command_line import run_tool
from megalite.comm.world import World
from megalite.data.cache import cached_folder
from megalite.errors import DataError
from megalite.testing import run_single

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")


def write(folder: Path) -> None:
    (folder / "index.txt").write_text("written")


def body_uses(world: World, root: str, umask: int) -> str:
    """What nobody finds where root has built a folder under this umask."""
    os.umask(umask)
    cached_folder(Path(root), "data", write)
    os.seteuid(NOBODY)
    try:
        return (cached_folder(Path(root), "data", write) / "index.txt").read_text()
    except DataError as error:
        return str(error)
    finally:
        os.seteuid(0)


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that everybody reaches, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="megalite-shared-", dir="/tmp") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


def test_what_one_user_has_indexed_another_one_reads(root: Path) -> None:
    assert run_single(body_uses, str(root), 0o022) == "written"


def test_what_is_private_is_one_line(root: Path) -> None:
    line = f"--data-cache-path={root}: data is another user's and not readable; make it so, or name another folder"
    assert run_single(body_uses, str(root), 0o077) == line


def closed(path: Path) -> None:
    path.chmod(0o700)


def locked_by_a_dead_run(path: Path) -> None:
    (path / "run.lock").write_text("{}")
    os.utime(path / "run.lock", (1, 1))
    path.chmod(0o1777)


def tokenizer_closed(path: Path) -> None:
    (path / "folder").mkdir(0o700)


def corpus_closed(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / name).touch(0o600)

    return write


PRETRAIN, PREPROCESS, INSPECT = pretrain_gpt.main, preprocess_data.main, inspect_checkpoint.main
OURS = ["--save", "{}", "--auto-resume"]
# Who makes the folder unfit, who runs into it, with which words, and the beginning and a part of the line.
CASES: dict[str, tuple[Callable[[Path], None], Callable[[list[str]], int | None], list[str], str, str]] = {
    "run": (closed, PRETRAIN, OURS, "--save={}: ", "cannot write there (Permission denied); choose another --save"),
    "dry run": (closed, PRETRAIN, [*OURS, "--dry-run"], "--save={}: ", "; choose another --save"),
    "lock": (
        locked_by_a_dead_run, PRETRAIN, OURS,
        "--save={}: run.lock, left by a dead run, cannot be removed", "; remove it as the user whose file it is",
    ),
    "checkpoint": (closed, INSPECT, ["{}"], "{}", "cannot be read (Permission denied)"),
    "text": (corpus_closed("c.txt"), PREPROCESS, ["--input", "{}/c.txt"], "--input={}/c.txt: cannot be read", "denied"),
    "jsonl": (
        corpus_closed("c.jsonl"), PREPROCESS, ["--input", "{}/c.jsonl"], "--input={}/c.jsonl: cannot be read", "denied",
    ),
    "gz": (corpus_closed("c.gz"), PREPROCESS, ["--input", "{}/c.gz"], "--input={}/c.gz: cannot be read", "denied"),
    "tokenizer": (
        tokenizer_closed, PREPROCESS,
        [*"--input {0} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {0}/folder".split()],
        "--tokenizer-model={}/folder/tokenizer.json: cannot be read", "denied",
    ),
}  # fmt: skip


def body_runs_as_nobody(world: World, name: str, root: str) -> int:
    prepare, run, argv, _, _ = CASES[name]
    argv = [word.format(root) for word in argv]
    if run is PRETRAIN:
        argv = [*command(Path(root), steps=1), *argv[2:]]
    if run is PREPROCESS:
        argv += ["--output-prefix", f"{root}/out", "--workers", "1"]
    os.umask(0)
    prepare(Path(root))
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        return (run(argv) if run is PRETRAIN else run_tool(run, argv)) or 0
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_ours_is_one_line(name: str, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, _, _, begin, part = CASES[name]
    assert run_single(body_runs_as_nobody, name, str(root)) == 2
    said = capfd.readouterr()
    (line,) = [line for line in (said.out + said.err).splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {begin.format(root)}") and part in line
    assert "Traceback" not in said.out + said.err
