"""Checkpoints in a store, where nothing can be renamed.

    iter_0000100.<save id>/           a prefix for each attempt: torn and concurrent uploads never mix
      rank_00000.safetensors            sent by its rank; size and last block are read back
      manifest.json                     rank 0, when all ranks have reported; read back
    iter_0000100/COMMITTED            created last, on condition that there is none: this object is the checkpoint.
                                      It holds the proof of the manifest, the save id and the run's token

Deletion takes COMMITTED away first. What a run has set aside keeps its data, under `iter_0000100.aside-<save id>/`.
"""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.checkpoint.format import COMMITTED, MANIFEST, MAX_MANIFEST_BYTES, Manifest, commit_text, proves, to_json
from megalite.checkpoint.lock import RunLock
from megalite.errors import CheckpointError
from megalite.faults import fault_point
from megalite.stores import REREADS, Missing, StoreUrl

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 30.0
READ_BACK = 16 * 2**20
RESENDS = 3
_CHECKPOINT = re.compile(r"iter_\d{7,12}", re.ASCII)
_ATTEMPT = re.compile(r"(iter_\d{7,12})\.([0-9a-f]{12})", re.ASCII)
_PROOF = re.compile(rb"(.*)save ([\w-]{1,64}) run [\w-]{0,64}\n", re.DOTALL)


def attempt_place(path: StoreUrl, save_id: str) -> StoreUrl:
    """Where the files of a checkpoint `.../iter_0000100` are, those of one set aside included."""
    return path.parent / f"{path.name.partition('.')[0]}.{save_id}"


def read_proven(path: StoreUrl) -> tuple[bytes, str]:
    """manifest.json as it stands, which COMMITTED proves, and the save id. Raises CheckpointError."""
    wrong = f"{path}: {COMMITTED} and {MANIFEST} do not fit each other"
    for _ in range(REREADS):
        proof = (path / COMMITTED).read_if_there()
        if proof is None:
            raise CheckpointError(f"{path}: not a committed checkpoint (no {COMMITTED} object)")
        found = _PROOF.fullmatch(proof[:4096])
        if found is None:
            continue
        manifest = attempt_place(path, found[2].decode()) / MANIFEST
        try:
            if manifest.store.size(manifest.key) > MAX_MANIFEST_BYTES:
                break
            raw = manifest.read_bytes()
        except Missing:  # or the name of the save was damaged on its way here
            wrong = f"{manifest}: missing"
            continue
        if proves(found[1], raw):
            return raw, found[2].decode()
    raise CheckpointError(f"{wrong}; the checkpoint is damaged")


def save_id_of(path: StoreUrl) -> str | None:
    """The save that COMMITTED names; None where there is none, or it is not legible."""
    found = _PROOF.fullmatch((path / COMMITTED).read_if_there() or b"")
    return None if found is None else found[2].decode()


