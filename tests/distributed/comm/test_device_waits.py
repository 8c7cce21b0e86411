"""The clock of a GPU's waits, on streams and events of our own."""

from __future__ import annotations

from megalite.comm.device_waits import DeviceWaitClock


class Device:
    """A device whose stream has got to `now`, in milliseconds, while the host has ordered work up to `ordered`."""

    def __init__(self) -> None:
        self.now, self.ordered, self.stream, self.made = 0.0, 0.0, "compute", 0

    def event(self) -> Event:
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


def test_waits_are_told_when_the_device_has_them_behind_it() -> None:
    device = Device()
    clock = DeviceWaitClock(device.event, lambda: device.stream)
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


def test_what_waits_beside_the_computing_stream_is_not_counted() -> None:
    device = Device()
    clock = DeviceWaitClock(device.event, lambda: device.stream)
    device.stream = "vote"
    with clock:
        device.ordered += 50.0
    device.stream, device.now = "compute", 1000.0
    assert clock.take() == 0.0


def test_events_are_used_again() -> None:
    device = Device()
    clock = DeviceWaitClock(device.event, lambda: device.stream)
    for _ in range(20):
        with clock:
            device.ordered += 1.0
        device.now = device.ordered
        clock.take()
    assert device.made == 2
