"""From an environment to a running world: the only reader of environment variables in the project.

    place = read_environment()                         who started this process? (no torch needed)
    status = launch(config, main, place)               main(config, world) on every rank; exit status

One process, `--nprocs N` (ranks forked here and supervised), torchrun, srun and mpirun end in the same call. Variables
that are read or set: the launchers' (see `environment`), OMP_NUM_THREADS, GLOO_SOCKET_IFNAME; with --deterministic-mode
CUBLAS_WORKSPACE_CONFIG and NCCL_ALGO, with GPUs those of `devices.library_settings` (all kept if set).

torch is imported when ranks start: a wrong flag is answered at once. Proof: `tests/distributed/launch`, `tests/faults`.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from megalite.config import ParallelConfig
from megalite.errors import ConfigError, HostProblem, MegaliteError, PeerLost
from megalite.events import tell_event
from megalite.launch import environment
from megalite.launch.devices import (
    bind_to_node,
    busy_cores,
    check_devices,
    check_host,
    choose_backend,
    choose_device,
    count_devices,
    gpu_driver,
    library_settings,
    thread_hint,
    threads_of,
)
from megalite.launch.environment import LaunchEnvironment
from megalite.launch.meeting import check_interface, interface_hint, leave_together, open_store
from megalite.launch.output import list_host, print_error, print_interrupted, print_lost
from megalite.launch.rank_page import RankError, RankPage
from megalite.launch.signals import EndAtOnce, ends_at_once, ignored
from megalite.launch.spares import release_spares, take_seat, wait_as_spare
from megalite.launch.supervisor import INTERRUPTED, Outcome, supervise
from megalite.launch.watch import RankWatch
from megalite.scratch import scratch_folder

if TYPE_CHECKING:
    import torch.distributed as dist

    from megalite.comm import World


class Launched(Protocol):
    """What is launched: a `Config`, or less."""

    @property
    def parallel(self) -> ParallelConfig: ...


Settings = TypeVar("Settings", bound=Launched)
Main = Callable[[Settings, "World"], int | None]
"""What every rank runs; its return value (None = 0) is the rank's exit status."""

logger = logging.getLogger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
HANG_GRACE_SECONDS = 10.0
FAREWELL_SECONDS = 60.0
RANKS_PER_CORE = 64
SOLO = LaunchEnvironment()


def read_environment() -> LaunchEnvironment:
    """The place of this process, from the environment; quiets torch's C++. Raises ConfigError for contradictions."""
    try:
        os.getcwd()
    except OSError:
        raise ConfigError("the working directory has been deleted; change into one that exists") from None
    place = environment.detect_environment(os.environ)
    if place.size > 1:  # torch reads it when it is imported; of its lines only NCCL's watchdog's are wanted
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if gpu_driver() else "FATAL")
    return replace(place, started_by=os.getppid())


def launch(
    config: Settings,
    main: Main[Settings],
    started: LaunchEnvironment = SOLO,
    *,
    ranks: int | None = None,
    left_out: Path | None = None,
    saves: bool = True,
) -> int:
    """Runs `main(config, world)` on every rank and returns the exit status of this process.

    ranks: how many train; None: all that were started. The others wait as spares.
    left_out: file in which a host that `--check-hosts` leaves out is listed. saves: whether there may be checkpoints.
    0 done; 2 a MegaliteError about configuration or input, its lines printed once; otherwise the run failed, and the
    rank that failed first is named. In a world of one process other exceptions pass through to the caller.
    """
    nprocs, page, place = config.parallel.nprocs, RankPage(), started
    if ends_at_once():
        EndAtOnce(lambda: page.phase, tells=place.rank == 0).install()
    watch: RankWatch | None = None
    try:
        if place.launcher:
            _check_launcher(config.parallel, place, ranks)
        if max(place.size, nprocs or 1) > 1:
            check_interface(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        if place.launcher or nprocs is None or (nprocs == 1 and not config.parallel.restarts.max_restarts):
            seat = started if ranks is None else take_seat(started, ranks, config.parallel.ranks_together)
            host, seconds = socket.gethostname(), 60 * config.parallel.distributed_timeout_minutes
            if seat is None:
                return wait_as_spare(started, host, seconds)
            place = seat
            if place.size > 1:
                watch = RankWatch(place, page, hang_seconds=seconds, host=host)
            return _run_rank(config, main, place, page.set_phase, watch=watch, spares=started.size - place.size)
        check_devices(config.parallel, nprocs, count_devices())
        return _run_local_attempts(config, main, nprocs, saves)
    except KeyboardInterrupt:
        if place.rank == 0:
            print_interrupted(page.phase, saves=saves)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, HostProblem) and left_out is not None:
            list_host(left_out, str(error))
        return _leave_failed(error, place, watch)


