"""Memory that all buffers of a rank share: scratch, the order in which weights come, and the way to the host."""

import torch

from megalite.parallel.tiers import Mover, TieredMemory
from megalite.parallel.zero.host_gradient import HostedPool
from megalite.parallel.zero.host_memory import prefer_own_pages
from megalite.parallel.zero.options import ZeroOptions
from megalite.parallel.zero.streamed_gradient import ScratchPool
from megalite.parallel.zero.unshard import Unsharder


class RankMemory:
    """The memory of one rank.

    mover: makes copies between the device and the host.
    tier: of weights and gradients whose home is the host; None: it is the device.
    """

    def __init__(self, device: torch.device, options: ZeroOptions, mover: Mover | None = None) -> None:
        self.device, self.mover = device, mover or Mover(device)
        self.tier = TieredMemory(self.mover) if options.offload_params else None
        self.unsharder = Unsharder(prefetch=options.overlap_param_gather or options.offload_params)
        self._pools: dict[torch.dtype, ScratchPool] = {}
        if options.stage >= 2 or options.offload_params:
            prefer_own_pages(device)

    def scratch(self, dtype: torch.dtype) -> ScratchPool:
        """For gradients of this dtype."""
        if dtype not in self._pools:
            tier = self.tier
            self._pools[dtype] = ScratchPool(dtype, self.device) if tier is None else HostedPool(dtype, tier)
        return self._pools[dtype]
