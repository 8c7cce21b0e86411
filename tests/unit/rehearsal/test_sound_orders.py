"""Orders that look like races and are none: nothing is reported."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.rehearsal import DEVICE, watched_gpu


def new(*shape: int) -> Tensor:
    return torch.ones(shape or (8,), device=DEVICE)


def locked(*shape: int) -> Tensor:
    return torch.zeros(shape or (8,)).pin_memory()


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream)


def compute() -> Any:
    return torch.cuda.current_stream()


def test_parts_of_one_memory_do_not_race() -> None:
    with watched_gpu() as gpu:
        side, x = torch.cuda.Stream(), new(4, 8)
        side.wait_stream(compute())
        with on(side):
            x[:, :4].add_(1)
        x[:, 4:].add_(1)
        x[2, 4:].zero_()
    assert gpu.races == []


def test_order_is_passed_on() -> None:
    """Through streams, threads and the host: what waits for one who has waited has waited."""
    with watched_gpu() as gpu, ThreadPoolExecutor(1) as pool:
        first, second, x, home = torch.cuda.Stream(), torch.cuda.Stream(), new(), locked()
        first.wait_stream(compute())
        with on(first):
            x.mul_(2)
        second.wait_event(first.record_event())
        with on(second):
            home.copy_(x, non_blocking=True)
        event = second.record_event()
        pool.submit(event.synchronize).result()
        assert home.tolist() == [2.0] * 8
        x.zero_()  # launched by the host, which has waited for both
        home.copy_(x)
        home.zero_()
    assert gpu.races == []


def test_torch_keeps_page_locked_memory_until_its_copies_have_ended() -> None:
    with watched_gpu() as gpu:
        x = new()
        x.copy_(locked(), non_blocking=True)
        gc.collect()
        locked().fill_(1)
    assert gpu.races == []


def test_numbers_and_copies_that_wait() -> None:
    with watched_gpu() as gpu:
        x = torch.arange(6.0, device=DEVICE)
        factor = torch.tensor(2.0)
        y = x * factor
        factor.fill_(3)  # it was read when the kernel was launched
        assert y.device == DEVICE and y.is_cuda and y[1].item() == 2.0
        home = y.cpu()
        assert home.device.type == "cpu" and home.tolist() == [0, 2, 4, 6, 8, 10]
        home.zero_()
        x.copy_(home)
        home.fill_(1)
        torch.cuda.synchronize()
        assert x.sum().item() == 0
        with pytest.raises(RuntimeError, match="some tensors are on the device and some on the host"):
            x + home
    assert gpu.races == []
    assert torch.zeros(1).device.type == "cpu" and not torch.cuda.is_available()


def test_what_somebody_has_waited_for_is_over() -> None:
    with watched_gpu():
        new().mul_(2)
        first = compute().record_event()
        new().mul_(2)
        second = compute().record_event()
        assert not first.query() and not second.query()
        second.synchronize()  # and so is what came before
        assert first.query() and second.query()