def _leave_failed(error: Exception, place: LaunchEnvironment, watch: RankWatch | None) -> int:
    """Tells of the exception that ends this rank, and returns the exit status; in a world of one process only a
    MegaliteError does not pass on. The rank that broke tells why; those that lost it tell nothing, or name it."""
    description = RankError.of(error)
    speaks = isinstance(error, MegaliteError) and not isinstance(error, PeerLost)
    if watch is not None and description.communication and not speaks:
        if blame := watch.account(description.text.strip().split("\n")[0]):
            print_lost(blame)
        return 1
    if isinstance(error, MegaliteError):
        tells = watch.tells(str(error)) if watch is not None else None
        if tells is None:  # All ranks have the same configuration errors.
            tells = place.rank == 0 or not isinstance(error, ConfigError)
        if tells:
            print_error(error)
    elif watch is None:
        raise error
    else:
        print(description.traceback.rstrip(), file=sys.stderr, flush=True)
    first = place.local_rank == 0
    if watch is not None:
        first = watch.leave_word(f"{description.type}: {description.text.strip()[:300]}")
    if description.exit_code == 2 and first:
        end_launcher(place)
    return description.exit_code


def end_launcher(place: LaunchEnvironment) -> None:
    """Ends a launcher that would restart the ranks, though what is wrong (status 2) is wrong the next time too."""
    if place.launch or place.keeps_status:
        os.kill(os.getppid(), signal.SIGUSR2 if place.keeps_status else signal.SIGTERM)


def _check_launcher(parallel: ParallelConfig, place: LaunchEnvironment, ranks: int | None) -> None:
    """What does not go together with the launcher of these ranks. Raises ConfigError."""
    restarts, nprocs = parallel.restarts, parallel.nprocs
    if restarts.max_restarts:
        raise ConfigError(
            f"`max_restarts`={restarts.max_restarts}: {place.launcher} started these ranks; drop it, or `nprocs` alone"
        )
    if nprocs not in (None, place.size, ranks):
        raise ConfigError(
            f"`nprocs`={nprocs}: {place.launcher} already started this process as rank {place.rank} of "
            f"{place.size}; drop `nprocs`"
        )
    if restarts.elastic is not None and place.launch and place.agent_store:
        raise ConfigError(
            "env: TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not set: `elastic` under torchrun needs it to be 1, or ranks "
            "would look for each other at a host that is lost; export it before torchrun, on every host"
        )


def _run_local_attempts(config: Settings, main: Main[Settings], nprocs: int, saves: bool) -> int:
    """Runs the ranks of this host, again after a failure where `--max-restarts` says so; the last exit status."""
    most = config.parallel.restarts.max_restarts
    for attempt in range(most + 1):
        outcome = _run_local_ranks(config, main, nprocs)
        _report(outcome, saves)
        stopped = outcome.ended_by is not None or signal.SIGINT in outcome.signals
        if outcome.exit_code in (0, 2) or stopped or attempt == most:
            break
        logger.warning("the ranks are started again (%d of %d times)", attempt + 1, most)
    return outcome.exit_code


def _run_local_ranks(config: Settings, main: Main[Settings], nprocs: int) -> Outcome:
    """Forks and supervises `nprocs` ranks on this host. Raises ConfigError where this host cannot run that many."""
    cores = os.cpu_count() or 1
    if nprocs > RANKS_PER_CORE * cores:
        most = RANKS_PER_CORE * cores
        raise ConfigError(f"`nprocs`={nprocs}: this host has {cores} cores, at most {most} ranks start; use more hosts")

    # The ranks share what is imported before the fork; torch._dynamo is what the first optimizer would import in each.
    # Not with GPUs: a library that asks the CUDA driver for devices while it is imported would spoil the fork.
    if count_devices() == 0:
        importlib.import_module("torch._dynamo")
    with scratch_folder() as folder:
        rendezvous = folder / "rendezvous"
        name = f"nprocs {socket.gethostname()} {os.getpid()}" if config.parallel.restarts.max_restarts else ""

        def body(rank: int, page: RankPage) -> int:
            place = LaunchEnvironment("nprocs", rank, nprocs, rank, nprocs, launch=name)
            return _run_rank(config, main, place, page.set_phase, rendezvous)

        seconds = 60 * config.parallel.distributed_timeout_minutes + HANG_GRACE_SECONDS
        return supervise(nprocs, body, hang_seconds=seconds, forward=FORWARDED)


def _report(outcome: Outcome, saves: bool) -> None:
    """Tells what went wrong: the lines of a user's error, or the first traceback and who failed when."""
    culprit = outcome.culprit
    if culprit is None:
        return
    if outcome.ended_by is not None:
        print_interrupted(culprit.phase, outcome.ended_by, saves=saves)
        return
    if culprit.error is not None and culprit.error.exit_code == 2:
        print_error(culprit.error.text)
        return
    if culprit.error is not None and not culprit.error.for_user:
        print(culprit.error.traceback.rstrip(), file=sys.stderr)
    print(f"error: {outcome.describe()}", file=sys.stderr, flush=True)
    if culprit.error is None:
        tell_event("lost", line=culprit.describe())


