"""`launch`: one process, local ranks and an outer launcher run the same `main`, with the exit codes users rely on."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.comm.world import World
from megalite.config import Config, ParallelConfig, parse
from megalite.config.parallel import DeviceOptions
from megalite.errors import ConfigError, DataError
from megalite.faults import fault_point
from megalite.launch import advise_threads, devices, launcher
from megalite.launch.devices import busy_cores, check_devices, choose_backend, thread_hint, threads_of
from megalite.launch.environment import LaunchEnvironment
from megalite.launch.launcher import launch
from megalite.launch.meeting import leave_together, open_store
from megalite.testing import run_ranks, run_single

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 12 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 64"
).split()


def config_of(*flags: str) -> Config:
    return parse([*MODEL, "--distributed-timeout-minutes", "0.5", *flags])


def main_writes(config: Config, world: World) -> None:
    total = torch.tensor(float(world.rank + 1))
    if world.size > 1:
        dist.all_reduce(total)
    folder = Path(os.environ["MEGALITE_TEST_FOLDER"])
    facts = [world.rank, world.size, world.local_rank, world.local_size, int(total), torch.get_num_threads()]
    (folder / f"{world.rank}.txt").write_text(" ".join(map(str, facts)))


def main_fails(config: Config, world: World) -> None:
    world.report_phase("reading data")
    fault_point("test.main", rank=world.rank)
    if world.rank == world.size - 1:
        raise DataError("--data-path=x: x.idx not found; run tools/preprocess_data.py")
    if world.size > 1:
        dist.all_reduce(torch.ones(1))


def body_launch(world: World, main_name: str, flags: list[str], place: LaunchEnvironment) -> int:
    return launch(config_of(*flags), globals()[main_name], place)


def _launch(
    folder: Path, main_name: str, flags: list[str], place: LaunchEnvironment | None = None, **env: str | None
) -> int:
    # The zygote sets OMP_NUM_THREADS; a user's shell usually does not.
    environment = {"MEGALITE_TEST_FOLDER": str(folder), "OMP_NUM_THREADS": None} | env
    return run_single(body_launch, main_name, flags, place or LaunchEnvironment(), env=environment)


def test_one_process_has_no_process_group(tmp_path: Path) -> None:
    assert _launch(tmp_path, "main_writes", []) == 0
    assert (tmp_path / "0.txt").read_text() == "0 1 0 1 1 1"


def test_nprocs_starts_local_ranks_that_share_the_cores(tmp_path: Path) -> None:
    assert _launch(tmp_path, "main_writes", ["--nprocs", "3"]) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert [(tmp_path / f"{r}.txt").read_text() for r in range(3)] == [f"{r} 3 {r} 3 6 {threads}" for r in range(3)]


@pytest.mark.parametrize(
    ("launcher", "allowed", "threads"),
    [("nprocs", 64, 8), ("torchrun", 64, 8), ("srun", 8, 8), ("srun", 64, 8), ("mpirun", 1, 1), ("torchrun", 4, 1)],
)
def test_cores_that_a_launcher_has_shared_out_are_not_shared_again(launcher: str, allowed: int, threads: int) -> None:
    assert threads_of(LaunchEnvironment(launcher, 0, 8, 0, 8), 64, allowed) == threads


@pytest.mark.parametrize(
    ("threads", "ranks", "cores", "busy", "hint"),
    [
        (2, 1, 2, 0, None),
        (1, 2, 2, 2, None),
        (4, 2, 8, 0, None),
        (2, 1, 2, 1, "2 threads on 2 cores, of which other programs keep 1 busy: .* OMP_NUM_THREADS=1"),
        (
            4,
            2,
            8,
            3,
            "2 ranks with 4 threads each on 8 cores, of which other programs keep 3 .* OMP_NUM_THREADS=2",
        ),
        (8, 1, 8, 20, "8 threads on 8 cores, of which other programs keep 8 busy: .* OMP_NUM_THREADS=1"),
    ],
)
def test_threads_without_idle_cores_are_hinted_at(
    threads: int, ranks: int, cores: int, busy: int, hint: str | None
) -> None:
    line = thread_hint(threads, ranks, cores, busy)
    assert line is None if hint is None else re.match(hint, line or "")


@pytest.mark.parametrize(("busy", "variable", "hint"), [(0, False, False), (4, False, True), (4, True, False)])
def test_advice_is_given_where_the_user_has_not_chosen(
    busy: int, variable: bool, hint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "busy_cores", lambda: busy)
    monkeypatch.setattr(launcher, "_cores", lambda: (4, 4))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    line = advise_threads(config_of("--nprocs", "2", "--device", "cpu"), LaunchEnvironment())
    assert (line is not None) == hint and (not hint or "2 ranks with 2 threads each on 4 cores" in str(line))


def test_a_program_that_computes_is_counted() -> None:
    """It counts at least what this test keeps busy itself."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 20
        while (busy_cores() or 0) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (busy_cores() or 0) >= 1
    finally:
        for other in others:
            other.kill()
            other.wait()


def main_writes_modes(config: Config, world: World) -> None:
    path = Path(os.environ["MEGALITE_TEST_FOLDER"]) / "modes.txt"
    path.write_text(f"{torch.are_deterministic_algorithms_enabled()} {os.environ.get('CUBLAS_WORKSPACE_CONFIG')}")


@pytest.mark.parametrize(("flags", "modes"), [([], "False None"), (["--deterministic-mode"], "True :4096:8")])
def test_deterministic_mode_is_set_before_the_device(flags: list[str], modes: str, tmp_path: Path) -> None:
    assert _launch(tmp_path, "main_writes_modes", flags, CUBLAS_WORKSPACE_CONFIG=None) == 0
    assert (tmp_path / "modes.txt").read_text() == modes


