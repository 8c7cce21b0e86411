"""Who started this process, and as which rank: a pure reading of a launcher's environment variables (no torch).

    torchrun, or by hand   RANK  WORLD_SIZE  LOCAL_RANK  LOCAL_WORLD_SIZE  MASTER_ADDR  MASTER_PORT
    mpirun (Open MPI)      OMPI_COMM_WORLD_{RANK, SIZE, LOCAL_RANK, LOCAL_SIZE}
    srun (SLURM)           SLURM_{PROCID, NTASKS, LOCALID, TASKS_PER_NODE, NODEID, JOB_NODELIST, JOB_ID}

`megalite.launch.launcher` passes the real environment; tests pass dictionaries.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megalite.errors import ConfigError

DEFAULT_PORT = 29500
# launcher, rank, size, local rank, local size
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)


@dataclass(frozen=True)
class LaunchEnvironment:
    """The rank of this process according to its launcher ("" = started alone), and where the ranks meet.

    agent_store: the launcher itself serves `master_port` (torchrun does), so no rank may. attempt: how often the
    launcher has restarted the ranks. launch: names the launch, if its ranks are restarted after a failure.
    parent: the launcher is the parent of the ranks, which end with it. keeps_status: it is `megalite.launch.torchrun`,
    which SIGUSR2 ends with status 2. started_by: its process, asked for before torch is imported: who was gone by then
    would not be missed; 0: not known.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    agent_store: bool = False
    attempt: int = 0
    launch: str = ""
    parent: bool = False
    keeps_status: bool = False
    started_by: int = 0


def detect_environment(environment: Mapping[str, str]) -> LaunchEnvironment:
    """Reads who started this process. Raises ConfigError with every contradiction found, in the form
    `env: SLURM_NTASKS=16 but WORLD_SIZE=8; ...`."""
    problems: list[str] = []
    for launcher, rank_name, size_name, local_rank_name, local_size_name in LAUNCHERS:
        if rank_name not in environment and size_name not in environment:
            continue
        # SLURM gives a job script the variables of task 0, though srun started nothing yet.
        batch = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
        if launcher == "srun" and (batch or rank_name not in environment):
            return LaunchEnvironment()
        rank = _number(environment, rank_name, problems)
        size = _number(environment, size_name, problems)
        local_rank = _number(environment, local_rank_name, problems, default=0)
        local_size = _local_size(environment, local_size_name, problems)
        if not problems:
            if size < 1:
                problems.append(f"env: {size_name}={size}: must be >= 1")
            elif rank >= size:
                problems.append(f"env: {rank_name}={rank}: must be below {size_name}={size}")
            if local_size > 1 and local_rank >= local_size:
                problems.append(
                    f"env: {local_rank_name}={local_rank}: must be below the {local_size} ranks of this host"
                )
            # torchrun under srun has one task per node; by hand, both describe the same ranks and must agree.
            tasks = environment.get("SLURM_NTASKS", "")
            by_hand = launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environment
            if by_hand and "SLURM_PROCID" in environment and tasks.isdigit() and int(tasks) != size:
                problems.append(
                    f"env: SLURM_NTASKS={tasks} but WORLD_SIZE={size}; unset WORLD_SIZE and RANK, or make them agree"
                )
        address = _address(environment, launcher, size, local_size, problems)
        port = _port(environment, launcher, problems)
        attempt = _number(environment, "TORCHELASTIC_RESTART_COUNT", problems, default=0)
        restarts = _number(environment, "TORCHELASTIC_MAX_RESTARTS", problems, default=0)
        if problems:
            raise ConfigError(problems)
        launch = f"torchrun {environment.get('TORCHELASTIC_RUN_ID', '')}" if restarts else ""
        agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        parent = launcher in ("srun", "mpirun") or "TORCHELASTIC_RUN_ID" in environment
        keeps_status = "SIGUSR2" in environment.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
        rest = (address, port, agent_store, attempt, launch, parent, keeps_status)
        return LaunchEnvironment(launcher, rank, size, local_rank, local_size, *rest)
    return LaunchEnvironment()


def _number(environment: Mapping[str, str], name: str, problems: list[str], default: int | None = None) -> int:
    text = environment.get(name, "")
    if text.isdigit():
        return int(text)
    if text:
        problems.append(f"env: {name}={text}: not a number")
    elif default is None:
        problems.append(
            f"env: {name} is not set though its companions are; start the ranks by torchrun, srun or mpirun"
        )
    return default or 0


def _local_size(environment: Mapping[str, str], name: str, problems: list[str]) -> int:
    """Ranks on this host; SLURM lists the tasks of all nodes in one text."""
    if name:
        return _number(environment, name, problems, default=1)
    tasks = expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1"))
    node = _number(environment, "SLURM_NODEID", problems, default=0)
    return tasks[node] if node < len(tasks) else 1


def _address(environment: Mapping[str, str], launcher: str, size: int, local_size: int, problems: list[str]) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if size <= local_size:
        return "127.0.0.1"
    if launcher == "srun" and nodes:
        return first_host(nodes)
    if not problems:
        problems.append(
            f"env: MASTER_ADDR is not set, and the {size} ranks are not all on this host; set it to rank 0's host"
        )
    return "127.0.0.1"


def _port(environment: Mapping[str, str], launcher: str, problems: list[str]) -> int:
    """Port on which the ranks meet; jobs of one SLURM host get different ones."""
    job = environment.get("SLURM_JOB_ID", "")
    default = 20000 + int(job) % 20000 if launcher == "srun" and job.isdigit() else DEFAULT_PORT
    port = _number(environment, "MASTER_PORT", problems, default=default)
    if not 0 < port < 65536 and not problems:
        problems.append(f"env: MASTER_PORT={port}: ports are 1 to 65535; choose a free one above 1023")
    return port


def first_host(nodes: str) -> str:
    """First host of a SLURM node list: `gpu[07-12,20],big1` -> `gpu07`."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", head.group() if head else nodes)


def expand_tasks(text: str) -> list[int]:
    """Tasks of each node from SLURM's short form: `8(x2),3` -> [8, 8, 3]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, repeat in runs for _ in range(int(repeat or 1))]
