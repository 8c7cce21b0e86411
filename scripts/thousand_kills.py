"""Kills runs a thousand times, in all the ways in which machines are lost, and compares their last states with that of
a run that nobody disturbed: `python scripts/thousand_kills.py --folder DIR [--kills N] [--ways host store hosts ...]`.

    host    one host: ranks get SIGKILL again and again, at random moments and in saves, and are started again
            (`--max-restarts`); then the whole launch gets it, or SIGTERM; sometimes the saves of the host are lost with
            it, or a bit of them flips (`--non-persistent-ckpt-type local` and `in_memory` in turn)
    store   the same, with an object store for `--save` that fails one request in twenty (moto behind a proxy)
    hosts   three agents of torchrun, each a host with a disk of its own (`--elastic`, `--replication`, one is a spare):
            a rank is killed, or an agent, sometimes with its disk, and started again, or all (needs root and `unshare`)

All ways go on at once, a way that is named twice with two runs. A launch is a fork of a process that has imported torch
(`warm_launches.py`). A run that is complete is compared: all its tensors must be those of the undisturbed run, bit for
bit: one hash. Then the next one begins. Its kills are added to DIR/counts.json only then, so the counts of several
calls add up.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults")]

from kill_ways import Counts, OneHost, ThreeHosts, Way, state_of  # noqa: E402
from store_server import FaultProxy, make_bucket, moto_server  # noqa: E402
from torchrun_agents import TINY, environment  # noqa: E402


@contextmanager
def served(wanted: bool) -> Iterator[Callable[[], FaultProxy]]:
    """What gives proxies, each of which fails on purpose, to one store in this process. The environment names one that
    does not."""
    if not wanted:
        yield lambda: FaultProxy(0)
        return
    with moto_server() as port:
        os.environ.update({key: str(value) for key, value in FaultProxy(port).environment.items()})
        make_bucket(port, "kills")
        yield lambda: FaultProxy(port)


def quiet(folder: Path, counts: Counts) -> None:
    """The run that nobody disturbs; once a folder."""
    if counts.all["hash"] is None:
        command = [sys.executable, "pretrain_gpt.py", "--nprocs", "2", *TINY, *counts.flags]
        command += ["--save", str(folder / "quiet")]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True)
        counts.all["hash"] = state_of(str(folder / "quiet"))


def at_once(ways: Sequence[Way], counts: Counts, most: int) -> None:
    """Takes turns of all ways, each in a thread of its own, until there are `most` kills; then lets the runs end.
    Raises what one of them has raised."""
    stop, began, before = threading.Event(), time.monotonic(), counts.kills

    def work(each: Way) -> None:
        try:
            while counts.kills < most and not stop.is_set():
                each.turn(True)
                print(f"{counts.kills} kills, {counts.kills - before} in {time.monotonic() - began:.0f} s", flush=True)
            while counts.all["waiting"].get(each.way) and not stop.is_set():
                each.turn(False)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(ways)) as threads:
        for done in [threads.submit(work, each) for each in ways]:
            done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where runs and counts are; a later call continues")
    parser.add_argument("--kills", type=int, default=1000, help="in all calls together")
    parser.add_argument("--ways", nargs="+", choices=("host", "store", "hosts"), default=["host", "store", "hosts"])
    parser.add_argument("--seed", type=int, help="unset: another one each time")
    parser.add_argument("--seconds", type=float, default=8.0, help="a kill comes within this time of the ranks' start")
    parser.add_argument("--store-seconds", type=float, default=25.0, help="the same with a store, whose requests fail")
    parser.add_argument("--host-seconds", type=float, default=20.0, help="the same of hosts, whose ranks import torch")
    parser.add_argument("--iterations", type=int, default=40, help="of each run; the first call's stays")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if "hosts" in given.ways and subprocess.run(["unshare", "--uts", "--mount", "true"], check=False).returncode:
        print("hosts: left out, this user may not make namespaces", flush=True)
        given.ways.remove("hosts")
    counts, ways = Counts(folder, given.iterations), list[Way]()
    quiet(folder, counts)
    with served("store" in given.ways) as store:
        try:
            for number, way in enumerate(given.ways):
                before = given.ways[:number].count(way)
                name = f"{way}{before + 1}" if before else way
                rng = random.Random(None if given.seed is None else f"{name} {given.seed}")
                if way == "hosts":
                    ways.append(ThreeHosts(name, folder, counts, given.host_seconds, rng))
                else:
                    proxy = store() if way == "store" else None
                    seconds = given.store_seconds if way == "store" else given.seconds
                    ways.append(OneHost(name, folder, counts, seconds, rng, proxy))
            at_once(ways, counts, given.kills)
        finally:
            for each in ways:
                each.close()
    runs = sum(counts.all["runs"].values())
    print(f"{counts.kills} kills: {counts.by_way()}; {runs} runs compared, each: {counts.all['hash']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
