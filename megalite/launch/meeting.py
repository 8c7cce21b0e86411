"""The store where ranks meet before they can talk to each other."""

from __future__ import annotations

import resource
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.errors import ConfigError, RuntimeFailure, rank_name
from megalite.launch.environment import LaunchEnvironment

if TYPE_CHECKING:
    import torch.distributed as dist


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
