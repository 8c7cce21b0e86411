"""`--max-restarts`: after a failure the ranks are started again; not after status 2, nor after a signal to all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.comm.world import World
from megalite.config import Config, parse
from megalite.errors import ConfigError
from megalite.launch.launcher import LaunchEnvironment, launch
from megalite.testing import run_single

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 64 --nprocs 2 --max-restarts 3 --auto-resume"
).split()


def main_fails(config: Config, world: World) -> None:
    """Rank 1 counts the attempts, and ends as the file says."""
    folder = Path(str(config.checkpoint.save))
    if world.rank == 1:
        attempt = len(list(folder.glob("attempt*")))
        (folder / f"attempt{attempt}").write_text(world.launch)
        endings = (folder / "endings").read_text().split()
        match endings[attempt] if attempt < len(endings) else "well":
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("injected fault")
            case "refused":
                raise ConfigError("what is wrong is wrong the next time too")
            case "ended":
                os.kill(os.getppid(), signal.SIGTERM)
                signal.pause()
    dist.all_reduce(torch.ones(1))


def body(world: World, folder: str) -> int:
    return launch(parse([*FLAGS, "--save", folder]), main_fails, LaunchEnvironment())


@pytest.mark.parametrize(
    ("endings", "status", "attempts"),
    [
        ("killed raises", 0, 3),
        pytest.param("killed killed killed killed killed", 1, 4, marks=pytest.mark.landing),
        ("killed refused", 2, 2),
        pytest.param("ended", 143, 1, marks=pytest.mark.landing),
    ],
)
def test_ranks_are_started_again(
    endings: str, status: int, attempts: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endings").write_text(endings)
    assert run_single(body, str(tmp_path)) == status
    assert len(list(tmp_path.glob("attempt*"))) == attempts
    assert len({path.read_text() for path in tmp_path.glob("attempt*")}) == 1, "not one launch"
    output = capfd.readouterr().out
    assert output.count("started again") == attempts - 1
    assert output.count("error: ") == attempts - (status == 0), output
