"""What happens after a failure: restarts, and runs that continue with fewer or more ranks than they had."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option


@dataclass(frozen=True, kw_only=True)
class Restarts(Spelled):
    """Failures: restarts, spare ranks and a test of the hosts.

    None of it changes what is trained, so checkpoints do not keep it."""

    max_restarts: int = option(
        0,
        "start the ranks of `nprocs` so often again after a failure, from the newest checkpoint; not after status 2",
        ge=0,
        saved=False,
    )
    elastic: int | None = option(
        None,
        "train with as many data-parallel ranks as the started ones are enough for, but at least with N; the others "
        "wait as spares until a failed rank is replaced",
        metavar="N",
        ge=1,
        saved=False,
    )
    check_hosts: bool = option(
        False,
        "before the ranks meet, one rank a host tests its devices by products that are known; a host that fails is "
        "left out, and listed in `save`",
        saved=False,
    )
