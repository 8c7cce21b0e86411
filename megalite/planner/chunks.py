"""The largest model that devices and hosts hold together, in chunks (PatrickStar, Fang et al., arXiv 2108.05818).

    (room for chunks on a device x devices + room on a host x hosts) / 14 bytes

A chunk lies where there is room: what activations leave of the devices, and the hosts. What PatrickStar trained is
within 15 % of that (tests/unit/planner/test_host_states.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

from megalite.config import Config
from megalite.inventory import stage_layer_ranges
from megalite.planner.hardware import Hardware
from megalite.planner.memory import pipeline_memory
from megalite.planner.predict import program_of

CHUNK_BYTES = 14
"""Of a parameter in chunks: its 16 bits, which the gradient's take over, master and two moments."""
HOST_SHARE = 0.8
"""Of a host's memory that chunks may take: PatrickStar's own default."""


def chunk_capacity(config: Config, world_size: int, hardware: Hardware) -> float:
    """Parameters of the largest model that can be trained in chunks over devices and hosts, with the activations of
    this one, all of it recomputed."""
    whole = replace(config.model, recompute_granularity="full", recompute_method=None, recompute_num_layers=None)
    lean = replace(config, model=whole)
    program = program_of(lean, world_size)
    memory = pipeline_memory(lean, world_size, program, stage_layer_ranges(lean, program), on_cpu=hardware.on_cpu)
    others = max(rank.total - rank.model_states for rank in memory)
    hosts = math.ceil(world_size / hardware.devices_per_node)
    devices = world_size * max(0.0, hardware.usable_bytes - others)
    return (devices + hosts * HOST_SHARE * hardware.host_memory_bytes) / CHUNK_BYTES
