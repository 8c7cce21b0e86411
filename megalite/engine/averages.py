"""Averages of the masters (`--ema-decay`, `megalite/optim/averaged.py`) as the weights that a model computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megalite.optim import EMA, pieces
from megalite.parallel.zero import ShardedOptimizer


def _pairs(optimizer: ShardedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(Masters, their average), flat and in pieces, once nothing reads or writes them."""
    optimizer.finish_step()
    optimizer.wait_for_weights()
    for sub in optimizer.sub_optimizers:
        for master in sub.masters:
            master.join()
            average = sub.moments(master)[EMA]
            for piece in pieces(average):
                yield master.tensor.view(-1)[piece], average.view(-1)[piece]


@torch.no_grad()
def begin_averages(optimizer: ShardedOptimizer) -> None:
    """Makes the averages copies of the masters, which were loaded. `after_load` of the optimizer must follow."""
    for master, average in _pairs(optimizer):
        average.copy_(master)


@contextmanager
def averages_as_weights(optimizer: ShardedOptimizer, version: int) -> Iterator[None]:
    """Within the context, the compute weights of `version` are made of the averages, which have changed places with the
    masters: nothing else is needed in memory. Collective."""
    _swap(optimizer, version)
    try:
        yield
    finally:
        _swap(optimizer, version)


@torch.no_grad()
def _swap(optimizer: ShardedOptimizer, version: int) -> None:
    for master, average in _pairs(optimizer):
        kept = master.clone()
        master.copy_(average)
        average.copy_(kept)
    optimizer.write_weights(version)
