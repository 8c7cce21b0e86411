"""The start-up self-test names who is missing and what differs, on every rank, before any collective could hang."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.comm.world import World
from megalite.errors import ConfigError, RuntimeFailure
from megalite.launch import self_test
from megalite.launch.self_test import check_collective, check_same_config, run_fingerprint
from megalite.testing import run_ranks


@dataclass(frozen=True)
class Inner:
    seq_length: int = 64
    lr: float = 0.1


@dataclass(frozen=True)
class Outer:
    model: Inner = field(default_factory=Inner)
    seed: int = 1


def _store(folder: str, size: int) -> dist.Store:
    store = dist.FileStore(str(Path(folder) / "store"), size)
    store.set_timeout(timedelta(seconds=5))
    return store


def body_compare(world: World, folder: str, odd: int, config: dict[str, float]) -> str:
    mine = Outer(Inner(**config)) if world.rank == odd else Outer()  # type: ignore[arg-type]
    try:
        check_same_config(_store(folder, world.size), world, run_fingerprint(mine), 5)
    except ConfigError as error:
        return str(error)
    return ""


def test_equal_configurations_pass(tmp_path: Path) -> None:
    assert run_ranks(body_compare, 3, str(tmp_path), 9, {}) == ["", "", ""]


@pytest.mark.parametrize("odd", [1, 2])
def test_a_different_field_is_named_on_every_rank(tmp_path: Path, odd: int) -> None:
    texts = run_ranks(body_compare, 3, str(tmp_path), odd, {"seq_length": 32})
    assert texts == [f"rank {odd} (host localhost) differs from rank 0: seq_length 32 != 64"] * 3


def test_all_different_fields_are_named(tmp_path: Path) -> None:
    texts = run_ranks(body_compare, 2, str(tmp_path), 1, {"seq_length": 32, "lr": 0.5})
    assert texts == ["rank 1 (host localhost) differs from rank 0: lr 0.5 != 0.1, seq_length 32 != 64"] * 2


def body_missing(world: World, folder: str, missing: int) -> str:
    if world.rank == missing:
        return "away"
    start = time.monotonic()
    try:
        check_same_config(_store(folder, world.size), world, run_fingerprint(Outer()), 0.5)
    except RuntimeFailure as error:
        assert time.monotonic() - start < 5
        return str(error)
    return "passed"


def test_a_missing_rank_is_named_by_all_others(tmp_path: Path) -> None:
    text = "start: rank 2 (never heard of) did not answer within 0.5 s"
    assert run_ranks(body_missing, 3, str(tmp_path), 2) == [text, text, "away"]


class _Done:
    """Work handle of a collective that did nothing."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Lost(_Done):
    """Work handle of a collective whose messages do not arrive."""

    def is_completed(self) -> bool:
        return False


def body_lost(world: World, folder: str) -> tuple[str, list[str]]:
    said: list[str] = []
    self_test.REMIND_SECONDS = 0.2
    self_test.logger.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
    dist.all_reduce = lambda *args, **kwargs: _Lost()  # type: ignore[assignment]
    try:
        check_collective(_store(folder, world.size), replace(world, local_rank=world.rank // 2), 1.0, "try eth0")
    except RuntimeFailure as error:
        return str(error), said
    return "", said


def test_lost_messages_lead_to_the_network_long_before_the_time_out(tmp_path: Path) -> None:
    text = (
        "start-up all-reduce failed on cpu: rank 0: not complete after 1 s; try eth0; rank 1: not complete after 1 s; "
        "rank 2: not complete after 1 s"
    )
    line = ["all-reduce: no answer for 0 s; try eth0"]
    assert run_ranks(body_lost, 3, str(tmp_path)) == [(text, line), (text, line), (text, [])]


def body_collective(world: World, folder: str, absent: int, broken: bool = False) -> str:
    store = _store(folder, world.size)
    store.set(f"host/{world.rank}", f"h{world.rank}")
    if broken:
        dist.all_reduce = lambda *args, **kwargs: _Done()  # type: ignore[assignment]
    if world.rank == absent:
        while len(list(Path(folder).glob("gave-up*"))) < world.size - 1:  # leaving earlier would tell the others
            time.sleep(0.01)
        return "away"
    try:
        check_collective(store, world, 1.0)
    except RuntimeFailure as error:
        (Path(folder) / f"gave-up{world.rank}").touch()
        return str(error)
    return ""


def test_all_reduce_passes_with_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(body_collective, 3, str(tmp_path), 9) == ["", "", ""]


def test_a_rank_that_never_joins_the_all_reduce_is_named(tmp_path: Path) -> None:
    texts = run_ranks(body_collective, 3, str(tmp_path), 2)
    assert texts == ["all-reduce: rank 2 (host h2) did not answer within 1 s"] * 2 + ["away"]


def test_a_wrong_sum_is_an_error_on_every_rank(tmp_path: Path) -> None:
    texts = run_ranks(body_collective, 2, str(tmp_path), 9, broken=True)
    line = "start-up all-reduce failed on cpu: rank 0: sum 1 instead of 3; rank 1: sum 2 instead of 3"
    assert texts == [line, line]


def body_sockets(world: World) -> tuple[int, int]:
    """Open sockets once the ranks have met, and after they have summed a number."""

    def count() -> int:
        return sum(os.readlink(f"/proc/self/fd/{name}").startswith("socket") for name in descriptors())

    def descriptors() -> list[str]:
        return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]

    before = count()
    dist.all_reduce(torch.zeros(1))
    return before, count()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gloo_opens_the_sockets_that_are_used() -> None:
    """What the launcher asks of gloo on GPUs (the tests always do): a mesh of all ranks would be seven sockets more."""
    lazy, eager = run_ranks(body_sockets, 8), run_ranks(body_sockets, 8, env={"TORCH_GLOO_LAZY_INIT": None})
    assert all(met <= 4 and summed <= 6 for met, summed in lazy)
    assert all(met >= 8 for met, _ in eager)
