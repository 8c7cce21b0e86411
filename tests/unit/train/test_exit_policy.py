"""The decision to stop: by interval, duration and signal, one batch ahead and the same on all ranks."""

from __future__ import annotations

import dataclasses
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.checkpoint import Checkpointer
from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.world import World
from megalite.testing import run_ranks
from megalite.train.exits import ExitPolicy, ExitReason
from tests.unit.observe.fake_trainer import tiny_config

CPU = torch.device("cpu")


def _policy(axis: Axis | None = None, *, saves: bool = True, **changes: Any) -> ExitPolicy:
    axis, config = axis or Axis.single("world"), dataclasses.replace(tiny_config().training, **changes)
    return ExitPolicy(config, axis, CPU, Checkpointer(".", world=axis), saves=saves)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock of the policy shows."""
    now = [100.0]
    monkeypatch.setattr("megalite.train.exits.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_interval_stops_after_its_multiples() -> None:
    policy = _policy(exit_interval=4)
    decisions = [policy.decide(iteration) for iteration in range(1, 9)]
    assert decisions == [None, None, None, ExitReason.INTERVAL] * 2


def test_duration_counts_in_minutes(now: list[float]) -> None:
    policy = _policy(exit_duration_in_mins=0.5)
    now[0] = 129.9
    assert policy.decide(1) is None
    now[0] = 130.0
    assert policy.decide(2) is ExitReason.DURATION


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_are_noted_inside_and_handlers_put_back_after(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with _policy() as policy:
        assert policy.decide(1) is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the second one changes nothing
        assert policy.decide(2) is ExitReason.SIGNAL
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("saves", "does"), [(True, "saves"), (False, "saves nothing (no --save)")])
def test_a_signal_is_answered_at_once(saves: bool, does: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Not when it is acted on: an iteration may take minutes. Once, by one rank."""
    with _policy(saves=saves) as policy:
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == f" received SIGTERM: the run ends after the first iteration, and {does}\n"
        assert policy.decide(1) is ExitReason.SIGNAL
        os.kill(os.getpid(), signal.SIGUSR1)
        assert capfd.readouterr().err == ""
    with _policy(saves=saves) as policy:
        assert policy.decide(7) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        when = "after iteration 8, the one after this (an evaluation is cut short)"
        assert capfd.readouterr().err == f" received SIGUSR1: the run ends {when}, and {does}\n"
        assert policy.decide(8) is ExitReason.SIGNAL
    other = Axis("world", 2, 1, (0, 1))
    with _policy(other) as policy:
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == "", "rank 0 says it"


@pytest.mark.parametrize(
    ("asked", "over", "when"),
    [
        ({"evaluates": True}, False, "after iteration 50, without another one (an evaluation is cut short)"),
        ({"evaluates": True}, True, "after iteration 51, the one after this (an evaluation is cut short)"),
        ({"last": True}, False, "after iteration 50, without another one (an evaluation is cut short)"),
        ({}, False, "after iteration 51, the one after this (an evaluation is cut short)"),
    ],
)
def test_what_a_signal_is_answered_is_what_happens(
    asked: dict[str, bool], over: bool, when: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """No iteration follows an evaluation in which a signal came, not even one that came with its last batch."""
    with _policy() as policy:
        assert policy.decide(50, **asked) is None
        assert not (over and policy.evaluation_over())
        os.kill(os.getpid(), signal.SIGTERM)
        assert f"the run ends {when}, and saves" in capfd.readouterr().err
        assert policy.evaluation_over()
        assert policy.decide(51) is ExitReason.SIGNAL
    with _policy(exit_interval=50) as policy:
        assert policy.decide(50) is ExitReason.INTERVAL
        os.kill(os.getpid(), signal.SIGTERM)
        assert "the run ends after iteration 50, without another one" in capfd.readouterr().err


def test_a_first_interrupt_is_noted_and_a_second_ends_at_once(
    now: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _policy() as policy:
            assert policy.decide(3) is None and policy.exit_status == 0
            os.kill(os.getpid(), signal.SIGINT)
            now[0] += 0.4
            os.kill(os.getpid(), signal.SIGINT)  # the same one: a terminal's, passed on by a program between
            assert policy.decide(4) is ExitReason.SIGNAL and policy.exit_status == 130
            when = "after iteration 4, the one after this (an evaluation is cut short), and saves"
            told = f" received SIGINT: the run ends {when}; another Ctrl-C ends it at once\n"
            assert capfd.readouterr().err == told
            now[0] += 0.2
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        with _policy(saves=False), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)  # nothing to wait for
        with _policy(exit_signal_handler=False), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a background job of a script's shell
        with _policy() as policy:
            os.kill(os.getpid(), signal.SIGINT)
            assert policy.decide(1) is None and policy.exit_status == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_after_another_signal_is_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _policy() as policy:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert policy.decide(1) is ExitReason.SIGNAL
        assert [line.split(":")[0] for line in capfd.readouterr().err.splitlines()] == [
            " received SIGTERM",
            " received SIGINT",
        ]
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_was_started_under_nohup_goes_on_without_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _policy() as policy:
            os.kill(os.getpid(), signal.SIGHUP)
            assert policy.decide(1) is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_the_handler_signals_keep_their_meaning() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _policy(exit_signal_handler=False):
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_does_not_interrupt_what_is_being_written() -> None:
    written = []
    with _policy() as policy:
        for part in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
            written.append(part)
        assert written == [0, 1, 2, 3, 4]
        assert policy.decide(1) is ExitReason.SIGNAL


def body_one_rank_gets_a_signal(world: World, rank: int) -> list[str | None]:
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    decisions = []
    with _policy(axis, exit_interval=5) as policy:
        for iteration in range(1, 6):
            decision = policy.decide(iteration)
            decisions.append(None if decision is None else str(decision))
            if decision is not None:
                break
            if iteration == 2 and world.rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)
    return decisions


def test_a_signal_to_one_rank_stops_all_after_the_same_iteration() -> None:
    assert run_ranks(body_one_rank_gets_a_signal, 3, 1) == [[None, None, "exit_signal"]] * 3


def test_without_a_signal_the_interval_holds() -> None:
    assert run_ranks(body_one_rank_gets_a_signal, 2, -1) == [[None] * 4 + ["exit_interval"]] * 2
