"""The page through which a supervisor sees a rank never shows what was not written."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megalite.launch.rank_page import RankError, RankPage


def test_a_beat_is_seen_whole() -> None:
    """A supervisor that catches half a beat would end a healthy run (red with `struct.pack_into`)."""
    page = RankPage()
    writer = os.fork()
    if writer == 0:
        while True:
            page.beat()
    try:
        end = time.monotonic() + 1.0
        ages = []
        while time.monotonic() < end:
            ages += [page.beat_age for _ in range(1000)]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert -1.0 < min(ages) and max(ages) < 60.0  # of zeros the age would be that of the machine


@pytest.mark.parametrize("letter", ["a", "\u6f22", "\0", '"'])
def test_a_long_error_in_any_alphabet_comes_back(letter: str) -> None:
    page = RankPage()
    error = RankError("E", letter * 8000, letter * 20000, 1, False, False, 0.5)
    page.set_error(error)
    page.set_phase(letter * 300)
    assert page.error == error
    assert page.phase.startswith(letter * 80)


def test_what_gloo_says_besides_is_left_out() -> None:
    gloo = (
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:31647. This is typically caused by a remote worker crashing. Check the logs. GLHF!"
    )
    found = RankError.of(RuntimeError(f"waiting for F from rank 1 failed: {gloo}\nand more"))
    assert found.text == "waiting for F from rank 1 failed: Connection closed by peer [127.0.0.1]:31647\nand more"
    assert found.communication and gloo in found.traceback
