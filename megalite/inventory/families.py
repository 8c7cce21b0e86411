"""Families of parameters: which axes cut them, over which their gradients are summed, over which ZeRO shards them.

    dense     tp cuts       the same on all ranks of cp x dp, whose samples and positions differ
    adapter   the same, of adapters beside frozen matrices
    expert    etp, ep cut   the same on all ranks of edp, to which other tokens come

Each family is spread over all ranks of a stage: it is cut along some axes and copied along the others. Parameters of
another precision (a router in fp32) are of the same family but have buffers of their own. The order of the table is the
order in which every rank reduces and steps.
"""

from typing import NamedTuple

DEALT = frozenset({"ep"})
"""Axes over which whole matrices of a stack are dealt out."""


class AxisFamily(NamedTuple):
    """Names of axes (`comm.mesh`). Gradients are summed over shard x replicate.

    cut: the axes that may cut a parameter.
    shard: the axes over which ZeRO shards.
    replicate: the axes along which the shards are copied (hybrid sharding).
    """

    name: str
    cut: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def differs(self, *, sharded: bool) -> tuple[str, ...]:
        """The axes along which ranks own other gradients. sharded: whether ZeRO shards the optimizer state."""
        return (*self.cut, *self.shard) if sharded else self.cut


AXIS_FAMILIES = {
    family.name: family
    for family in (
        AxisFamily("dense", ("tp",), ("cp", "dp_shard"), ("dp_replicate",)),
        AxisFamily("adapter", ("tp",), ("cp", "dp_shard"), ("dp_replicate",)),
        AxisFamily("expert", ("etp", "ep"), ("edp_shard",), ("edp_replicate",)),
    )
}
