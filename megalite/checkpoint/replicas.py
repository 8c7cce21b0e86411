"""Files of a save on their way from host to host: who keeps whose, and how they are sent.

    ranks 0 1 | 2 3 | 4 5      three hosts, `replication_factor` 2, `replication_jump` 2
    file of rank 0 is on hosts 0 and 1, that of rank 2 on 1 and 2, that of rank 4 on 2 and 0

A file travels in messages of whole blocks, each compared with its checksums (those of the manifest) when it arrives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.checkpoint.format import StoredFile, checksum
from megalite.checkpoint.reading import open_plain
from megalite.checkpoint.storage import NewFile, flat_bytes
from megalite.comm import Axis, start_swap
from megalite.errors import CheckpointError
from megalite.faults import fault_point


def buddies_of(hosts: Sequence[int], jump: int | None, factor: int) -> list[list[int]]:
    """rank -> the ranks that keep a copy of its file, each on another host.

    hosts: rank -> number of its host. jump: ranks between two that keep the same file; None: those with the same place
    on the next hosts. factor: hosts that hold each file, its own included; fewer where there are not so many.
    """
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


@dataclass(frozen=True)
class Transfer:
    """One file from the rank `source` to the rank `target`."""

    name: str
    source: int
    target: int


def rounds_of(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """The transfers in rounds, in each of which a rank sends at most one file and receives at most one."""
    rounds: list[list[Transfer]] = []
    busy: list[tuple[set[int], set[int]]] = []
    for each in transfers:
        free = (n for n, (out, in_) in enumerate(busy) if each.source not in out and each.target not in in_)
        number = next(free, len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append((set(), set()))
        rounds[number].append(each)
        busy[number][0].add(each.source)
        busy[number][1].add(each.target)
    return rounds


@dataclass(frozen=True)
class _Piece:
    """Bytes `start` to `end` of a file, with (length, checksum) of what they consist of."""

    start: int
    end: int
    blocks: list[tuple[int, str]]


def pieces_of(stored: StoredFile, block_bytes: int) -> list[_Piece]:
    """The messages in which a file travels: whole blocks, together of at most `block_bytes`."""
    ends = [*(shard.begin for shard in stored.shards[1:]), stored.nbytes]
    blocks = [(stored.header_bytes, stored.header_checksum)]
    for shard, end in zip(stored.shards, ends, strict=True):
        sizes = [min(block_bytes, end - at) for at in range(shard.begin, end, block_bytes)]
        blocks += zip(sizes, shard.checksums, strict=True)
    pieces: list[_Piece] = []
    at = 0
    for block in blocks:
        if not pieces or pieces[-1].end - pieces[-1].start + block[0] > block_bytes:
            pieces.append(_Piece(at, at + block[0], [block]))
        else:
            pieces[-1] = _Piece(pieces[-1].start, at + block[0], [*pieces[-1].blocks, block])
        at += block[0]
    return pieces


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
        sending = _read(out, files, folder, block_bytes) if out is not None else iter(())
        arrival = _Arrival(coming, files, folder, block_bytes) if coming is not None else None
        expected = iter(arrival.pieces if arrival is not None else ())
        while True:
            data, piece = next(sending, None), next(expected, None)
            if data is None and piece is None:
                break
            space = torch.empty(piece.end - piece.start if piece is not None else 0, dtype=torch.uint8)
            leaving = [(axis.ranks[out.target], data)] if out is not None and data is not None else []
            arriving = [(axis.ranks[coming.source], space)] if coming is not None and piece is not None else []
            start_swap(leaving, arriving, axis).wait()
            if arrival is not None and piece is not None:
                arrival.take(piece, flat_bytes(space))
        if arrival is not None and (problem := arrival.end(axis.rank)) is not None:
            problems.append(problem)
    return problems[0] if problems else None


def _read(
    transfer: Transfer, files: Mapping[str, StoredFile], folder: Path, block_bytes: int
) -> Iterator[torch.Tensor]:
    """The messages of a file. Of one that cannot be read they are wrong, and the other host sees it."""
    stored, path = files[transfer.name], folder / transfer.name
    try:
        file = os.fdopen(open_plain(path, stored.nbytes), "rb")
    except CheckpointError:
        file = None
    pieces = pieces_of(stored, block_bytes)
    for number, piece in enumerate(pieces):
        if number == len(pieces) // 2:
            fault_point("replica.half_sent", rank=transfer.source)
        data = bytearray(piece.end - piece.start)
        if file is not None:
            try:
                file.readinto(data)
            except OSError:
                pass
        yield torch.frombuffer(data, dtype=torch.uint8)
    if file is not None:
        file.close()


class _Arrival:
    """A file that arrives: under another name until it is whole."""

    def __init__(self, transfer: Transfer, files: Mapping[str, StoredFile], folder: Path, block_bytes: int) -> None:
        self._source, self._path = transfer.source, folder / transfer.name
        self.pieces = pieces_of(files[transfer.name], block_bytes)
        self._problem: str | None = None
        self._part = self._path.with_name(f"{transfer.name}.part")
        self._part.unlink(missing_ok=True)
        self._file: NewFile | None = None

    def take(self, piece: _Piece, data: memoryview) -> None:
        at = 0
        for nbytes, expected in piece.blocks:
            if self._problem is None and checksum(data[at : at + nbytes]) != expected:
                self._problem = (
                    f"{self._path}: damaged at byte {piece.start + at} when it came from rank {self._source}"
                )
            at += nbytes
        if self._problem is None:
            try:
                self._file = self._file or NewFile(self._part)
                self._file.write(data)
            except OSError as error:
                self._problem = f"{self._path}: cannot be written ({error.strerror})"

    def end(self, rank: int) -> str | None:
        """The file is there, or what is wrong."""
        try:
            if self._file is not None:
                self._file.__exit__(None if self._problem is None else CheckpointError)
            if self._problem is None:
                os.replace(self._part, self._path)
            else:
                self._part.unlink(missing_ok=True)
        except OSError as error:
            self._problem = f"{self._path}: cannot be written ({error.strerror})"
        fault_point("replica.arrived", rank=rank)
        return self._problem
