"""Ranks for a function: the launcher without a configuration."""

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.comm import World
from megalite.config import DeviceOptions, ParallelConfig
from megalite.errors import ConfigError, MegaliteError, RuntimeFailure
from megalite.launch import LaunchEnvironment, launch, print_error, read_environment
from megalite.scratch import scratch_folder

Value = TypeVar("Value")
TRIAL_SECONDS = 1.0
ALONE_SECONDS = 30.0
VALUE, TENSORS = "value.json", "tensors.safetensors"
"""What rank 0 returned, for the process that started it."""


@dataclass(frozen=True)
class LaunchSettings:
    """What the launcher asks of a configuration."""

    parallel: ParallelConfig


def run(
    function: Callable[[World], Value],
    nprocs: int | None = None,
    *,
    device: str = "auto",
    timeout_minutes: float = 10.0,
) -> Value:
    """Runs `function(world)` on every rank and returns what it returned: on rank 0 of those that are started here, on
    this process's rank otherwise.

    nprocs: ranks to start on this machine, one for each GPU or core; None: one. It does not count under torchrun, srun
        or mpirun, which have started the ranks.
    device: 'auto', 'cpu' or 'cuda'.
    timeout_minutes: how long a rank may wait for another.

    Of ranks that are started here rank 0 must return None, numbers, strings, tensors (which come back on the CPU), or
    lists, tuples and dicts of them. A failure ends in SystemExit, once its lines are printed: status 2 for a
    MegaliteError other than RuntimeFailure, otherwise the rank that failed first has been named; at Python's prompt, in
    RuntimeFailure. In a single process exceptions that are no MegaliteError pass through.
    """
    try:
        place = read_environment()
        parallel = ParallelConfig(
            nprocs=None if place.launcher else nprocs,
            hardware=DeviceOptions(device=device),
            distributed_timeout_minutes=timeout_minutes,
        )
        with scratch_folder() as folder:
            status, value = _run(function, place, parallel, folder)
    except MegaliteError as error:
        print_error(error)
        status, value = 2, []
    if status:
        _end(status)
    return value[0]


def _run(
    function: Callable[[World], Value], place: LaunchEnvironment, parallel: ParallelConfig, folder: Path
) -> tuple[int, list[Value]]:
    """The launcher's status, and, if that is 0, what `run` returns. place: who has started this process. folder: where
    rank 0 leaves what it returns."""
    name = getattr(function, "__name__", "your function")
    here: list[Value] = []
    waiting: list[threading.Timer] = []
    ranks = parallel.nprocs or 1
    one_thread = ranks > 1 and not _threads_survive_a_fork()
    if one_thread and (os.cpu_count() or 1) >= 2 * ranks:  # else they would have one each
        warnings.warn(
            "ranks compute with one thread each, which is slower: this process has computed with several, and no fork "
            "keeps them; call megalite.run before anything is computed here, or start the script with torchrun",
            stacklevel=3,
        )

    def begin(_: LaunchSettings, world: World) -> None:
        if one_thread:
            torch.set_num_threads(1)
        world.report_phase(name)
        value = function(world)
        waiting.append(_tell_if_waiting(name, world))
        if world.size == 1 or place.launcher:
            here.append(value)
        elif world.is_first:
            write_value(value, folder, name)

    status = launch(LaunchSettings(parallel), begin, place)
    for timer in waiting:  # of a process that has more to do than this run
        timer.cancel()
    return status, here if status or here else [read_value(folder)]


def _tell_if_waiting(name: str, world: World) -> threading.Timer:
    """Will say it, unless cancelled, where a rank that has returned still waits for others: one of them may wait for it
    in a collective, which ends by a time-out only. Of two such ranks both say it."""
    line = (
        f"rank {world.rank} returned from {name} {ALONE_SECONDS:g} s ago and waits for the others; what all ranks must "
        "call (all_weights, save, step) waits in vain for one that has returned"
    )
    timer = threading.Timer(ALONE_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if world.size > 1 and world.rank <= 1:
        timer.start()
    return timer


def _end(status: int) -> NoReturn:
    """Ends a script or a cell. Python's prompt would end, too, with all that its user has there: it gets an error."""
    if hasattr(sys, "ps1") and "IPython" not in sys.modules:
        raise RuntimeFailure(f"megalite.run failed with status {status}; the lines above say why")
    raise SystemExit(status)


def _threads_survive_a_fork() -> bool:
    """Whether a rank that is forked here can compute with several threads. Where this process has done so (a cell of a
    notebook, say), it would wait for threads that only its parent has. A child tries."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(2)
        torch.ones(1 << 20).exp()
        os._exit(0)
    patience = time.monotonic() + TRIAL_SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > patience:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.002)
    return True


def write_value(value: object, folder: Path, giver: str) -> None:
    """Leaves a value in a folder. Raises ConfigError, which names `giver`, for what is no plain value."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(value, tensors, giver))
    save_file(tensors, folder / TENSORS)
    (folder / VALUE).write_text(text, encoding="utf-8")


def read_value(folder: Path) -> Any:
    """What `write_value` has left there; tensors are on the CPU."""
    return _whole(json.loads((folder / VALUE).read_text(encoding="utf-8")), load_file(folder / TENSORS))


def _plain(value: object, tensors: dict[str, Tensor], giver: str) -> Any:
    """JSON of a value; its tensors are added to `tensors`. What is no list, number or string is {kind: content}."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()  # also of tensors that share memory
        return {"tensor": name}
    if isinstance(value, list):
        return [_plain(item, tensors, giver) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, tensors, giver) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(part, tensors, giver) for part in item] for item in value.items()]}
    raise ConfigError(
        f"{giver} returns {type(value).__name__}, which does not leave its rank; return numbers, strings, tensors, or "
        "lists, tuples and dicts of them"
    )


def _whole(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [_whole(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_whole(item, tensors) for item in content)
    return {_whole(key, tensors): _whole(item, tensors) for key, item in content}
