"""Files of a save on their way from host to host: who keeps whose, and how they are sent.

    ranks 0 1 | 2 3 | 4 5      three hosts, `replication_factor` 2, `replication_jump` 2
    file of rank 0 is on hosts 0 and 1, that of rank 2 on 1 and 2, that of rank 4 on 2 and 0

A file travels in messages of the size of a block, and is compared with its checksums (those of the manifest) when it
has arrived.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from megalite.checkpoint.format import StoredFile
from megalite.checkpoint.loading import verify_file
from megalite.checkpoint.reading import open_plain
from megalite.checkpoint.storage import NewFile, flat_bytes
from megalite.comm import Axis, start_swap
from megalite.errors import CheckpointError
from megalite.faults import fault_point


def buddies_of(hosts: Sequence[int], jump: int | None, factor: int) -> list[list[int]]:
    """rank -> the ranks that keep a copy of its file, each on another host. hosts: rank -> number of its host. jump:
    ranks between two that keep the same file; None: those with the same place on the next hosts. factor: hosts that
    hold each file, its own included; fewer where there are not so many."""
    ranks_of = {host: [r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)}
    order, found = [*ranks_of], []
    for rank, host in enumerate(hosts):
        mine, copies = ranks_of[host].index(rank), min(factor, len(order))
        if jump is None:
            following = [ranks_of[order[(order.index(host) + n) % len(order)]] for n in range(1, copies)]
            found.append([there[mine % len(there)] for there in following])
        else:
            found.append([(rank + n * jump) % len(hosts) for n in range(1, copies)])
    return found


class Transfer(NamedTuple):
    """One file from the rank `source` to the rank `target`."""

    name: str
    source: int
    target: int


def rounds_of(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """The transfers in rounds, in each of which a rank sends at most one file and receives at most one."""
    rounds: dict[int, list[Transfer]] = defaultdict(list)
    busy: set[tuple[int, str, int]] = set()
    for each in transfers:
        number = 0
        while busy & (ends := {(number, "from", each.source), (number, "to", each.target)}):
            number += 1
        busy |= ends
        rounds[number].append(each)
    return [*rounds.values()]


def send_files(
    transfers: Sequence[Transfer], files: Mapping[str, StoredFile], folder: Path, axis: Axis, block_bytes: int
) -> str | None:
    """Sends and receives this rank's part of the transfers; what arrives is in `folder`, where what is sent lies on the
    other host. Collective. Returns what is wrong here: a file that is damaged, on its way or at its source, or cannot
    be written. It is not kept, and the others are sent all the same."""
    problems = []
    for some in rounds_of(transfers):
        out = next((each for each in some if each.source == axis.rank), None)
        coming = next((each for each in some if each.target == axis.rank), None)
        arriving = _swap(out, coming, files, folder, axis, block_bytes)
        if coming is not None:
            stored, path = files[coming.name], folder / coming.name
            try:
                _receive(arriving, path, stored, block_bytes)
            except OSError as error:
                problems.append(f"{path}: cannot be written ({error.strerror})")
            except CheckpointError:
                problems.append(f"{path}: damaged when it came from rank {coming.source}")
            fault_point("replica.arrived", rank=axis.rank)
        for _ in arriving:
            pass
    return problems[0] if problems else None


def _swap(
    out: Transfer | None,
    coming: Transfer | None,
    files: Mapping[str, StoredFile],
    folder: Path,
    axis: Axis,
    block_bytes: int,
) -> Iterator[memoryview]:
    """Sends one file, and yields the messages of another."""
    sent, received = (0 if each is None else files[each.name].nbytes for each in (out, coming))
    for at in range(0, max(sent, received), block_bytes):
        leaving, arriving = [], []
        if out is not None and at < sent:
            if at <= sent // 2 < at + block_bytes:
                fault_point("replica.half_sent", rank=axis.rank)
            leaving.append((axis.ranks[out.target], _read(folder / out.name, at, min(block_bytes, sent - at))))
        if coming is not None and at < received:
            space = torch.empty(min(block_bytes, received - at), dtype=torch.uint8)
            arriving.append((axis.ranks[coming.source], space))
        start_swap(leaving, arriving, axis).wait()
        for _, data in arriving:
            yield flat_bytes(data)


def _read(path: Path, at: int, nbytes: int) -> torch.Tensor:
    """Bytes of a file from `at` on. Of one that cannot be read they are wrong, and the other host sees it."""
    data = bytearray(nbytes)
    with suppress(OSError, CheckpointError), open(open_plain(path), "rb") as file:
        file.seek(at)
        file.readinto(data)
    return torch.frombuffer(data, dtype=torch.uint8)


def _receive(messages: Iterator[memoryview], path: Path, stored: StoredFile, block_bytes: int) -> None:
    """Writes a file under another name until it is whole. Raises OSError, and CheckpointError where it is damaged."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        with NewFile(part) as file:
            for data in messages:
                file.write(data)
        verify_file(part, stored, block_bytes)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
