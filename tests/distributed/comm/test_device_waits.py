"""The clock of a GPU's waits, on streams and events of our own."""

from __future__ import annotations

import pytest
import torch

from megalite.comm.device_waits import DeviceWaitClock


class Device:
    """A device whose stream has got to `now`, in milliseconds, while the host has ordered work up to `ordered`."""

    def __init__(self) -> None:
        self.now, self.ordered, self.stream, self.made = 0.0, 0.0, "compute", 0

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.ordered

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.stream)
    return made


def test_waits_are_told_when_the_device_has_them_behind_it(device: Device) -> None:
    clock = DeviceWaitClock()
    for length in (10.0, 30.0):
        device.ordered += 100.0  # computed
        with clock:
            device.ordered += length  # stood still
    assert clock.take() == 0.0  # the host is ahead of the device, and does not wait for it
    device.now = 115.0
    assert clock.take() == 0.010
    device.now = 1000.0
    assert clock.take() == 0.030
    assert clock.take() == 0.0


def test_what_waits_beside_the_computing_stream_is_not_counted(device: Device) -> None:
    clock = DeviceWaitClock()
    device.stream = "vote"
    with clock:
        device.ordered += 50.0
    device.stream, device.now = "compute", 1000.0
    assert clock.take() == 0.0


def test_events_are_used_again(device: Device) -> None:
    clock = DeviceWaitClock()
    for _ in range(20):
        with clock:
            device.ordered += 1.0
        device.now = device.ordered
        clock.take()
    assert device.made == 2