def test_omp_num_threads_wins(tmp_path: Path) -> None:
    assert _launch(tmp_path, "main_writes", ["--nprocs", "2"], OMP_NUM_THREADS="1") == 0
    assert (tmp_path / "1.txt").read_text().endswith(" 1")


def body_outer_rank(world: World, port: int, rank: int) -> int:
    """With `--nprocs` as a written plan has it: it agrees with the launcher."""
    place = LaunchEnvironment("torchrun", rank, 2, rank, 2, "127.0.0.1", port)
    return launch(config_of("--nprocs", "2"), main_writes, place)


def body_two_outer_ranks(world: World, port: int) -> list[int]:
    """Two processes as torchrun would start them, each with its own call of launch."""
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os._exit(body_outer_rank(world, port, rank))
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def test_outer_launcher_meets_over_tcp(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_single(body_two_outer_ranks, port, env={"MEGALITE_TEST_FOLDER": str(tmp_path)}) == [0, 0]
    assert [(tmp_path / f"{r}.txt").read_text()[:9] for r in range(2)] == ["0 2 0 2 3", "1 2 1 2 3"]


@pytest.mark.parametrize("flags", [[], ["--nprocs", "2"]])
def test_a_users_error_is_printed_once_and_exits_2(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert _launch(Path(), "main_fails", flags) == 2
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("---")]
    assert lines == ["error: --data-path=x: x.idx not found; run tools/preprocess_data.py"]


def test_another_number_than_the_launchers_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert _launch(Path(), "main_writes", ["--nprocs", "2"], LaunchEnvironment("torchrun", 0, 8)) == 2
    assert "--nprocs=2: torchrun already started this process as rank 0 of 8; drop --nprocs" in capfd.readouterr().out


def test_devices_that_are_not_there_are_refused_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        check_devices(ParallelConfig(hardware=DeviceOptions(device="cuda")), 1)
    assert caught.value.problems[0].startswith("--device=cuda: torch sees no GPU (torch 2.")
    with pytest.raises(ConfigError, match="^--distributed-backend=nccl: needs CUDA; use gloo$"):
        check_devices(ParallelConfig(hardware=DeviceOptions(distributed_backend="nccl")), 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="^4 ranks on this host: it has 2 GPUs; use 2 ranks or --device=cpu$"):
        check_devices(ParallelConfig(), 4)
    check_devices(ParallelConfig(hardware=DeviceOptions(device="cpu")), 4)
    check_devices(ParallelConfig(hardware=DeviceOptions(distributed_backend="gloo")), 4)


def test_a_gpu_that_torch_does_not_see_is_no_reason_to_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(devices, "DRIVERS", (tmp_path / "none", tmp_path))
    check_devices(ParallelConfig(), 1)  # this torch is for CPUs: its user wants no GPU
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"^--device=auto: this host has a GPU .* that torch 2.* does not see; "):
        check_devices(ParallelConfig(), 1)
    check_devices(ParallelConfig(hardware=DeviceOptions(device="cpu")), 1)


@pytest.mark.parametrize(("flags", "queues"), [
    ({}, None),
    ({"tensor_model_parallel_size": 2}, "1"),
    ({"tensor_model_parallel_size": 2, "zero_stage": 3}, None),
    ({"tensor_model_parallel_size": 2, "tp_comm_overlap": True}, None),
])  # fmt: skip
def test_libraries_are_told_what_the_layout_needs(flags: dict[str, Any], queues: str | None) -> None:
    told = devices.library_settings(ParallelConfig(**flags))
    assert told["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert told.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues


def body_leaves(world: World, folder: str) -> list[str]:
    """Who had come when this rank left."""
    place = LaunchEnvironment("torchrun", world.rank, world.size)
    store = open_store(place, "", 20, rendezvous=Path(folder) / "store")
    time.sleep(0.2 * world.rank)
    (Path(folder) / f"came {world.rank}").touch()
    leave_together(store, world.rank, world.size)
    return sorted(path.name for path in Path(folder).glob("came *"))


def test_ranks_leave_by_the_store_together(tmp_path: Path) -> None:
    seen = run_ranks(body_leaves, 3, str(tmp_path))
    assert seen == [["came 0", "came 1", "came 2"]] * 3


def test_backend_follows_the_device() -> None:
    assert choose_backend(ParallelConfig(), torch.device("cpu")) == "gloo"
    assert choose_backend(ParallelConfig(), torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    assert (
        choose_backend(ParallelConfig(hardware=DeviceOptions(distributed_backend="gloo")), torch.device("cuda"))
        == "gloo"
    )


class Gpu:
    """Where a GPU hangs, as torch tells it."""

    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0


@pytest.mark.parametrize(
    ("node", "cores", "allowed", "bound"),
    [
        ("1", "2-3,6", 8, {2, 3, 6}),
        ("1", "2-3,6", 4, set()),  # somebody has bound the process
        ("-1", "", 8, set()),  # one node
        ("", "", 8, set()),  # nothing is told
    ],
)
def test_a_rank_keeps_to_the_cores_of_its_gpu(
    node: str, cores: str, allowed: int, bound: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if node:
        for folder, name, text in (
            ("bus/pci/devices/0000:3b:00.0", "numa_node", node),
            (f"devices/system/node/node{node}", "cpulist", cores),
        ):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / name).write_text(f"{text}\n")
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(cores))
    assert devices.bind_to_node(Gpu(), tmp_path) == bound
    assert calls == ([bound] if bound else [])
