"""The whole program under each launcher: the same losses, and the same answer to a wrong flag."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_gpt
from megalite.comm.world import World
from megalite.testing import run_single

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 3 --lr 1e-3 --log-interval 1 --mock-data --vocab-size 64 "
    "--eval-iters 0 --fp64 --device cpu"
).split()
LAUNCHERS = {
    "torchrun": {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{rank}", "SLURM_TASKS_PER_NODE": "2"},
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
}


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["lm_loss"] for record in records if record["kind"] == "train"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def body_main(world: World, argv: list[str]) -> int:
    return pretrain_gpt.main(argv)


def body_two_mains(world: World, argv: list[str], environment: dict[str, str], port: int) -> list[int]:
    """Two processes with the variables that a launcher would give them."""
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ |= {key: value.format(rank=rank) for key, value in environment.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os._exit(pretrain_gpt.main(argv))
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the same global batch in one process."""
    folder = tmp_path_factory.mktemp("one_process")
    assert run_single(body_main, [*FLAGS, "--save", str(folder)]) == 0
    losses = _losses(folder)
    assert len(losses) == 3
    return losses


def test_nprocs(reference: list[float], tmp_path: Path) -> None:
    assert run_single(body_main, [*FLAGS, "--nprocs", "2", "--save", str(tmp_path)]) == 0
    assert _losses(tmp_path) == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_environments_of_launchers(launcher: str, reference: list[float], tmp_path: Path) -> None:
    argv = [*FLAGS, "--save", str(tmp_path)]
    assert run_single(body_two_mains, argv, LAUNCHERS[launcher], _free_port()) == [0, 0]
    assert _losses(tmp_path) == pytest.approx(reference, rel=1e-12)


@pytest.mark.landing
def test_the_real_torchrun(reference: list[float], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "pretrain_gpt.py",
    ]
    subprocess.run([*command, *FLAGS, "--save", str(tmp_path)], cwd=ROOT, check=True, timeout=240)
    assert _losses(tmp_path) == pytest.approx(reference, rel=1e-12)


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_two_hosts_are_one_in_every_digit() -> None:
    subprocess.run([ROOT / "scripts" / "two_hosts.sh"], check=True, timeout=240)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_wrong_flag_is_answered_once_by_rank_0(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [*FLAGS, "--clip-grad", "-1"]
    assert run_single(body_two_mains, argv, LAUNCHERS[launcher], _free_port()) == [2, 2]
    assert capfd.readouterr().out.count("error: --clip-grad=-1") == 1
