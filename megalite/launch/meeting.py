"""Where ranks meet before they can talk to each other: the store, and the network interfaces to other hosts."""

from __future__ import annotations

import resource
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.errors import ConfigError, RuntimeFailure, rank_name
from megalite.launch.environment import LaunchEnvironment

if TYPE_CHECKING:
    import torch.distributed as dist

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def open_store(
    place: LaunchEnvironment, host: str, seconds: float, *, rendezvous: Path | None = None, serves: bool = False
) -> dist.Store:
    """A connection to the key-value store where ranks meet: a private file on one host, else TCP. serves: rank 0 serves
    the store with this connection, unless its launcher does. Raises ConfigError where it cannot, RuntimeFailure where
    it is not reached in `seconds`."""
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    if rendezvous is not None:
        store: dist.Store = dist.FileStore(str(rendezvous), place.size)
        store.set_timeout(limit)
        return store
    serves = serves and place.rank == 0 and not place.agent_store
    if serves:  # two connections a rank
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        where = place.master_addr, place.master_port
        store = dist.TCPStore(*where, is_master=serves, timeout=limit, wait_for_workers=False)
    except Exception as error:
        named, facts = f"env: MASTER_ADDR={where[0]}, MASTER_PORT={where[1]}", str(error).splitlines()[0]
        if serves:
            raise ConfigError(f"{named}: rank 0 cannot listen there ({facts}); choose a free port") from error
        raise RuntimeFailure(f"{named}: {rank_name(place.rank, host)} cannot reach rank 0 ({facts})") from error
    # A launcher's store outlives an attempt; one that rank 0 serves does not, and launchers may count differently.
    return dist.PrefixStore(f"megalite/{place.attempt if place.agent_store else 0}", store)


def leave_together(store: dist.Store, rank: int, size: int) -> None:
    """Returns when every rank has called it, and to rank 0, which may serve the store, when all others have returned.
    Raises torch's DistStoreError where a rank does not come within the store's time-out."""
    if store.add("leaving", 1) == size:
        store.set("all leave", "")
    store.wait(["all leave"])
    if rank and store.add("left", 1) == size - 1:
        store.set("all have left", "")
    if rank == 0 and size > 1:
        store.wait(["all have left"])


def check_interface(chosen: str) -> None:
    """Whether this host has the interfaces of GLOO_SOCKET_IFNAME=`chosen`. Raises ConfigError."""
    has = [name for _, name in socket.if_nameindex()]
    missing = [name for name in chosen.split(",") if name and name not in has]
    if missing:
        raise ConfigError(
            f"env: GLOO_SOCKET_IFNAME={missing[0]}: {socket.gethostname()} has no such interface (has: "
            f"{', '.join(has)}); name one of them, or unset it"
        )


def interface_to(address: str) -> str | None:
    """The interface by which this host reaches another one, a name or an IPv4 address; None: not known."""
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # which sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                except OSError:  # one without an address
                    continue
                if found[20:24] == own:
                    return name
    except OSError:
        pass
    return None


def interface_hint(address: str) -> str:
    """What to try where hosts that have met at `address` get no messages through to each other."""
    names = [name for _, name in socket.if_nameindex()]
    way = interface_to(address)
    line = f"{socket.gethostname()} has {', '.join(names)}, of which NCCL and gloo choose one by themselves"
    if way is not None:
        line += f"; the ranks have met over {way}: try NCCL_SOCKET_IFNAME={way} GLOO_SOCKET_IFNAME={way}"
    return f"{line} (NCCL_DEBUG=INFO tells what NCCL chose, NCCL_IB_DISABLE=1 leaves out InfiniBand)"