def committed_urls(directory: StoreUrl, tracker: str) -> list[StoreUrl]:
    """The committed checkpoints, by step. A listing may be older than the newest commit: the tracker file names that,
    and it is looked for."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        named = [path for path in directory.iterdir() if _CHECKPOINT.fullmatch(path.name)]
        found = sorted(named, key=lambda path: int(path.name[5:]))
        newest = ((directory / tracker).read_if_there() or b"")[:20].strip()
        if not newest.isdigit() or (found and int(found[-1].name[5:]) >= int(newest)):
            return found
        last = directory / f"iter_{int(newest):07d}"
        if (last / COMMITTED).is_file():
            return [path for path in found if path != last] + [last]
        if time.monotonic() > deadline:
            logger.warning("%s: %s is ahead of what is there; is the listing stale?", directory, tracker)
            return found
        time.sleep(1.0)


def send(target: StoreUrl, content: Path | bytes) -> None:
    """Writes an object until it reads back as it should, of a large file its last block, some times at most. Raises
    CheckpointError, and OSError of the local disk."""
    own, start, store = content, 0, target.store
    if not isinstance(own, bytes):
        with open(own, "rb") as source:
            start = max(0, source.seek(0, os.SEEK_END) - READ_BACK)
            source.seek(start)
            own = source.read()
    size = start + len(own)
    for _ in range(RESENDS):
        store.put(target.key, content)
        there = store.size(target.key)
        if there == size and any(store.read(target.key, start, size) == own for _ in range(REREADS)):
            return
        problem = f"has {there} of {size} bytes" if there != size else "has other bytes than were sent"
        logger.warning("%s: %s; the upload is repeated", target, problem)
    raise CheckpointError(f"{target}: {problem}, {RESENDS} uploads in a row")


def commit_in_store(final: StoreUrl, manifest: Manifest, files: Mapping[str, bytes], lock: RunLock | None) -> None:
    """Rank 0: makes an attempt, all of whose large files are there, the checkpoint `final`. Can be repeated. Raises
    CheckpointError."""
    attempt, raw = attempt_place(final, manifest.save_id), to_json(manifest)
    for name, data in {**files, MANIFEST: raw}.items():
        send(attempt / name, data)
    if lock is not None and not lock.held:
        raise HopelessSave(f"`save`={final.parent}: another run has taken it over; this one saves no more")
    fault_point("save.before_rename", rank=0, step=manifest.step)
    whose = f"save {manifest.save_id} run {lock.token if lock is not None else ''}\n"
    if final.store.create((final / COMMITTED).key, commit_text(raw) + whose.encode()) is None:
        raise HopelessSave(f"`save`={final.parent}: another run has committed {final.name}; this one saves no more")


class HopelessSave(CheckpointError):
    """No repetition helps: another run writes to the same URL, or a part could not be written."""


def remove_url(path: StoreUrl) -> None:
    """Deletes a checkpoint: COMMITTED first, so that a kill half-way leaves none."""
    save_id = save_id_of(path)
    (path / COMMITTED).unlink()
    fault_point("save.gc", rank=0, step=int(path.name[5:]))
    if save_id is not None:
        path.store.delete_folder(attempt_place(path, save_id).key)


def sweep(directory: StoreUrl) -> None:
    """Removes what interrupted uploads and deletions left. Only for a new holder of the lease. COMMITTED is read, not
    listed: a listing may be older than a commit."""
    for path in directory.iterdir():
        attempt = _ATTEMPT.fullmatch(path.name)
        if attempt is None:
            continue
        aside = directory / f"{attempt[1]}.aside-{attempt[2]}"
        if not _may_need(directory / attempt[1], attempt[2]) and not (aside / COMMITTED).is_file():
            path.store.delete_folder(path.key)
            logger.info("removed %s, left by an interrupted save", path)
    if dropped := directory.store.drop_uploads(directory.key):
        logger.info("removed the parts of %d uploads under %s, left by interrupted saves", dropped, directory)


def _may_need(path: StoreUrl, save_id: str) -> bool:
    """Whether a checkpoint consists of the files of this save, for all that can be read."""
    if not (path / COMMITTED).is_file():
        return False
    try:
        return read_proven(path)[1] == save_id
    except CheckpointError:
        return True


def take_up(directory: StoreUrl, folder: Path, names: Sequence[str]) -> None:
    """Fetches files that a run goes on writing, where this host has shorter ones or none."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        data, mine = (directory / name).read_if_there(), folder / name
        if data is not None and (not mine.is_file() or mine.stat().st_size < len(data)):
            mine.write_bytes(data)


def send_along(folder: Path, directory: StoreUrl, names: Sequence[str]) -> None:
    """Puts copies of such files beside the checkpoints. A failure is a warning."""
    for name in names:
        try:
            if (folder / name).is_file():
                (directory / name).write_bytes((folder / name).read_bytes())
        except (OSError, CheckpointError) as error:
            logger.warning("could not copy %s to %s: %s", folder / name, directory, error)


def set_aside_url(path: StoreUrl) -> StoreUrl:
    """Takes its name from a checkpoint: COMMITTED moves, the files stay where they are."""
    proof, save_id = (path / COMMITTED).read_bytes(), save_id_of(path)
    aside = path.parent / f"{path.name}.aside-{save_id}"
    (aside / COMMITTED).write_bytes(proof)
    (path / COMMITTED).unlink()
    return aside
