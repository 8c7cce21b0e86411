"""The interface of DeepEP's `Buffer`, by its documentation, over torch.distributed: for tests of what calls it.

Stricter than the original: what a message brings is not a number until its event has been waited for. Any float dtype;
DeepEP itself takes bf16 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS: list[str] = []
"""What was called, in this order."""


class Config:
    """Of kernels: how much memory they want."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    """arrive: writes what a message has brought to where the caller has it."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        CALLS.append("waited")
        self._arrive()


class Buffer:
    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.rank, self.group_size = group, group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8)
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        """(tokens for each rank, None, choices of each expert, which token goes to which rank, event)."""
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        each = num_experts // self.group_size
        goes = torch.stack([(topk_idx // each == rank).any(1) for rank in range(self.group_size)], 1)
        counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return goes.sum(0).int(), None, counts.int(), goes, EventOverlap(lambda: None)

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        """(tokens, their experts here, their weights, rows of each expert here, handle, event)."""
        CALLS.append("dispatch" if handle is None else "dispatch again")
        assert x.dim() == 2 and x.is_contiguous() and async_finish
        if handle is not None:
            assert topk_idx is topk_weights is None
            owners, sent, received, _ = handle
            (rows,), event = self._send([x[owners]], sent, received, lambda found: found)
            return rows, None, None, None, None, event
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and topk_weights.is_contiguous()
        assert topk_weights.dtype in (torch.float32, torch.float64)
        owners = torch.cat([goes.nonzero().flatten() for goes in is_token_in_rank.unbind(1)])
        counts = torch.empty(self.group_size, dtype=torch.int32)
        dist.all_to_all_single(counts, num_tokens_per_rank, group=self.group)
        sent, received = num_tokens_per_rank.tolist(), counts.tolist()
        chosen = topk_idx.new_empty(sum(received), topk_idx.shape[1])
        dist.all_to_all_single(chosen, topk_idx[owners], received, sent, group=self.group)
        each = len(num_tokens_per_expert) // self.group_size
        here = torch.where(chosen.div(each, rounding_mode="floor") == self.rank, chosen - self.rank * each, -1)
        (rows, weights), event = self._send(
            [x[owners], topk_weights[owners]], sent, received, lambda found: [found[0], found[1].where(here >= 0, 0.0)]
        )
        numbers = torch.bincount(here[here >= 0], minlength=each).tolist()
        return rows, here, weights, numbers, (owners, sent, received, len(x)), event

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        """(each token's sum over the ranks, that of its weights, event)."""
        CALLS.append("combine")
        assert x.is_contiguous() and async_finish
        owners, sent, received, tokens = handle

        def summed(found: list[Tensor]) -> list[Tensor]:
            return [each.new_zeros(tokens, each.shape[1]).index_add_(0, owners, each) for each in found]

        given = [x] if topk_weights is None else [x, topk_weights]
        sums, event = self._send(given, received, sent, summed)
        return sums[0], None if topk_weights is None else sums[1], event

    def _send(
        self, given: list[Tensor], sent: list[int], received: list[int], make: Callable[[list[Tensor]], list[Tensor]]
    ) -> tuple[list[Tensor], EventOverlap]:
        """make: of what arrives, what the caller gets; it has the shapes at once."""
        found = [x.new_zeros(sum(received), *x.shape[1:]) for x in given]
        made = [torch.full_like(x, torch.nan) for x in make(found)]
        works = [
            dist.all_to_all_single(out, x, received, sent, group=self.group, async_op=True)
            for out, x in zip(found, given, strict=True)
        ]

        def arrive() -> None:
            for work in works:
                work.wait()
            for target, value in zip(made, make(found), strict=True):
                target.copy_(value)

        return made, EventOverlap(arrive)
