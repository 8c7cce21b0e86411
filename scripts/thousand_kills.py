"""Kills runs a thousand times, in all the ways in which machines are lost, and compares their last states with that of
a run that nobody disturbed: `python scripts/thousand_kills.py --folder DIR [--kills N] [--ways host store hosts]`.

    host    one host: a rank, or the whole launch, gets SIGKILL, or the launch SIGTERM; sometimes the saves of the host
            are lost with it (`--non-persistent-ckpt-type local` and `in_memory` in turn)
    store   the same, with an object store for `--save` that fails one request in twenty (moto behind a proxy)
    hosts   three agents of torchrun, each a host with a disk of its own (`--elastic`, `--replication`, one is a spare):
            an agent is killed, sometimes with its disk, and started again, or all are (needs root and `unshare`)

A run that is complete is compared: all its tensors must be those of the undisturbed run, bit for bit: one hash. Then
the next one begins. Its kills are added to DIR/counts.json only then, so the counts of several calls add up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults")]

from store_server import FaultProxy, make_bucket, moto_server, random_plan  # noqa: E402
from torchrun_agents import TINY, Agents, environment  # noqa: E402

from megalite.checkpoint import CheckpointReader, flat_bytes, resolve_checkpoint  # noqa: E402

LAYOUT = "--tensor-model-parallel-size 2 --global-batch-size 4 --save-interval 200 --keep-last-n 2".split()
MOST_IN_VAIN = 5


class Runs:
    """The runs in `folder`, one of each way at a time, and what was done to them. seconds: a kill comes within this
    time of the start."""

    def __init__(self, folder: Path, iterations: int, seconds: float, rng: random.Random) -> None:
        self.folder, self._seconds, self._rng = folder, seconds, rng
        self._memory = Path("/dev/shm") / f"megalite-kills-{folder.name}"
        self._file = folder / "counts.json"
        self.counts: dict[str, Any] = {"iterations": iterations, "hash": None, "kills": {}, "runs": {}, "waiting": {}}
        if self._file.exists():
            self.counts = json.loads(self._file.read_text())
            self.counts["waiting"].pop("store", None)  # that store was in a process which has ended
        self._flags = [*LAYOUT, "--train-iters", str(self.counts["iterations"])]
        self._in_vain = 0

    @property
    def kills(self) -> int:
        return sum(sum(hows.values()) for kind in ("kills", "waiting") for hows in self.counts[kind].values())

    @property
    def _url(self) -> str:
        return f"s3://kills/run{self.counts['runs'].get('store', 0)}"

    def _note(self, kind: str, way: str, more: dict[str, int]) -> None:
        self.counts[kind][way] = Counter(self.counts[kind].get(way, {})) + Counter(more)
        staged = self._file.with_suffix(".tmp")
        staged.write_text(json.dumps(self.counts, indent=1))
        staged.replace(self._file)

    def quiet(self) -> None:
        """The run that nobody disturbs; once a folder."""
        if self.counts["hash"] is None:
            self._end(self._start([*self._flags, "--save", str(self.folder / "quiet")]))
            self.counts["hash"] = state_of(str(self.folder / "quiet"))

    def turn(self, way: str, store: FaultProxy | None, *, kill: bool = True) -> None:
        """One launch of the run of this way, killed or left to end. Compares the run when it is complete."""
        before = dict(self.counts["waiting"].get(way, {}))
        done = self._hosts(kill) if way == "hosts" else self._one_host(way, store, kill)
        self._in_vain = 0 if done or before != self.counts["waiting"].get(way, {}) else self._in_vain + 1
        if self._in_vain > MOST_IN_VAIN:
            raise SystemExit(f"{way}: launches end without a kill; see {self.folder / way}")
        if not done:
            return
        if store is not None:
            store.plan = lambda method, path: None
        found = state_of(self._url if way == "store" else str(self.folder / way / "run"))
        if found != self.counts["hash"]:
            raise SystemExit(f"{way}: {found} is not {self.counts['hash']}, the state of the undisturbed run")
        killed = self.counts["waiting"].pop(way, {})
        self.counts["runs"][way] = self.counts["runs"].get(way, 0) + 1
        self._note("kills", way, killed)
        shutil.rmtree(self.folder / way, ignore_errors=True)

    # ---- one host

    def _one_host(self, way: str, store: FaultProxy | None, kill: bool) -> bool:
        kind = self._rng.choice(["local", "in_memory"])
        disk = self._memory if kind == "in_memory" else self.folder / way / "disk"
        saves = ["--save", str(self.folder / way / "run"), "--non-persistent-save-interval", "20"]
        saves += ["--non-persistent-ckpt-type", kind, "--non-persistent-local-ckpt-dir", str(disk)]
        if store is not None:
            saves = ["--save", self._url, "--checkpoint-staging-path", str(self.folder / way / "staging")]
            store.plan = random_plan(self._rng.randrange(10**6), 0.05)
        process = self._start([*self._flags, *saves, "--auto-resume"], store)
        how = self._disturb(process) if kill else ""
        self._end(process, killed=bool(how))
        if how:
            if way == "host" and self._rng.random() < 0.1:
                how += " and saves lost"
                shutil.rmtree(disk, ignore_errors=True)
            self._note("waiting", way, {how: 1})
        return not how

    def _start(self, flags: list[str], store: FaultProxy | None = None) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "pretrain_gpt.py", "--nprocs", "2", *TINY, *flags]
        more = {key: str(value) for key, value in store.environment.items()} if store is not None else {}
        return subprocess.Popen(
            argv, cwd=ROOT, env=environment(**more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def _end(self, process: subprocess.Popen[bytes], *, killed: bool = False) -> None:
        error = process.communicate()[1].decode(errors="replace")
        if process.returncode == 2 or (process.returncode and not killed):
            raise SystemExit(f"after {self.kills} kills a launch ended with {process.returncode}:\n{error[-2000:]}")

    def _disturb(self, process: subprocess.Popen[bytes]) -> str:
        """Kills the launch or a part of it after a while; how, or empty where it had ended by itself."""
        try:
            process.wait(self._rng.uniform(0.2, self._seconds))
            return ""
        except subprocess.TimeoutExpired:
            pass
        how = self._rng.choice(["launch", "rank", "signal"])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        ranks = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        if how == "rank" and ranks:
            os.kill(self._rng.choice(ranks), signal.SIGKILL)
        elif how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            how = "launch"
            os.killpg(process.pid, signal.SIGKILL)
        return how

    # ---- hosts with disks of their own

    def _hosts(self, kill: bool) -> bool:
        folder = self.folder / "hosts"
        folder.mkdir(exist_ok=True)
        saves = "--elastic 1 --non-persistent-save-interval 20 --non-persistent-ckpt-type local --replication".split()
        saves += ["--non-persistent-local-ckpt-dir", str(folder / "disk")]
        agents = Agents(folder, "1:3", 1, [*self._flags, *saves], restarts=1000)
        on = {name: self._host(agents, name) for name in ("host0", "host1", "host2")}
        try:
            for last in (False, False, True):
                if self._ended(agents, self._rng.uniform(0.2, self._seconds) if kill else 1e9):
                    break
                if last:
                    self._note("waiting", "hosts", {"all": 1})
                    break
                name = self._rng.choice([*on])
                agents.lose(on[name])
                how = "host"
                if self._rng.random() < 0.2:
                    how = "host and disk"
                    shutil.rmtree(folder / name, ignore_errors=True)
                self._note("waiting", "hosts", {how: 1})
                time.sleep(self._rng.uniform(0, self._seconds))
                on[name] = self._host(agents, name)
        finally:
            agents.close()
            time.sleep(5)  # ranks end a moment after their agents
        return (folder / "run" / "COMPLETED").exists()

    def _host(self, agents: Agents, name: str) -> int:
        agents.start(disk=name)
        return len(agents.processes) - 1

    def _ended(self, agents: Agents, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in agents.processes):
                return True
            time.sleep(0.1)
        return False

    def close(self) -> None:
        shutil.rmtree(self._memory, ignore_errors=True)


def state_of(folder: str) -> str:
    """The hash of all tensors of the newest checkpoint."""
    reader, digest = CheckpointReader(resolve_checkpoint(folder)), hashlib.sha256()
    for name in sorted(reader.names):
        digest.update(name.encode())
        digest.update(flat_bytes(reader.read(name)))
    return digest.hexdigest()


@contextmanager
def served(wanted: bool) -> Iterator[FaultProxy | None]:
    """A store in this process that fails on purpose."""
    if not wanted:
        yield None
        return
    with moto_server() as port:
        proxy = FaultProxy(port)
        os.environ.update({key: str(value) for key, value in proxy.environment.items()})
        make_bucket(port, "kills")
        try:
            yield proxy
        finally:
            proxy.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where runs and counts are; a later call continues")
    parser.add_argument("--kills", type=int, default=1000, help="in all calls together")
    parser.add_argument("--ways", nargs="+", choices=("host", "store", "hosts"), default=["host", "store", "hosts"])
    parser.add_argument("--seed", type=int, help="unset: another one each time")
    parser.add_argument("--seconds", type=float, default=20.0, help="a kill comes within this time of the start")
    parser.add_argument("--iterations", type=int, default=1000, help="of each run; the first call's stays")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    if "hosts" in given.ways and subprocess.run(["unshare", "--uts", "--mount", "true"], check=False).returncode:
        print("hosts: left out, this user may not make namespaces", flush=True)
        given.ways.remove("hosts")
    runs = Runs(given.folder.resolve(), given.iterations, given.seconds, rng)
    began, before = time.monotonic(), runs.kills
    try:
        with served("store" in given.ways) as store:
            runs.quiet()
            while runs.kills < given.kills:
                way = rng.choice(given.ways)
                runs.turn(way, store if way == "store" else None)
                spent = time.monotonic() - began
                print(f"{runs.kills} kills, {runs.kills - before} of them in the last {spent:.0f} s", flush=True)
            for way in [way for way in given.ways if runs.counts["waiting"].get(way)]:
                runs.turn(way, store if way == "store" else None, kill=False)
    finally:
        runs.close()
    print(f"{runs.kills} kills: {runs.counts['kills']}, {runs.counts['runs']} runs compared: {runs.counts['hash']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
