"""What memory a process draws from, and how much of it is free: its host's, and that of control groups.

A number that is not known (another system than Linux, a file that is not there) is left out: no pool, no complaint.
"""

import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63


@dataclass(frozen=True)
class Pool:
    """Bytes that a rank can have. Ranks that name the same `key` share them.

    free: not in use, with what the kernel can give back (page cache). swap: can be had beyond that.
    """

    key: str
    name: str
    free: float
    total: float
    swap: float = 0.0


def host_pools(rank: int | None, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Pool]:
    """The memory of this host, of every control group with a limit that this process is in, and the `ulimit -v` of rank
    `rank` (None: not asked, since a GPU's driver maps far more than it uses)."""
    sizes = _numbers(proc / "meminfo", unit=1024)
    if "MemAvailable" not in sizes or "MemTotal" not in sizes:
        return []
    machine = machine_id(proc)
    swap, host = sizes.get("SwapFree", 0.0), f"host {socket.gethostname()}"
    pools = [Pool(machine, host, sizes["MemAvailable"], sizes["MemTotal"], swap)]
    pools += _control_groups(proc / "self/cgroup", cgroups, pools[0])
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _text(proc / "self/statm").split()
    if rank is not None and space != resource.RLIM_INFINITY and pages:
        mapped = float(pages[0]) * os.sysconf("SC_PAGE_SIZE")
        pools.append(Pool(f"{machine} rank {rank}", "its address space (ulimit -v)", max(0.0, space - mapped), space))
    return pools


def free_memory() -> float:
    """Bytes that this process can still have, swap included; infinite where that is not known."""
    return min((pool.free + pool.swap for pool in host_pools(0)), default=float("inf"))


def machine_id(proc: Path = PROC) -> str:
    """The same for all processes of a machine, whatever containers call it."""
    return _text(proc / "sys/kernel/random/boot_id") or socket.gethostname()


def _control_groups(table: Path, mount: Path, machine: Pool) -> Iterator[Pool]:
    """Those with a limit, of version 1 or 2. A group that is seen from inside a container is not where the table says,
    but one of its parents is."""
    for line in _text(table).splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        second = controllers == ""
        if not second and "memory" not in controllers.split(","):
            continue
        top = mount if second else mount / "memory"
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        prefix = "" if second else "total_"
        given_back = (f"{prefix}inactive_file", f"{prefix}active_file", "slab_reclaimable")
        inside = Path(path.strip().lstrip("/"))
        for folder in (top / inside, *(top / parent for parent in inside.parents)):
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < NO_LIMIT:
                most, swapped = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
                left = max(0.0, most - (swapped or 0.0)) if most is not None else float("inf")
                stat, at = _numbers(folder / "memory.stat"), folder.stat()
                free = max(0.0, limit - used + sum(stat.get(name, 0.0) for name in given_back))
                key = f"{machine.key} cgroup {at.st_dev}:{at.st_ino}"
                yield Pool(key, f"the control group of {machine.name}", free, limit, min(machine.swap, left))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> float | None:
    """None if there is no such file, or it says `max`."""
    text = _text(path)
    return float(text) if text.isdigit() else None


def _numbers(path: Path, unit: int = 1) -> dict[str, float]:
    """Lines `name: number kB` or `name number`."""
    pairs = (line.replace(":", " ").split()[:2] for line in _text(path).splitlines())
    return {pair[0]: unit * float(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
