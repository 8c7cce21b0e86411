"""Launchers' environments as dictionaries -> the place of the process, or one clear line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.data.cache import cache_directory
from megalite.errors import ConfigError, DataError
from megalite.launch.environment import LaunchEnvironment, detect_environment, expand_tasks, first_host
from megalite.launch.launcher import read_environment
from megalite.launch.meeting import check_interface, interface_hint, interface_to

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_JOB_ID": "20123",
    "SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_JOB_NODELIST": "gpu[07-08],big1",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, LaunchEnvironment()),
        ({"HOME": "/root", "MASTER_ADDR": "left-over"}, LaunchEnvironment()),
        (TORCHRUN, LaunchEnvironment("torchrun", 5, 8, 1, 4, "gpu01", 1234, True, 2, "torchrun x", parent=True)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, LaunchEnvironment("torchrun", 0, 1)),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR2"},
            LaunchEnvironment("torchrun", 0, 1, keeps_status=True),
        ),
        (SRUN, LaunchEnvironment("srun", 9, 11, 1, 3, "gpu07", 20123, parent=True)),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}, LaunchEnvironment("srun", 9, 11, 1, 3, "a", 7, parent=True)),
        (MPIRUN, LaunchEnvironment("mpirun", 1, 2, 1, 2, parent=True)),
        (TORCHRUN | SRUN, LaunchEnvironment("torchrun", 5, 8, 1, 4, "gpu01", 1234, True, 2, "torchrun x", parent=True)),
        # A job script sees the variables of task 0, but srun did not start it.
        ({"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, LaunchEnvironment()),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, LaunchEnvironment()),
    ],
    ids=["nothing", "left-over", "torchrun", "one-by-hand", "kept-status", "srun", "srun-address", "mpirun",
         "torchrun-in-slurm", "batch-script", "salloc"],
)  # fmt: skip
def test_place(environment: dict[str, str], place: LaunchEnvironment) -> None:
    assert detect_environment(environment) == place


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"WORLD_SIZE": "8"}, "env: RANK is not set though its companions are"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "env: RANK=8: must be below WORLD_SIZE=8"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, "env: RANK=x: not a number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "env: WORLD_SIZE=0: must be >= 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "env: MASTER_ADDR is not set, and the 2 ranks are not all on this host"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "env: LOCAL_RANK=4: must be below the 4 ranks of this host"),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},
            "env: SLURM_NTASKS=16 but WORLD_SIZE=8; unset WORLD_SIZE and RANK, or make them agree",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "80000"},
            "env: MASTER_PORT=80000: ports are 1 to 65535; choose a free one above 1023",
        ),
    ],
)
def test_contradictions_are_one_line_each(environment: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_environment(environment)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node[01-03,07],gpu2", "node01"),
        ("gpu[9,12-14]", "gpu9"),
        ("a-b.c,d", "a-b.c"),
        ("rack[1-2]-node[003-004]", "rack1-node003"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_expand_tasks() -> None:
    assert expand_tasks("8(x2),3") == [8, 8, 3]
    assert expand_tasks("2") == [2]


def test_every_variable_is_documented() -> None:
    root = Path(__file__).resolve().parents[3]
    source = "".join((root / "megalite" / "launch" / name).read_text() for name in ("environment.py", "launcher.py"))
    names = set(re.findall(r'"((?:[A-Z]+_)+[A-Z_]*[A-Z]|RANK)"', source)) - {"LOCAL_SIZE"}  # The end of a longer name.
    page = (root / "docs" / "launch.md").read_text()
    assert len(names) > 15
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_what_a_process_is_started_in_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"env: GLOO_SOCKET_IFNAME=eth99: \S+ has no such interface \(has: .*\); name"
    ):
        check_interface("eth99")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="the working directory has been deleted"):
        read_environment()
    monkeypatch.chdir(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_way_to_other_hosts_is_named() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no.such.host.invalid") is None
    hint = interface_hint("127.0.0.1")
    assert "the ranks have met over lo: try NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo" in hint and "has lo" in hint


@pytest.mark.parametrize("flags", ["--nprocs 2 --device cpu", "--load {folder}"])
@pytest.mark.parametrize("level", ["", "INFO"])
def test_torch_is_told_to_be_quiet_before_it_is_imported(flags: str, level: str, tmp_path: Path) -> None:
    """It reads the variable once: stack frames of a lost store would bury who is lost. (A torch that tells what it
    finds stands in for it.)"""
    (tmp_path / "torch").mkdir()
    tells = "import os\nprint('level', os.environ.get('TORCH_CPP_LOG_LEVEL'), flush=True)\nos._exit(9)\n"
    (tmp_path / "torch" / "__init__.py").write_text(tells)
    (tmp_path / "config.json").write_text("{}")
    root = Path(__file__).resolve().parents[3]
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1"
    data = "--train-iters 1 --mock-data --vocab-size 64"
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    own = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    own |= ranks | {"MASTER_PORT": "1", "PYTHONPATH": str(tmp_path)} | ({"TORCH_CPP_LOG_LEVEL": level} if level else {})
    command = [sys.executable, "pretrain_gpt.py", *f"{model} {data} {flags}".format(folder=tmp_path).split()]
    done = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True)
    assert done.returncode == 9, done.stdout + done.stderr
    assert done.stdout.split()[-1] in ((level,) if level else ("FATAL", "ERROR"))


def test_a_user_without_a_home_needs_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    with pytest.raises(DataError, match="--data-cache-path: not given, and this user has no home directory; name a"):
        cache_directory(None, None)
