"""What a CUDA graph cannot hold is refused at its capture or replay, and memory of a pool is spoiled by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.rehearsal import DEVICE, watched_gpu


def new(value: float = 1.0) -> Tensor:
    return torch.full((4,), value, device=DEVICE)


def captured(work: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """(Graph, what `work` returned)."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool)
        try:
            found = work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph, found


def test_a_replay_reads_its_input_anew_and_is_one_launch() -> None:
    with watched_gpu() as gpu:
        x = new()
        graph, y = captured(lambda: x * 2 + 1)
        x.fill_(5)
        before = gpu.ledger.launches
        graph.replay()
        assert gpu.ledger.launches == before + 1
        assert y.tolist() == [11.0] * 4
        assert gpu.races == []


def test_a_capture_computes_nothing() -> None:
    with watched_gpu():
        _, y = captured(lambda: new() * 2)
        assert all(value != value for value in y.tolist())


def test_a_replay_is_work_of_the_stream_that_it_is_given_to() -> None:
    with watched_gpu() as gpu:
        x = new()
        graph, _ = captured(lambda: x * 2)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        x.fill_(3)
        with torch.cuda.stream(side):
            graph.replay()
    assert len(gpu.races) == 1 and "a graph on the stream" in gpu.races[0] and "fill" in gpu.races[0]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "read": (lambda: new().sum().item(), "host waits"),
    "wait": (lambda: torch.cuda.synchronize(), "host waits"),
    "sizes": (lambda: new().nonzero(), "host waits"),
    "random": (lambda: new().bernoulli_(0.5), "random numbers"),
    "array": (lambda: new() + torch.ones(4).to(DEVICE, non_blocking=True), "memory of the host|host waits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(name: str) -> None:
    work, message = REFUSED[name]
    with watched_gpu(), pytest.raises(RuntimeError, match=message):
        captured(work)


def test_input_that_has_gone_is_refused() -> None:
    with watched_gpu():
        x = [new()]
        graph, _ = captured(lambda: x[0] * 2)
        x.clear()
        with pytest.raises(RuntimeError, match="no longer where it was"):
            graph.replay()


def test_a_number_of_the_host_that_has_changed_is_refused() -> None:
    with watched_gpu():
        factor = torch.tensor(2.0)
        graph, _ = captured(lambda: new() * factor)
        graph.replay()
        factor.fill_(3.0)
        with pytest.raises(RuntimeError, match="number of the host"):
            graph.replay()


@pytest.mark.parametrize("shared", [False, True])
def test_a_graph_may_overwrite_what_later_ones_of_its_pool_keep(shared: bool) -> None:
    with watched_gpu():
        x, pool = new(), torch.cuda.graph_pool_handle()
        first, _ = captured(lambda: (x + 1) * 2, pool)  # frees x + 1
        second, y = captured(lambda: x + 3, pool if shared else None)
        second.replay()
        first.replay()
        assert (y.tolist() == [4.0] * 4) is not shared


def test_what_the_program_lets_go_stays_for_the_graphs_that_have_it() -> None:
    with watched_gpu():
        x, pool, made = new(), torch.cuda.graph_pool_handle(), list[Tensor]()
        first, _ = captured(lambda: made.append(x * 2), pool)
        second, y = captured(lambda: made[0] + 1, pool)
        first.replay()
        made.clear()
        others = [new(9.0) for _ in range(3)]
        second.replay()
        assert y.tolist() == [3.0] * 4 and others[0].tolist() == [9.0] * 4


def test_a_gradient_that_somebody_holds_is_copied_on_the_device() -> None:
    with watched_gpu() as gpu:
        x, dy = new().requires_grad_(), new(2.0)
        syncs = sum(kind == "sync" for kind, *_ in gpu.ledger.log)
        x.backward(dy)
        assert x.grad is not None and x.grad.data_ptr() != dy.data_ptr()
        assert gpu.on_device(x.grad) and sum(kind == "sync" for kind, *_ in gpu.ledger.log) == syncs
