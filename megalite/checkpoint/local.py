"""Saves on the hosts themselves: each host keeps its ranks' files, and those of its buddies, in the usual format.

    host a                              host b
    TOKEN/iter_0000100/                 TOKEN/iter_0000100/
      manifest.json, COMMITTED            manifest.json, COMMITTED      the same everywhere
      rank_00000.safetensors              rank_00001.safetensors        its own
      rank_00001.safetensors              rank_00000.safetensors        its buddy's (`replicas.py`)

The older save is deleted once the new one is committed on every host. After a loss the hosts tell what they have, and
the newest save whose files are all somewhere is loaded, at any layout: a rank reads from its own disk, which first gets
from the others what it lacks. TOKEN names the run; it is in a file of the run directory (`save`), so what another run
has left on a disk is never taken for this one's.

Proof: tests/faults/test_local_saves.py.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megalite.checkpoint.format import COMMITTED, MANIFEST, Manifest, commit_text, file_from_json, parse_manifest
from megalite.checkpoint.hosts import DIRECTORY, LocalSettings, file_system, find_buddies, find_hosts, together
from megalite.checkpoint.loading import verify_file
from megalite.checkpoint.reading import read_extra, read_manifest
from megalite.checkpoint.replicas import Transfer, send_files
from megalite.checkpoint.run_dir import committed, directory_name, listing, step_of
from megalite.checkpoint.saving import SaveJob, SaveReport, raise_first
from megalite.comm import Axis, all_gather_json, bytes_of, patiently
from megalite.errors import CheckpointError
from megalite.faults import fault_point
from megalite.host_memory import free_memory
from megalite.progress import amount

logger = logging.getLogger(__name__)

MOST_FAILED = 3


class LocalSaves:
    """The saves of one run on its hosts. All methods are collective over `world`. Raises CheckpointError, on all ranks
    alike, from the first one where hosts share the folder, or a copy would be on the host of its original. token: names
    the run, if it has begun. mine: the ranks that share this host's folder."""

    token = ""

    def __init__(self, settings: LocalSettings, world: Axis, host: str) -> None:
        self.settings, self._world = settings, world
        self._failed = 0
        self._names = [str(name) for name in all_gather_json(host, world)]
        self._numbers = find_hosts(settings.folder, world)
        self._buddies = find_buddies(settings, self._names, self._numbers, speaks=world.is_first)
        self.mine = [rank for rank, number in enumerate(self._numbers) if number == self._numbers[world.rank]]
        self._leads = self.mine[0] == world.rank
        self._count = len(set(self._numbers))
        self._copies = min(settings.factor, self._count)
        self._found: _Found | None = None
        self.is_ahead = False  # whether what `newest` has found is newer than all that `save` holds

    @property
    def root(self) -> Path:
        return self.settings.folder / self.token

    # ---- saving

    def check_room(self, nbytes: int) -> None:
        """Raises CheckpointError where a host has no room for two saves of `nbytes`, its share and the copies that it
        keeps: the older one stays until the newer is whole. What is there of this run counts as room."""
        settings, folder, name = self.settings, self.settings.folder, self._names[self._world.rank]
        needed = 0 if settings.kept else int(2 * self._copies * nbytes * len(self.mine) / self._world.size)

        def look() -> None:
            free = shutil.disk_usage(folder).free
            if settings.in_memory:
                if (kind := file_system(folder)) not in ("tmpfs", "ramfs"):
                    raise CheckpointError(
                        f"`non_persistent_ckpt_type`=in_memory: {folder} on {name} is on {kind}, not in memory; leave "
                        f"out {DIRECTORY}, or say local"
                    )
                free = int(min(free, free_memory()))
            free += sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file()) if self.token else 0
            if needed > free:
                raise CheckpointError(
                    f"{DIRECTORY}={folder}: two saves need {amount(needed, 'B')} on {name}, and "
                    f"{amount(free, 'B')} are free; give a larger folder, or keep fewer copies"
                )

        together(self._world, look if self._leads else lambda: None)

    def save(self, job: SaveJob) -> bool:
        """Writes, sends and commits one save; whether that has succeeded. A failure is a warning, the older save
        stays. Raises CheckpointError after three in a row."""
        started, job = time.perf_counter(), replace(self._here(job), block_bytes=self.settings.block_bytes)
        try:
            self._write(job, job.write_part)
        except CheckpointError as error:
            self._failed += 1
            if self._leads:
                shutil.rmtree(job.staging, ignore_errors=True)
            if self._failed == MOST_FAILED:
                raise CheckpointError(f"{error.text}; the third such save in a row that has failed") from None
            if self._world.is_first:
                logger.warning("iteration %d could not be saved on the hosts: %s", job.step, error.text)
            return False
        self._failed = 0
        if self._world.is_first:
            seconds, size = time.perf_counter() - started, amount(job.plan.nbytes, "B")
            where = "this host" if self._count == 1 else f"{self._count} hosts, each file on {self._copies}"
            logger.info("saved iteration %d on %s (%s in %.2f s)", job.step, where, size, seconds)
        return True

    def keep(self, job: SaveJob, report: SaveReport) -> None:
        """Makes a save on the hosts of what the ranks have staged for a store. Raises CheckpointError."""
        here = self._here(job)

        def move() -> SaveReport:
            try:
                if "file" in report:
                    shutil.move(job.staging / report["file"], here.staging)
                shutil.rmtree(job.staging, ignore_errors=True)
            except OSError as error:
                return {"error": job.explain(error)}
            return report

        self._write(here, move)

    def _here(self, job: SaveJob) -> SaveJob:
        """The job as one of this folder."""
        staging = self.root / f"{directory_name(job.step)}.tmp-{job.save_id}"
        return replace(job, directory=self.root, staging=staging, flag="non_persistent_local_ckpt_dir")

    def _write(self, job: SaveJob, write: Callable[[], SaveReport]) -> None:
        """All of one save, of which older ones are deleted. Raises CheckpointError, on all ranks alike."""
        rank, gather = self._world.rank, partial(all_gather_json, axis=self._world)
        meta = bytes_of(0, json.dumps(job.meta).encode() if self._world.is_first else b"", self._world)
        job = replace(job, meta=json.loads(meta))
        together(self._world, partial(job.staging.mkdir, parents=True) if self._leads else lambda: None)
        reports = gather(patiently(write, self._world))
        raise_first([report.get("error") for report in reports])
        transfers = [
            Transfer(report["file"], source, buddy)
            for source, report in enumerate(reports)
            for buddy in (self._buddies[source] if report else ())
        ]
        entries = {
            each.name: file_from_json(reports[each.source]["entry"], each.name, job.plan.tensors, job.block_bytes)
            for each in transfers
            if rank in (each.source, each.target)
        }
        raise_first(gather(send_files(transfers, entries, job.staging, self._world, job.block_bytes)))
        raise_first(gather(patiently(partial(job.try_commit, reports) if self._leads else None, self._world)))
        fault_point("local.committed", rank=rank, step=job.step)
        self._remove(lambda path: path.name != directory_name(job.step))

    def _remove(self, which: Callable[[Path], bool]) -> None:
        """Deletes saves of this run on this host, whole or not."""
        for path in listing(self.root) if self._leads and self.token else ():
            if path.is_dir() and which(path):
                (path / COMMITTED).unlink(missing_ok=True)
                fault_point("local.gc", rank=self._world.rank)
                shutil.rmtree(path, ignore_errors=True)

    def drop_after(self, step: int) -> None:
        """Deletes saves newer than `step`, from which the run goes on, and what interrupted ones have left."""
        self._remove(lambda path: ".tmp-" in path.name or step_of(path) > step)
        all_gather_json(None, self._world)

    def clear(self) -> None:
        """The run needs no save any more."""
        self._remove(lambda path: True)
        if self._leads and self.token:
            shutil.rmtree(self.root, ignore_errors=True)

    # ---- loading

    def newest(self, at_least: int) -> Path | None:
        """The newest save from step `at_least` on that is held whole and is undamaged, by all hosts together; its
        manifest is then on each of them. None: there is none."""
        told = all_gather_json(self._held() if self._leads else [], self._world)
        holders: dict[tuple[int, str], dict[int, set[str]]] = defaultdict(dict)
        for rank, saves in enumerate(told):
            for step, save_id, names in saves:
                holders[step, save_id][rank] = set(names)
        for step, save_id in sorted((key for key in holders if key[0] >= at_least), reverse=True):
            found = self._found_whole(step, holders[step, save_id])
            if found is not None:
                self._spread(found)
                self._found, self.is_ahead = found, step > at_least
                return found.path
        return None

    def _held(self) -> list[tuple[int, str, list[str]]]:
        """What this host has: step, save id, names of the files that are as long as they were."""
        saves = []
        for path in committed(self.root):
            assert isinstance(path, Path)
            try:
                manifest = read_manifest(path)
                for name in manifest.extra_files:
                    read_extra(path, manifest, name)
            except CheckpointError as error:
                logger.warning("passed over: %s", error)
                continue
            sizes = {each.name: each.stat().st_size for each in listing(path) if each.is_file()}
            names = [name for name, stored in manifest.files.items() if sizes.get(name) == stored.nbytes]
            saves.append((manifest.step, manifest.save_id, names))
        return saves

    def _found_whole(self, step: int, holders: dict[int, set[str]]) -> _Found | None:
        """The save, if its files are all somewhere and fit their checksums. holders: first rank of a host -> files."""
        path, first = self.root / directory_name(step), min(holders)
        raw = bytes_of(first, (path / MANIFEST).read_bytes() if self._world.rank == first else b"", self._world)
        manifest = parse_manifest(raw, str(path / MANIFEST))
        mine = holders.get(self.mine[0], set())
        if manifest.files.keys() <= set().union(*holders.values()):
            share = sorted(mine)[self.mine.index(self._world.rank) :: len(self.mine)]
            bad = patiently(lambda: self._damaged(path, manifest, share), self._world)
            for rank, names in enumerate(all_gather_json(bad, self._world)):
                holders.get(self._numbers[rank], set()).difference_update(names)
        if not (missing := sorted(manifest.files.keys() - set().union(*holders.values()))):
            return _Found(path, manifest, raw, holders)
        if self._world.is_first:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            logger.warning("passed over %s: no host has a whole %s%s", path, missing[0], more)
        return None

    def _damaged(self, path: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
        """Those of this host's files that do not fit their checksums; they are deleted."""
        bad = []
        for name in names:
            try:
                verify_file(path / name, manifest.files[name], manifest.block_bytes)
            except (CheckpointError, OSError) as error:
                logger.warning("%s: %s; another host is asked for it", self._names[self._world.rank], error)
                (path / name).unlink(missing_ok=True)
                bad.append(name)
        return bad

    def _spread(self, found: _Found) -> None:
        """Makes the save known on hosts that have nothing of it."""
        path, manifest, raw, holders = found
        small = {}
        for name in manifest.extra_files:
            own = read_extra(path, manifest, name) if self._world.rank == min(holders) else b""
            small[name] = bytes_of(min(holders), own, self._world)

        def write() -> None:
            if self._leads and self.mine[0] not in holders:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
                for name, data in {**small, MANIFEST: raw, COMMITTED: commit_text(raw)}.items():
                    (path / name).write_bytes(data)

        together(self._world, write)

    def is_of(self, path: object) -> bool:
        """Whether a checkpoint is one that `newest` has found."""
        return self._found is not None and self._found.path == path

    def fetch(self, path: object, names: Collection[str]) -> bool:
        """Whether a checkpoint is the one that `newest` has found; then gets what this rank wants to read of it, and
        its host lacks."""
        if (found := self._found) is None or found.path != path:
            return False
        own, hosts, files = found.holders.get(self.mine[0], set()), self._numbers, found.manifest.files
        wanted = all_gather_json(sorted(set(names) - own), self._world)
        comes: dict[tuple[int, str], Transfer] = {}
        load: Counter[int] = Counter()
        for rank, missing in enumerate(wanted):
            for name in missing:
                if (hosts[rank], name) not in comes:
                    able = [r for r, host in enumerate(hosts) if name in found.holders.get(host, ())]
                    source = min(able, key=load.__getitem__)
                    load[source] += 1
                    comes[hosts[rank], name] = Transfer(name, source, rank)
        transfers = [*comes.values()]
        problem = send_files(transfers, files, found.path, self._world, found.manifest.block_bytes)
        raise_first(all_gather_json(problem, self._world))
        if transfers and self._world.is_first:
            size = amount(sum(files[each.name].nbytes for each in transfers), "B")
            logger.info("%s: %d files (%s) came from other hosts", found.path.name, len(transfers), size)
        return True


class _Found(NamedTuple):
    """A save that is whole. holders: number of a host -> names of the files that it has."""

    path: Path
    manifest: Manifest
    raw: bytes
    holders: Mapping[int, set[str]]
