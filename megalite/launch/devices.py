"""What computes on this host: GPUs or the CPU, the library by which ranks talk, and threads."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config import ParallelConfig
from megalite.errors import ConfigError, HostProblem
from megalite.launch.environment import LaunchEnvironment

if TYPE_CHECKING:
    import torch


DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))  # device files of NVIDIA's and AMD's drivers
LOOKS = 5  # of `busy_cores`
ANSWER_SECONDS = 120.0  # within which a host's check answers


def gpu_driver() -> Path | None:
    """The device file of this host's driver of GPUs, which is found without torch; None: there is none."""
    return next((path for path in DRIVERS if path.exists()), None)


@functools.cache
def count_devices() -> int:
    """GPUs of this host, for a process that will fork. A child asks: where no management library tells (ROCm, some
    containers) torch asks the driver, and whoever has done that can fork no rank that uses it."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return 0
    child, count = os.fork(), 0
    if child == 0:
        try:
            count = torch.cuda.device_count()
        finally:
            os._exit(count)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def check_devices(parallel: ParallelConfig, local_size: int, devices: int | None = None) -> None:
    """Whether this host's devices (None: asked for) are what `--device` and `--distributed-backend` ask for. Raises
    ConfigError."""
    import torch

    devices = torch.cuda.device_count() if devices is None else devices
    problems = []
    wants_cuda = parallel.hardware.device == "cuda" or (parallel.hardware.device == "auto" and devices > 0)
    if parallel.hardware.device == "cuda" and devices == 0:
        problems.append(f"`device`=cuda: torch sees no GPU (torch {torch.__version__}); use `device`=cpu")
    elif wants_cuda and local_size > devices and parallel.hardware.distributed_backend != "gloo":
        problems.append(f"{local_size} ranks on this host: it has {devices} GPUs; use {devices} ranks or `device`=cpu")
    driver = gpu_driver() if torch.version.cuda or torch.version.hip else None
    if parallel.hardware.device == "auto" and devices == 0 and driver is not None:
        problems.append(
            f"`device`=auto: this host has a GPU ({driver}) that torch {torch.__version__} does not see; install one "
            "for its driver, or say `device`=cpu"
        )
    if parallel.hardware.distributed_backend == "nccl" and not wants_cuda:
        problems.append("`distributed_backend`=nccl: needs CUDA; use gloo")
    if parallel.hardware.cuda_graph_impl != "none" and parallel.hardware.device == "auto" and devices == 0:
        problems.append("`cuda_graph_impl`=local: torch sees no GPU; leave it out")
    if problems:
        raise ConfigError(problems)


def host_problem(ranks: int, device: str) -> str:
    """What is wrong with this host; empty where it computes right. It is asked in a process of its own, `host_check`: a
    device that hangs is ended with it, and the rank that asks has touched none yet."""
    command = [sys.executable, "-m", "megalite.launch.host_check", str(ranks), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its devices did not answer for {ANSWER_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    lines = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()[-1:]]
    return lines[0] if lines else f"its check ended with status {done.returncode}"


def check_host(parallel: ParallelConfig, place: LaunchEnvironment) -> None:
    """Whether this host computes right: asked on one rank a host, where `--check-hosts` says so. Raises HostProblem."""
    if parallel.restarts.check_hosts and place.local_rank == 0:
        problem = host_problem(place.local_size, parallel.hardware.device)
        if problem:
            raise HostProblem(f"host {socket.gethostname()} is left out: {problem}")


def choose_device(parallel: ParallelConfig, place: LaunchEnvironment) -> torch.device:
    """The device of this rank: GPU number `local_rank` where there are GPUs, else the CPU. Raises ConfigError."""
    import torch

    devices = torch.cuda.device_count()
    one_gpu_per_task = devices == 1 and place.launcher in ("srun", "mpirun")
    check_devices(parallel, 1 if one_gpu_per_task else place.local_size, devices)
    if parallel.hardware.device == "cpu" or devices == 0:
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % devices)


def choose_backend(parallel: ParallelConfig, device: torch.device) -> str:
    """nccl for CUDA tensors, gloo for CPU tensors, unless `--distributed-backend` asks for gloo alone."""
    if device.type == "cuda" and parallel.hardware.distributed_backend != "gloo":
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def library_settings(parallel: ParallelConfig) -> dict[str, str]:
    """Environment variables for a rank with a GPU, where the user has not set them: memory grows in segments, so that
    it does not fragment; the flight recorder keeps the last collectives and writes them at a time-out; one hardware
    queue where tensor parallelism overlaps by the order of launches (as Megatron-LM asks for), not with ZeRO-3, experts
    or halves, whose messages wait for other streams."""
    settings = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    several = parallel.zero_stage == 3 or parallel.experts.expert_model_parallel_size > 1 or parallel.tp_comm_overlap
    if parallel.tensor_model_parallel_size > 1 and not several:
        settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return settings


def threads_of(place: LaunchEnvironment, cores: int, allowed: int) -> int:
    """How many threads a rank gets on a host with `cores` cores, of which it may use `allowed`: srun and mpirun may
    have bound it to its share already; --nprocs and torchrun leave the sharing to us."""
    bound = place.launcher in ("srun", "mpirun") and allowed < cores
    return max(1, allowed if bound else allowed // place.local_size)


def bind_to_node(gpu: Any, system: Path = Path("/sys")) -> set[int]:
    """Keeps this process on the cores next to its GPU, whose memory they reach without another socket; returns them:
    none where the process may not use all cores of the host, since somebody has bound it already, and where the system
    does not tell which cores these are. gpu: its properties, of torch."""
    place: list[Any] = [getattr(gpu, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if sys.platform != "linux" or None in place or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        return set()
    address = "{:04x}:{:02x}:{:02x}.0".format(*place)
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        spans = [span.partition("-") for span in listed.split(",")]
        cores = {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError):  # one node only (-1), a container without /sys, cores that are not ours
        return set()
    return cores


def busy_cores() -> int | None:
    """Cores of this host that other programs keep busy at this moment; None where the system does not tell. Linux
    counts the threads that run or could run; the middle one of a few looks counts, less this thread."""
    counts = []
    try:
        for _ in range(LOOKS):
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
            time.sleep(0.005)
    except (OSError, ValueError, IndexError):
        return None
    return max(0, sorted(counts)[LOOKS // 2] - 1)


def thread_hint(threads: int, ranks: int, cores: int, busy: int) -> str | None:
    """A line where ranks of this host have more threads together than cores are idle, which then wait for each other at
    every product; None: there is nothing to say."""
    idle = max(0, cores - busy)
    if threads == 1 or threads * ranks <= idle:
        return None
    fewer = max(1, idle // ranks)
    whose = f"{ranks} ranks with {threads} threads each" if ranks > 1 else f"{threads} threads"
    return (
        f"{whose} on {cores} cores, of which other programs keep {min(busy, cores)} busy: threads that wait for "
        f"each other make steps slow; set the environment variable OMP_NUM_THREADS={fewer}"
    )
