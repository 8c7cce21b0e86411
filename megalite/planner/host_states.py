"""Optimizer states off the device: what their step takes.

    seconds        link (gradients down, weights up) + the slower of the host's memory and the disk
    efficiency     ait bw / (ait bw + peak): what is left of the peak where every byte that moves is waited for; ait is
                   arithmetic intensity, FLOP a byte (ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857, section 4.1)

Bandwidths are those of the hardware file (`python tools/doctor.py` measures them); without them a step on the host is
priced as one on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import OPTIMIZER_SPECS, Config
from megalite.inventory import ElementBytes, MemoryPlan
from megalite.planner.hardware import Hardware


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """Part of `peak` FLOP/s that is reached. ait: FLOP a byte. bandwidth: bytes/s of one device's share."""
    return ait * bandwidth / (ait * bandwidth + peak)


@dataclass(frozen=True)
class HostTraffic:
    """Bytes of one device's share of a step, and the bandwidth of that share; 0 where nothing is known of it."""

    link: float
    host: float
    disk: float
    link_bandwidth: float
    host_bandwidth: float
    disk_bandwidth: float

    @property
    def seconds(self) -> float:
        """Of the step; 0 if nothing is known."""
        link, host, disk = (
            nbytes / bandwidth if bandwidth else 0.0
            for nbytes, bandwidth in (
                (self.link, self.link_bandwidth),
                (self.host, self.host_bandwidth),
                (self.disk, self.disk_bandwidth),
            )
        )
        return link + max(host, disk)


def host_traffic(config: Config, elements: float, hardware: Hardware, plan: MemoryPlan) -> HostTraffic:
    """Of the step of `elements` parameters of a device whose states are off it. All devices of a node share its memory
    and its disk."""
    size, in_file = ElementBytes.of(config), plan.file_fraction / plan.fraction if plan.fraction else 0.0
    states = size.wide * (1 + OPTIMIZER_SPECS[config.optimizer.optimizer].most_moments(config.optimizer))
    both = 0.0
    if in_file and hardware.disk_read and hardware.disk_write:
        both = 2 / (1 / hardware.disk_read + 1 / hardware.disk_write)
    return HostTraffic(
        link=0.0 if hardware.on_cpu or plan.hosts_params else elements * (size.gradient + size.compute),
        host=elements * (2 * states + size.gradient + size.compute),
        disk=in_file * elements * 2 * states,
        link_bandwidth=hardware.host_link,
        host_bandwidth=hardware.host_copy / hardware.devices_per_node,
        disk_bandwidth=both / hardware.devices_per_node,
    )
