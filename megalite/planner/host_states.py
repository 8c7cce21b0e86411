"""Optimizer states off the device: what their step takes, and how large a model they leave room for.

    seconds        link (gradients down, weights up) + the slower of the host's memory and the disk
    efficiency     ait bw / (ait bw + peak): what is left of the peak where every byte that moves is waited for; ait is
                   arithmetic intensity, FLOP a byte (ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857, section 4.1)
    chunks         (room on a device x devices + room on a host x hosts) / 14 bytes: parameters of the largest model
                   whose chunks lie where there is room (PatrickStar, Fang et al., arXiv 2108.05818). What PatrickStar
                   trained is within 15 % of that (tests/unit/planner/test_host_states.py)

Bandwidths are those of the hardware file (`python tools/doctor.py` measures them); without them a step on the host is
priced as one on the device.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from megalite.config import OPTIMIZER_SPECS, Config
from megalite.inventory import ElementBytes, MemoryPlan, computations, given_plan, stage_layer_ranges
from megalite.planner.hardware import Hardware
from megalite.planner.memory import PlannedStages, pipeline_memory

CHUNK_BYTES = 14  # of a parameter in chunks: its 16 bits, which the gradient's take over, master and two moments
HOST_SHARE = 0.8  # of a host's memory that chunks may take: PatrickStar's own default


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """Part of `peak` FLOP/s that is reached. ait: FLOP a byte. bandwidth: bytes/s of one device's share."""
    return ait * bandwidth / (ait * bandwidth + peak)


Traffic = Mapping[str, tuple[float, float]]
"""Of a device's step, tier -> bytes of its share, and the bandwidth of that share, 0 where nothing is known of it."""


def host_traffic(config: Config, elements: float, hardware: Hardware, plan: MemoryPlan) -> Traffic:
    """Of the step of `elements` parameters of a device whose states are off it. All devices of a node share its memory
    and its disk."""
    size, in_file = ElementBytes.of(config), plan.file_fraction / plan.fraction if plan.fraction else 0.0
    states = size.wide * (1 + OPTIMIZER_SPECS[config.optimizer.optimizer].most_moments(config.optimizer))
    sent = 0.0 if hardware.on_cpu or plan.hosts_params else elements * (size.gradient + size.compute)
    both, devices = 0.0, hardware.devices_per_node
    if in_file and hardware.disk_read and hardware.disk_write:
        both = 2 / (1 / hardware.disk_read + 1 / hardware.disk_write)
    return {
        "the link to the host": (sent, hardware.host_link),
        "the host's memory": (elements * (2 * states + size.gradient + size.compute), hardware.host_copy / devices),
        "the disk": (in_file * elements * 2 * states, both / devices),
    }


def host_seconds(traffic: Traffic) -> float:
    """Of the step; 0 if nothing is known."""
    link, host, disk = (nbytes / bandwidth if bandwidth else 0.0 for nbytes, bandwidth in traffic.values())
    return link + max(host, disk)


def chunk_capacity(config: Config, world_size: int, hardware: Hardware) -> float:
    """Parameters of the largest model that can be trained in chunks over devices and hosts, with the activations of
    this one, all of it recomputed."""
    whole = replace(config.model, recompute_granularity="full", recompute_method=None, recompute_num_layers=None)
    lean = replace(config, model=whole)
    program = computations(lean, lean.num_microbatches(world_size))
    cuts = stage_layer_ranges(lean, program)
    memory = pipeline_memory(PlannedStages(lean, world_size, program, cuts, given_plan(lean), hardware.on_cpu))
    others = max(rank.total - rank.model_states for rank in memory)
    hosts = math.ceil(world_size / hardware.devices_per_node)
    devices = world_size * max(0.0, hardware.usable_bytes - others)
    return (devices + hosts * HOST_SHARE * hardware.host_memory_bytes) / CHUNK_BYTES
