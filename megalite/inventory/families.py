"""Families of parameters: which axes cut them, over which their gradients are summed, over which ZeRO shards them.

    dense     tp cuts       the same on all ranks of cp x dp, whose samples and positions differ
    expert    etp, ep cut   the same on all ranks of edp, to which other tokens come

Each family sees all ranks of a stage: those along the axes that cut it, and copies along the others. What a stage keeps
in another precision (a router in fp32) is of the same family and has buffers of its own. The order of the table is the
order in which every rank reduces and steps.
"""

from __future__ import annotations

from typing import NamedTuple


class AxisFamily(NamedTuple):
    """Names of axes (`comm.mesh`). cut: may cut a parameter. shard: ZeRO shards over them. replicate: copies of the
    shards (hybrid sharding). Gradients are summed over shard x replicate."""

    name: str
    cut: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...]


AXIS_FAMILIES = {
    family.name: family
    for family in (
        AxisFamily("dense", ("tp",), ("cp", "dp_shard"), ("dp_replicate",)),
        AxisFamily("expert", ("etp", "ep"), ("edp_shard",), ("edp_replicate",)),
    )
}
