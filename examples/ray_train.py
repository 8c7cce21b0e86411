"""Ranks started by Ray, which starts them again after a failure.

    python examples/ray_train.py WORKERS --config FILE.yaml --save DIR --auto-resume [--flag value ...]

Each of Ray's workers starts pretrain_gpt.py as a child, which ends with it: an attempt begins with clean processes. The
plain data-parallel trainer is used, because the one for torch forms a process group of its own. Status 2 (a flag or a
file is wrong) is not tried again.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

PROGRAM = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"


def run_rank(settings: dict[str, list[str]]) -> int:
    """One worker: the rank of its place in Ray's group, until that ends; its exit status."""
    from megalite.launch import die_with_parent

    context, worker = ray.train.get_context(), os.getpid()
    with socket.socket() as probe:
        probe.bind(("", 0))
        meeting = broadcast_from_rank_zero([ray.util.get_node_ip_address(), probe.getsockname()[1]])
    place = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": meeting[1],
    }
    environment = os.environ | {name: str(value) for name, value in place.items()}
    command = [sys.executable, str(PROGRAM), *settings["flags"]]
    status = subprocess.run(command, env=environment, preexec_fn=lambda: die_with_parent(worker)).returncode
    if status not in (0, 2):
        raise RuntimeError(f"rank {place['RANK']} ended with status {status}")
    return status


def main(workers: int, flags: list[str]) -> int:
    """Runs the ranks, at most three times again; the exit status."""
    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={"flags": flags},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu="GPU" in ray.cluster_resources()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    return int(trainer.fit().return_value)


if __name__ == "__main__":
    ray.init()
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
