"""The start-up self-test: every rank is there, has the same configuration, and a collective gives the right sum.

    1. roll call   each rank puts its host and the digest of its configuration into the store; rank 0 waits for all
    2. compare     rank 0 names fields that differ: "rank 1 (host b) differs from rank 0: seq_length 32 != 64"
    3. all-reduce  a sum whose value is known travels over the real network, then a second roll call

The store is a plain key-value service that needs no collective, so a host that is missing can be named instead of
waited for. The proof is `tests/distributed/launch/test_launch_self_test.py`.
"""

import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megalite
from megalite.comm import World
from megalite.errors import ConfigError, RuntimeFailure
from megalite.launch.watch import rank_names

logger = logging.getLogger(__name__)

REMIND_SECONDS = 30.0
MAX_DIFFERENCES = 5


def run_fingerprint(config: Any) -> dict[str, str]:
    """What must be equal on all ranks: each field of the configuration, and the versions of the code, as text."""
    root, source = Path(megalite.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):  # two hosts with different checkouts do not train together
        source.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    facts = {"torch": torch.__version__, "megalite source": source.hexdigest()[:16]}

    def collect(value: Any, name: str) -> None:
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                collect(getattr(value, field.name), field.name)
        else:
            facts[name] = repr(value)

    collect(config, "config")
    return facts


def roll_call(
    store: dist.Store, world: World, stage: str, facts: str, timeout: float, judge: Callable[[list[str]], list[str]]
) -> None:
    """Waits until every rank has called this for the same `stage`, and lets rank 0 `judge` the `facts` of all, by rank:
    lines about what is wrong. Raises on every rank alike: RuntimeFailure that names the ranks (and hosts, where they
    are known) that did not answer in `timeout` seconds, or ConfigError with the lines."""
    store.set(f"{stage}/{world.rank}", facts)
    verdict = f"{stage}/verdict"
    if world.rank != 0:
        try:
            store.wait([verdict], timedelta(seconds=timeout + 10))
        except Exception as error:
            raise RuntimeFailure(f"{stage}: rank 0 did not answer within {timeout:g} s") from error
    elif silent := _silent_ranks(store, world, stage, timeout):
        missing = f"{stage}: {rank_names(store, silent)} did not answer within {timeout:g} s"
        store.set(verdict, json.dumps([missing, []]))
    else:
        lines = judge([store.get(f"{stage}/{rank}").decode() for rank in range(world.size)])
        store.set(verdict, json.dumps(["", lines]))
    missing, lines = json.loads(store.get(verdict).decode())
    if missing:
        raise RuntimeFailure(missing)
    if lines:
        raise ConfigError(lines)


def _silent_ranks(store: dist.Store, world: World, stage: str, timeout: float) -> list[int]:
    """Ranks that have not set their key when the time is over; says now and then for whom it waits."""
    start = reminded = time.monotonic()
    silent = list(range(1, world.size))
    while silent and time.monotonic() - start < timeout:
        wait = min(1.0, max(0.01, timeout - (time.monotonic() - start)))
        try:
            store.wait([f"{stage}/{silent[0]}"], timedelta(seconds=wait))
        except RuntimeError:  # Not there yet; the kind of error differs between stores.
            if time.monotonic() - reminded > REMIND_SECONDS:
                reminded = time.monotonic()
                logger.warning("%s: waiting for %s", stage, rank_names(store, silent))
        silent = [rank for rank in silent if not store.check([f"{stage}/{rank}"])]
    return silent


def check_same_config(store: dist.Store, world: World, facts: Mapping[str, str], timeout: float) -> None:
    """Roll call with a comparison of `facts` (see `run_fingerprint`). Raises on every rank: RuntimeFailure if a rank is
    missing, ConfigError with the fields that differ from rank 0."""
    store.set(f"host/{world.rank}", world.host)
    store.set(f"facts/{world.rank}", json.dumps(dict(facts)))

    def differences(digests: list[str]) -> list[str]:
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        return [_difference(store, rank, facts) for rank in differing[:MAX_DIFFERENCES]]

    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    roll_call(store, world, "start", digest, timeout, differences)


def _difference(store: dist.Store, rank: int, facts: Mapping[str, str]) -> str:
    theirs = json.loads(store.get(f"facts/{rank}").decode())
    names = [name for name in sorted({*facts, *theirs}) if facts.get(name) != theirs.get(name)]
    parts = [f"{name} {theirs.get(name, 'absent')} != {facts.get(name, 'absent')}" for name in names]
    more = f" and {len(parts) - MAX_DIFFERENCES} more" if len(parts) > MAX_DIFFERENCES else ""
    return f"{rank_names(store, [rank])} differs from rank 0: {', '.join(parts[:MAX_DIFFERENCES])}{more}"


def check_collective(store: dist.Store, world: World, timeout: float, hint: str = "") -> None:
    """Sums rank + 1 over all ranks on `world.device`. hint: what the first rank of each host says once it has waited
    for a while, and rank 0 at the end. Raises RuntimeFailure on every rank that can still speak, naming the ranks that
    did not get through."""
    value = torch.full((1024,), float(world.rank + 1), device=world.device)
    failure = ""
    line = "all-reduce: no answer for %.0f s; %s"
    reminder = threading.Timer(REMIND_SECONDS, logger.warning, (line, REMIND_SECONDS, hint))  # NCCL waits in the call
    reminder.daemon = True
    if hint and world.local_rank == 0:
        reminder.start()
    try:
        work = dist.all_reduce(value, async_op=True)
        deadline = time.monotonic() + timeout
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.0005)
        if work.is_completed():
            work.wait()
        else:
            failure = f"not complete after {timeout:g} s"
    except RuntimeError as error:
        failure = str(error).split("\n")[0]
    finally:
        reminder.cancel()
    if failure and hint and world.rank == 0:
        failure += f"; {hint}"
    expected = world.size * (world.size + 1) / 2
    if not failure and not bool((value == expected).all()):
        failure = f"sum {value.flatten()[0].item():g} instead of {expected:g}"

    def failures(results: list[str]) -> list[str]:
        return [f"rank {rank}: {text}" for rank, text in enumerate(results) if text]

    try:
        roll_call(store, world, "all-reduce", failure, min(15.0, timeout), failures)
    except ConfigError as error:
        text = str(error).replace("\n", "; ")
        raise RuntimeFailure(f"start-up all-reduce failed on {world.device.type}: {text}") from None
