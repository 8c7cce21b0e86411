"""DeepEP's `Buffer` as a `TokenLibrary`: https://github.com/deepseek-ai/DeepEP, its first interface (docs/legacy.md).

Never run with DeepEP itself, which needs several GPUs: written by its documentation, and run by tests with a stand-in
that has the same interface (`tests/stand_ins/deep_ep.py`).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from megalite.comm import Handle
from megalite.extras import optional_package
from megalite.parallel.expert.plan import Sent

BYTES = 2
"""Of an element: it carries bf16."""


@functools.lru_cache(maxsize=1)  # its memory is for all layers and stages of a rank
def deep_ep_over(group: Any, size: int, hidden: int) -> DeepEP:
    """The library over a process group of `size` ranks, for tokens of `hidden` channels. Collective.

    Raises ConfigError: it cannot be imported.
    """
    make = optional_package("`moe_token_dispatcher_type`=flex", "deep_ep").Buffer
    configs = make.get_dispatch_config(size), make.get_combine_config(size)
    nvlink = max(config.get_nvl_buffer_size_hint(hidden * BYTES, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden * BYTES, size) for config in configs)
    return DeepEP(make(group, nvlink, rdma))


class _Event:
    """An `EventOverlap` of DeepEP's as a handle."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.current_stream_wait()


class DeepEP:
    """A `TokenLibrary` whose weights are fp32. Messages run on a stream of the library's, which waits for what was
    queued before them; it keeps the memory of what they read and write (`record_stream`). The host waits in `dispatch`
    until it knows how many tokens come."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Any, Handle]:
        per_rank, per_node, per_expert, goes, _ = self._buffer.get_dispatch_layout(experts, num_experts)
        rows, here, weights, _, trip, event = self._buffer.dispatch(
            x,
            topk_idx=experts,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes,
            num_tokens_per_expert=per_expert,
            async_finish=True,
        )
        return rows, here, weights, trip, _Event(event)

    def dispatch_again(self, x: Tensor, trip: Any) -> Sent:
        rows, *_, event = self._buffer.dispatch(x, handle=trip, async_finish=True)
        return (rows,), _Event(event)

    def combine(self, x: Tensor, trip: Any, weights: Tensor | None = None) -> Sent:
        sums, weights, event = self._buffer.combine(x, trip, topk_weights=weights, async_finish=True)
        return (sums,) if weights is None else (sums, weights), _Event(event)