def _run_rank(
    config: Settings,
    main: Main[Settings],
    place: LaunchEnvironment,
    set_phase: Callable[[str], None],
    rendezvous: Path | None = None,
    watch: RankWatch | None = None,
    spares: int = 0,
) -> int:
    """One rank: device, threads, process group, self-test, `main`, and a clean end."""
    import torch

    from megalite.comm import World

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes raw lines on standard error
    if config.parallel.hardware.deterministic_mode:
        be_deterministic()
    device = choose_device(config.parallel, place)
    if place.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of(place, *_cores()))
    if device.type == "cuda":
        for name, value in library_settings(config.parallel).items():
            if name != "PYTORCH_ALLOC_CONF" or "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
                os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
        bind_to_node(torch.cuda.get_device_properties(device))
    world = World(
        rank=place.rank,
        size=place.size,
        device=device,
        local_rank=place.local_rank,
        local_size=place.local_size,
        host=socket.gethostname(),
        launch=place.launch,
        report_phase=set_phase,
    )
    if world.size == 1:
        return _run_alone(config, main, place, world, spares)

    import torch.distributed as dist

    set_phase("start-up self-test")
    store = _join(config, world, place, rendezvous, watch)
    status = _but_interrupted(main(config, world))
    set_phase("leaving")
    with ignored():
        if watch is not None:
            watch.leave()
        if spares and world.is_first:
            release_spares(store, spares)
        # No rank tears connections down while a peer still needs them. With GPUs gloo has made none yet, and where a
        # host's name means its loopback it could make none now.
        if device.type == "cuda":
            leave_together(store, world.rank, world.size)
        else:
            dist.all_reduce(torch.zeros(1, device="cpu"))
        dist.destroy_process_group()
    return status


def _run_alone(config: Settings, main: Main[Settings], place: LaunchEnvironment, world: World, spares: int) -> int:
    """The only rank that trains."""
    check_host(config.parallel, place)
    store = open_store(place, world.host, FAREWELL_SECONDS, serves=True) if spares else None
    status = main(config, world) or 0
    if store is not None:
        release_spares(store, spares)
    return _but_interrupted(status) if place.launcher else status


def _but_interrupted(status: int | None) -> int:
    """The status of a rank: Ctrl-C is its launcher's to report, which would take it for a failure of this rank."""
    return 0 if status in (None, INTERRUPTED) else status


def _join(
    config: Launched, world: World, place: LaunchEnvironment, rendezvous: Path | None, watch: RankWatch | None
) -> dist.Store:
    """Meets the other ranks, compares configurations, forms the process group, tries it. Returns where they met."""
    import torch.distributed as dist

    from megalite.launch import self_test

    seconds = 60 * config.parallel.distributed_timeout_minutes
    store = open_store(place, world.host, seconds, rendezvous=rendezvous, serves=True)
    if watch is not None:
        watch.meet(open_store(place, world.host, seconds))
    check_host(config.parallel, place)
    self_test.check_same_config(store, world, self_test.run_fingerprint(config), seconds)
    if world.local_size == world.size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # One host: nothing listens on an outer interface.
    if world.device.type == "cuda":  # nothing uses gloo there: no mesh of sockets over all ranks
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Without `device_id`: bound to a device, all messages of a pipeline rank in one direction would share a stream, and
    # a send would queue behind the receive that was posted early.
    dist.init_process_group(
        choose_backend(config.parallel, world.device),
        store=dist.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=seconds),
    )
    several = world.size > world.local_size
    self_test.check_collective(store, world, seconds, interface_hint(place.master_addr) if several else "")
    return store


def be_deterministic() -> None:
    """`--deterministic-mode`, for the rest of this process: sums of one order in torch, cuBLAS and NCCL."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")  # rings and trees add in one order, a switch does not
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's stubs


def _cores() -> tuple[int, int]:
    """Cores of this host, and those that this process may use."""
    cores = os.cpu_count() or 1
    return cores, len(os.sched_getaffinity(0)) if sys.platform == "linux" else cores


def advise_threads(config: Launched, place: LaunchEnvironment) -> str | None:
    """Which variable is worth a try, before ranks compute on a CPU that others use too; None: nothing to say."""
    if "OMP_NUM_THREADS" in os.environ or (config.parallel.hardware.device != "cpu" and count_devices()):
        return None
    ranks, cores = config.parallel.nprocs or place.local_size, _cores()
    busy = busy_cores()
    threads = threads_of(replace(place, local_size=ranks), *cores)
    siblings = place.local_size - 1  # a launcher's other ranks, which start up now
    return None if busy is None else thread_hint(threads, ranks, cores[1], max(0, busy - siblings))
