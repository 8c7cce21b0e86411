"""What `thousand_kills.py` does to runs: on one host, with a store, on three hosts; and what it counts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from store_server import FaultProxy, random_plan
from torchrun_agents import TINY, Agents, environment
from warm_launches import WarmLauncher

from megalite.checkpoint import CheckpointReader, flat_bytes, resolve_checkpoint

MOST_IN_VAIN = 5
HANGS = 300.0
IN_VAIN = "attempts from iteration"  # what a launch says that ends after three starts without a new checkpoint


class Counts:
    """What was done to the runs in `folder`, in a file. waiting: kills of runs that are not complete yet."""

    def __init__(self, folder: Path, iterations: int) -> None:
        self._file, self._lock = folder / "counts.json", threading.Lock()
        self.all: dict[str, Any] = {"iterations": iterations, "hash": None, "kills": {}, "runs": {}, "waiting": {}}
        if self._file.exists():
            self.all = json.loads(self._file.read_text())
            for way in [way for way in self.all["waiting"] if way.startswith("store")]:
                del self.all["waiting"][way]  # that store was in a process which has ended

    @property
    def kills(self) -> int:
        with self._lock:
            return sum(sum(hows.values()) for kind in ("kills", "waiting") for hows in self.all[kind].values())

    @property
    def flags(self) -> list[str]:
        """Of all runs."""
        iterations: int = self.all["iterations"]
        layout = "--tensor-model-parallel-size 2 --global-batch-size 1 --keep-last-n 2".split()
        return [*layout, "--train-iters", str(iterations), "--save-interval", str(max(1, iterations // 5))]

    @property
    def local(self) -> list[str]:
        return ["--non-persistent-save-interval", str(max(1, self.all["iterations"] // 20))]

    def by_way(self) -> dict[str, dict[str, int]]:
        """How often what was done to runs that are compared; runs that went on side by side are added."""
        sums: dict[str, Counter[str]] = {}
        for way, hows in self.all["kills"].items():
            sums.setdefault(way.rstrip("0123456789"), Counter()).update(hows)
        return {way: dict(sums[way].most_common()) for way in sorted(sums)}

    def note(self, way: str, how: str) -> None:
        with self._lock:
            hows = self.all["waiting"].setdefault(way, {})
            hows[how] = hows.get(how, 0) + 1
            self._write()

    def complete(self, way: str, found: str) -> None:
        """A run of this way has ended, with this hash."""
        with self._lock:
            if found != self.all["hash"]:
                raise SystemExit(f"{way}: {found} is not {self.all['hash']}, the state of the undisturbed run")
            killed = Counter(self.all["waiting"].pop(way, {}))
            self.all["kills"][way] = Counter(self.all["kills"].get(way, {})) + killed
            self.all["runs"][way] = self.all["runs"].get(way, 0) + 1
            self._write()

    def _write(self) -> None:
        staged = self._file.with_suffix(".tmp")
        staged.write_text(json.dumps(self.all, indent=1))
        staged.replace(self._file)


class Way(Protocol):
    """Runs that are disturbed in one way, one at a time."""

    way: str

    def turn(self, kill: bool) -> None:
        """One launch of the run, killed or left to end; compares the run when it is complete."""

    def close(self) -> None: ...


class OneHost:
    """The runs of a way on one host, one at a time. seconds: a kill comes within this time of the ranks' start. store:
    for `--save`; None: a folder."""

    def __init__(
        self, way: str, folder: Path, counts: Counts, seconds: float, rng: random.Random, store: FaultProxy | None
    ) -> None:
        self.way, self._counts, self._seconds, self._store = way, counts, seconds, store
        self._folder, self._rng = folder / way, rng
        if store is not None:  # which is new, as its runs are
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        self._memory = Path("/dev/shm") / f"megalite-kills-{folder.name}-{way}"
        served = store.environment if store is not None else {}
        self._launch = WarmLauncher(environment(**{key: str(value) for key, value in served.items()}))

    @property
    def _save(self) -> str:
        if self._store is None:
            return str(self._folder / "run")
        return f"s3://kills/{self.way}-{self._counts.all['runs'].get(self.way, 0)}"

    def turn(self, kill: bool) -> None:
        kind = self._rng.choice(["local", "in_memory"])
        disk = self._memory if kind == "in_memory" else self._folder / "disk"
        saves = [*self._counts.local, "--non-persistent-ckpt-type", kind, "--non-persistent-local-ckpt-dir", str(disk)]
        if self._store is not None:
            saves = ["--checkpoint-staging-path", str(self._folder / "staging")]
            self._store.plan = random_plan(self._rng.randrange(10**6), 0.05)
        self._start(["--save", self._save, *saves, "--auto-resume", "--max-restarts", "1000"])
        how = self._disturb() if kill else ""
        self._end(killed=bool(how))
        if how:
            self._counts.note(self.way, how + ("" if self._store is not None else self._harm(disk)))
        elif self._launch.wait(0) == 0:
            self._counts.complete(self.way, state_of(self._save))
            shutil.rmtree(self._folder / "run", ignore_errors=True)

    def _start(self, flags: list[str]) -> None:
        self._launch.start([*TINY, "--nprocs", "2", *self._counts.flags, *flags], self._folder / "log")

    def _end(self, *, killed: bool) -> None:
        status = self._launch.wait(HANGS)
        said = self._launch.log.read_text(errors="replace")[-3000:]
        if status is None:
            raise SystemExit(f"{self.way}: after {self._counts.kills} kills a launch does not end:\n{said}")
        if (status == 2 and IN_VAIN not in said) or (status not in (0, 2) and not killed):
            raise SystemExit(f"{self.way}: after {self._counts.kills} kills a launch ended with {status}:\n{said}")

    def _disturb(self) -> str:
        """Kills ranks, each time when all have been started again, at last the launch; how that was killed, or empty
        where it had ended by itself."""
        while True:
            if self._launch.wait(self._rng.uniform(0.1, self._seconds)) is not None:
                return ""
            moment = " in a save" if self._rng.random() < 0.3 and self._saving() else ""
            how = self._rng.choices(["rank", "launch", "signal"], [0.82, 0.1, 0.08])[0]
            ranks = children_of(self._launch.pid)
            if how == "rank" and ranks:
                if kill_process(self._rng.choice(sorted(ranks))):
                    self._counts.note(self.way, how + moment)
                if not self._others(ranks):
                    return ""
                continue
            if self._launch.wait(0) is not None:
                return ""
            if how == "signal":
                os.kill(self._launch.pid, signal.SIGTERM)
                return how + moment
            os.killpg(self._launch.pid, signal.SIGKILL)
            return f"launch{moment}"

    def _others(self, old: set[int]) -> bool:
        """Waits until all ranks have been started again; whether they have."""
        deadline = time.monotonic() + HANGS
        while self._launch.wait(0.02) is None and time.monotonic() < deadline:
            if len(children_of(self._launch.pid) - old) == 2:
                return True
        return False

    def _saving(self) -> bool:
        """Waits until a save is being written, for a moment; whether one is."""
        deadline = time.monotonic() + self._seconds
        places = (self._folder, self._memory)
        while self._launch.wait(0.005) is None and time.monotonic() < deadline:
            with suppress(OSError):  # folders come and go
                if any(True for place in places for _ in place.rglob("*.tmp-*")):
                    time.sleep(self._rng.uniform(0, 0.02))
                    return True
        return False

    def _harm(self, disk: Path) -> str:
        """What happens to the saves of the host besides, in words."""
        files = sorted(path for path in disk.rglob("*") if path.is_file() and path.stat().st_size)
        chance = self._rng.random()
        if not files or chance > 0.4:
            return ""
        if chance > 0.2:
            shutil.rmtree(disk, ignore_errors=True)
            return " and saves lost"
        file = self._rng.choice(files)
        data = bytearray(file.read_bytes())
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        file.write_bytes(data)
        return " and a bit flipped"

    def close(self) -> None:
        self._launch.close()
        shutil.rmtree(self._memory, ignore_errors=True)


class ThreeHosts:
    """The runs on hosts with disks of their own."""

    def __init__(self, way: str, folder: Path, counts: Counts, seconds: float, rng: random.Random) -> None:
        self.way, self._counts, self._seconds = way, counts, seconds
        self._folder, self._rng = folder / way, rng
        self._vain = 0

    def turn(self, kill: bool) -> None:
        self._folder.mkdir(exist_ok=True)
        before = self._counts.kills
        saves = [*self._counts.local, "--elastic", "1", "--non-persistent-ckpt-type", "local", "--replication"]
        saves += ["--non-persistent-local-ckpt-dir", str(self._folder / "disk")]
        agents = Agents(self._folder, "1:3", 1, [*self._counts.flags, *saves], restarts=1000)
        try:
            self._disturb(agents, kill)
        finally:
            agents.close()
            time.sleep(3)  # ranks end a moment after their agents
        if (self._folder / "run" / "COMPLETED").exists():
            self._counts.complete(self.way, state_of(str(self._folder / "run")))
            shutil.rmtree(self._folder, ignore_errors=True)
        elif before == self._counts.kills:
            self._vain += 1
            if self._vain > MOST_IN_VAIN:
                raise SystemExit(f"{self.way}: launches end without a kill; see {self._folder}")
            return
        self._vain = 0

    def _disturb(self, agents: Agents, kill: bool) -> None:
        on = {name: self._host(agents, name) for name in ("host0", "host1", "host2")}
        for left in reversed(range(self._rng.randint(3, 12))):
            if self._ended(agents, self._rng.uniform(0.2, self._seconds) if kill else HANGS):
                return
            if not kill:
                raise SystemExit(f"{self.way}: a launch does not end; see {self._folder}")
            name = self._rng.choice([*on])
            how = self._rng.choices(["rank", "host", "host and disk"], [0.5, 0.3, 0.2])[0] if left else "all"
            if how == "all":
                self._counts.note(self.way, how)
            elif how == "rank":
                pid = agents.processes[on[name]].pid
                while not (ranks := children_of(pid)) and not self._ended(agents, 0.5):
                    pass  # it takes a while until all have met
                time.sleep(self._rng.uniform(0, self._seconds))
                if ranks and kill_process(min(ranks)):
                    self._counts.note(self.way, how)
            else:
                agents.lose(on[name])
                if how == "host and disk":
                    shutil.rmtree(self._folder / name, ignore_errors=True)
                self._counts.note(self.way, how)
                time.sleep(self._rng.uniform(0, self._seconds))
                on[name] = self._host(agents, name)

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
        pass


def children_of(pid: int) -> set[int]:
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()


def kill_process(pid: int) -> bool:
    """Whether it was there to be killed."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return state not in "ZX"


def state_of(folder: str) -> str:
    """The hash of all tensors of the newest checkpoint."""
    reader, digest = CheckpointReader(resolve_checkpoint(folder)), hashlib.sha256()
    for name in sorted(reader.names):
        digest.update(name.encode())
        digest.update(flat_bytes(reader.read(name)))
    return digest.hexdigest()
