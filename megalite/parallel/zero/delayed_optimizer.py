"""The step of `--delayed-parameter-update`: what the host does for it runs while the next batch is computed.

    main      norm t | copy gradients | step the device's | batch t + 1                  | norm t + 1 | join, gather
    thread                                                | step bucket after bucket, write weights |
    weights   version t: read by batch t + 1        version t + 1: written meanwhile, read by batch t + 2

Ren et al., "ZeRO-Offload", arXiv 2101.06840, section 5.2. Norm and finiteness are known before the first bucket steps.
The masters must not be read or written before `finish_step`; everything here that does so calls it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from megalite.comm import TensorShard
from megalite.parallel.tiers import Arrival
from megalite.parallel.zero.host_optimizer import HostOptimizer
from megalite.parallel.zero.sharded_optimizer import ShardedOptimizer


class DelayedOptimizer(ShardedOptimizer):
    """A `ShardedOptimizer` whose step returns before the host has done its part.

    A rule that talks to other ranks steps at once: two threads would send in an order of their own on every rank.
    """

    _step_behind: Arrival | None = None
    _version_behind = 0

    @cached_property
    def _behind(self) -> list[HostOptimizer]:
        on_host = [sub for sub in self.sub_optimizers if isinstance(sub, HostOptimizer)]
        return [sub for sub in on_host if not getattr(sub.rule, "talks", False)]

    @torch.no_grad()
    def step(self, *, version: int = 0, **numbers: Any) -> None:
        """Updates the masters; `version` is complete once `finish_step` has returned."""
        self.finish_step()
        if not self._behind:
            super().step(version=version, **numbers)
            return
        self.wait_for_weights()
        numbers["steps"] = self._steps
        self._fetch_gradients(numbers)
        self._update([sub for sub in self.sub_optimizers if sub not in self._behind], numbers, version)
        for sub in self._behind:
            sub.keep_gradients()
        if numbers.get("found_inf") is None:
            self.count_step(skipped=False)
        self._version_behind = version
        mover = self.buffers[0].rank_memory.mover
        self._step_behind = mover.then(torch.no_grad()(lambda: self._update(self._behind, numbers, version)))

    def finish_step(self) -> None:
        """Waits for the thread, and gathers what it has written. Collective. Raises what the step raised there."""
        if self._step_behind is not None:
            step, self._step_behind = self._step_behind, None
            step.synchronize()
            self._gather(self._version_behind)

    def close(self) -> None:
        """Waits for the thread, whatever becomes of the step."""
        if self._step_behind is not None:
            self.buffers[0].rank_memory.mover.close()
        super().close()

    def shards(self) -> list[TensorShard]:
        self.finish_step()
        return super().shards()

    @contextmanager
    def masters_as_weights(self, version: int) -> Iterator[None]:
        self.finish_step()
        with super().masters_as_weights(version):
            yield
