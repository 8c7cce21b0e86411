"""Network interfaces of this host: which there are, and by which one it reaches the others (no torch)."""

from __future__ import annotations

import socket
import struct
import sys

from megalite.errors import ConfigError

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


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
