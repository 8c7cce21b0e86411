"""Loading at any layout: what a rank wants is cut out of what is stored, verified block by block.

Values are written through the shards' views; the only buffer is one block.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch

from megalite.checkpoint.format import Manifest, StoredFile, StoredShard
from megalite.checkpoint.reading import check_size, files_of, open_shard_file, read_extra, read_manifest
from megalite.checkpoint.saving import raise_first
from megalite.checkpoint.storage import flat_bytes
from megalite.comm import TensorShard, range_to_rectangles
from megalite.errors import CheckpointError
from megalite.faults import fault_point
from megalite.inventory import Box, cover
from megalite.progress import OnProgress, no_progress
from megalite.stores import Place, place

logger = logging.getLogger(__name__)

_LOOKS = 16  # at a time, at sizes of files


class LoadTarget(NamedTuple):
    """Destination of a piece of a stored rectangle: the wanted shard and the common box."""

    shard: TensorShard
    common: Box
    # Where the piece is one contiguous range both in the file and in `shard.local`: the first and last of the stored
    # rectangle's elements, and what must be added to come to the element in `shard.local`.
    flat: tuple[int, int, int] | None


def _flat_range(stored: Box, shard: TensorShard, common: Box, dtype: torch.dtype) -> tuple[int, int, int] | None:
    local = shard.local
    same = stored.shape[1:] == tuple(local.shape[1:]) and stored.offset[1:] == shard.offset[1:]
    if not (same and local.is_contiguous() and local.device.type == "cpu" and local.dtype == dtype):
        return None
    if not stored.shape:
        return 0, 1, 0
    inner = common.numel // common.shape[0]
    first = (common.offset[0] - stored.offset[0]) * inner
    return first, first + common.numel, (stored.offset[0] - shard.offset[0]) * inner


# Names of tensors that belong to a run rather than to the model: fine-tuning and generation do not ask for them.
STATE_PREFIXES = ("optimizer/", "previous/")
AVERAGES = "optimizer/ema/"

Reads = dict[str, list[tuple[StoredShard, list[LoadTarget]]]]


def plan_reads(manifest: Manifest, shards: Sequence[TensorShard], *, cast: bool, where: str) -> Reads:
    """file name -> its needed rectangles, each with where its values go; all is checked before a byte is read. Raises
    CheckpointError naming tensors that are missing, of another shape or of another dtype (unless `cast`)."""
    wanted: dict[str, dict[int, tuple[StoredShard, list[LoadTarget]]]] = {}
    problems: list[str] = []
    for shard in shards:
        stored = manifest.tensors.get(shard.name)
        if stored is None:
            problems.append(f"{shard.name}: not in the checkpoint")
            continue
        if stored.shape != tuple(shard.global_shape):
            problems.append(f"{shard.name}: shape {list(shard.global_shape)} (checkpoint {list(stored.shape)})")
            continue
        if stored.torch_dtype != shard.local.dtype and not cast:
            problems.append(f"{shard.name}: {shard.local.dtype} (checkpoint {stored.torch_dtype})")
            continue
        if not shard.box.numel:
            continue
        places = manifest.shards_by_tensor.get(shard.name, [])
        for index, common in cover(shard.box, [stored_shard.box for _, stored_shard in places]):
            file_name, source = places[index]
            target = LoadTarget(shard, common, _flat_range(source.box, shard, common, stored.torch_dtype))
            wanted.setdefault(file_name, {}).setdefault(source.begin, (source, []))[1].append(target)
    if problems:
        unique = list(dict.fromkeys(problems))
        more = f" (and {len(unique) - 3} more)" if len(unique) > 3 else ""
        raise CheckpointError(f"{where}: does not fit this model: {'; '.join(unique[:3])}{more}")
    return {name: [places[begin] for begin in sorted(places)] for name, places in sorted(wanted.items())}


def run_reads(path: Place, manifest: Manifest, reads: Reads) -> Iterator[int]:
    """Reads, verifies and distributes, block by block; yields the bytes of each. Raises CheckpointError naming the
    file."""
    scratch = torch.empty(manifest.block_bytes, dtype=torch.uint8)
    files = files_of(path, manifest)
    for file_name, places in reads.items():
        blocks = [block for source, targets in places for block in _blocks_of(manifest, source, targets)]
        with closing(open_shard_file(files / file_name, manifest.files[file_name], manifest.block_bytes)) as reader:
            reader.expect([(block.source, block.number, block.nbytes) for block in blocks])
            for block in blocks:
                values = block.straight
                if values is None:
                    dtype = manifest.tensors[block.source.tensor].torch_dtype
                    values = scratch[: block.nbytes].view(dtype)
                reader.read_block(block.source, block.number, flat_bytes(values))
                for target, box, common, at in block.pieces:
                    stored = values[at : at + box.numel].view(box.shape)
                    target.shard.local.detach()[common.slices_in(target.shard.box)].copy_(stored[common.slices_in(box)])
                yield block.nbytes


class _Block(NamedTuple):
    """A block of a stored rectangle that targets need. straight: where its values go without a copy, if to such a
    place. pieces: what else they are for."""

    source: StoredShard
    number: int
    nbytes: int
    straight: torch.Tensor | None
    pieces: list[tuple[LoadTarget, Box, Box, int]]


def _blocks_of(manifest: Manifest, source: StoredShard, targets: Sequence[LoadTarget]) -> Iterator[_Block]:
    itemsize = manifest.tensors[source.tensor].torch_dtype.itemsize
    per_block = manifest.block_bytes // itemsize
    for index in range(len(source.checksums)):
        first, last = index * per_block, min((index + 1) * per_block, source.box.numel)
        home = next((t for t in targets if t.flat and t.flat[0] <= first and last <= t.flat[1]), None)
        others = [target for target in targets if target is not home]
        pieces = _pieces(source.box, others, first, last) if others else []
        straight = None
        if home is not None and home.flat is not None:
            straight = home.shard.local.detach().view(-1)[first + home.flat[2] : last + home.flat[2]]
        if straight is not None or pieces:
            yield _Block(source, index, (last - first) * itemsize, straight, pieces)


def _pieces(
    stored: Box, targets: Sequence[LoadTarget], first: int, last: int
) -> list[tuple[LoadTarget, Box, Box, int]]:
    """The parts of elements `first .. last` of a stored rectangle that go to the targets: (target, a box that is
    contiguous in the file, the part of it that the target has, where the box begins after `first`)."""
    pieces, at = [], 0
    for inner in range_to_rectangles(stored.shape, first, last):
        box = Box(tuple(a + b for a, b in zip(stored.offset, inner.offset, strict=True)), inner.shape)
        for target in targets:
            common = box.intersect(target.common)
            if common is not None:
                pieces.append((target, box, common, at))
        at += box.numel
    return pieces


class RankLoad:
    """One rank's part of a collective load. What goes wrong stays in `problem` until the ranks agree on it. files: that
    it reads. mask: a bit for each stored tensor, in hex: whether this rank asks for it."""

    def __init__(self, path: Place, shards: Sequence[TensorShard], *, cast: bool) -> None:
        self.path = path
        self.nbytes = 0
        self.manifest: Manifest | None = None
        self.problem: str | None = None
        self.save_id, self.mask = "", "0"
        self.files: list[str] = []
        self._counts: Iterator[int] = iter(())
        with self._note_problem():
            manifest = read_manifest(path)
            reads = plan_reads(manifest, shards, cast=cast, where=str(path))
            names = {shard.name for shard in shards}
            bits = "".join("1" if name in names else "0" for name in manifest.tensors)
            self.save_id, self.mask = manifest.save_id, f"{int(bits or '0', 2):x}"  # short: every rank gathers it
            self._counts = run_reads(path, manifest, reads)
            self.manifest, self.files = manifest, [*reads]

    def read_first(self, *, rank: int, all_here: bool = True) -> None:
        """Reads the first block; rank 0 verifies also what no rank reads, if all files are `all_here`."""
        if self.manifest is not None:
            with self._note_problem():
                fault_point("load", rank=rank, step=self.manifest.step)
                if rank == 0 and all_here:
                    for name in self.manifest.extra_files:
                        read_extra(self.path, self.manifest, name)
                    folder, files = files_of(self.path, self.manifest), self.manifest.files
                    with ThreadPoolExecutor(_LOOKS) as pool:  # a store is asked for several at once
                        list(pool.map(lambda name: check_size(folder / name, files[name].nbytes), files))
                self.nbytes += next(self._counts, 0)

    def agree(self, plans: Sequence[tuple[str | None, str, str]], *, speaks: bool) -> Manifest:
        """Raises CheckpointError, on all ranks alike, where the ranks' plans do not add up to one load. plans: problem,
        save id and mask of each."""
        raise_first([problem for problem, _, _ in plans])
        assert self.manifest is not None
        if any(save_id != self.save_id for _, save_id, _ in plans):
            raise CheckpointError(
                f"{self.path}: the ranks see different checkpoints; is the directory shared by all hosts?"
            )
        used = 0
        for _, _, mask in plans:
            used |= int(mask, 16)
        bits = f"{used:0{len(self.manifest.tensors)}b}"
        unused = [name for name, bit in zip(self.manifest.tensors, bits, strict=False) if bit == "0"]
        if weights := [name for name in unused if not name.startswith(STATE_PREFIXES)]:
            more = f" (and {len(weights) - 3} more)" if len(weights) > 3 else ""
            raise CheckpointError(f"{self.path}: holds weights that this model lacks: {', '.join(weights[:3])}{more}")
        if unused and speaks:
            logger.info("%s: %d state tensors were not asked for and not loaded", self.path, len(unused))
        return self.manifest

    def read_rest(self) -> None:
        """Reads the others, unless something is wrong already."""
        if self.problem is None:
            with self._note_problem():
                self.nbytes += sum(self._counts)

    @contextmanager
    def _note_problem(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.problem = error.text
        except OSError as error:
            self.problem = f"{self.path}: cannot be read ({error.strerror})"


class CheckpointReader:
    """One process reads a checkpoint tensor by tensor, or slice by slice: for conversion and inspection. use_ema:
    averages (`--ema-decay`) in place of the weights that have one, `averaged`. Raises CheckpointError where the
    checkpoint is not committed, or holds no average, and from every read that meets damage."""

    def __init__(self, path: Place | str, *, use_ema: bool = False) -> None:
        self.path = self.directory = place(path)
        self.manifest = read_manifest(self.path)
        averages = [name for name in self.manifest.tensors if use_ema and name.startswith(AVERAGES)]
        self.averaged = {name.removeprefix(AVERAGES) for name in averages}
        if use_ema and not averages:
            raise CheckpointError(
                f"`use_ema`: {self.path} holds no average of weights, its run had no `ema_decay`; drop it"
            )

    @property
    def names(self) -> list[str]:
        return list(self.manifest.tensors)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The tensor, or the part of it in `box`, verified, in the stored dtype."""
        name = AVERAGES + name if name in self.averaged else name
        stored = self.manifest.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path}: holds no tensor {name}")
        box = box or Box.whole(stored.shape)
        values = torch.empty(box.shape, dtype=stored.torch_dtype)
        shard = TensorShard(name, stored.shape, box.offset, values)
        reads = plan_reads(self.manifest, [shard], cast=False, where=str(self.path))
        for _ in run_reads(self.path, self.manifest, reads):
            pass
        return values

    def chunks(self, name: str, max_bytes: int) -> Iterator[Box]:
        """Cuts a tensor into boxes of whole rows of at most `max_bytes` (at least one row)."""
        stored = self.manifest.tensors[name]
        whole = Box.whole(stored.shape)
        if not stored.shape or not whole.numel:
            yield from [whole] if whole.numel else []
            return
        rows = max(1, max_bytes // (stored.nbytes // stored.shape[0]))
        for first in range(0, stored.shape[0], rows):
            yield whole.rows(first, min(first + rows, stored.shape[0]))


def verify_checkpoint(
    path: Place | str,
    *,
    share: int = 0,
    shares: int = 1,
    with_state: bool = True,
    contents: bool = True,
    on_progress: OnProgress = no_progress,
) -> list[str]:
    """Verifies a checkpoint: one line for each damaged file, empty if it is whole. With `shares` ranks at work each
    verifies every `shares`-th file; `share` 0 also the small files. with_state: else the weights alone. contents: else
    only whether the files are there, as long as they were, with their headers."""
    root = place(path)
    try:
        manifest = read_manifest(root)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    names, folder = sorted(manifest.files)[share::shares], files_of(root, manifest)
    done, total = 0, sum(manifest.files[name].nbytes for name in names)

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total, "")

    for name in [*names, *(manifest.extra_files if share == 0 else ())]:
        try:
            if name in manifest.extra_files:
                read_extra(root, manifest, name)
                continue
            stored = manifest.files[name]
            verify_file(folder / name, stored, manifest.block_bytes, read, with_state=with_state, contents=contents)
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{root / name}: cannot be read ({error.strerror})")
    return problems


def verify_file(
    path: Place,
    stored: StoredFile,
    block_bytes: int,
    on_read: Callable[[int], None] = lambda nbytes: None,
    *,
    with_state: bool = True,
    contents: bool = True,
) -> None:
    """Raises CheckpointError where one safetensors file of a checkpoint is damaged; flags: `verify_checkpoint`."""
    buffer = memoryview(bytearray(block_bytes))
    ends = [*(shard.begin for shard in stored.shards[1:]), stored.nbytes]
    blocks = [
        (shard, index, min(block_bytes, end - at))
        for shard, end in zip(stored.shards, ends, strict=True)
        if contents and (with_state or not shard.tensor.startswith(STATE_PREFIXES))
        for index, at in enumerate(range(shard.begin, end, block_bytes))
    ]
    check_size(path, stored.nbytes)
    with closing(open_shard_file(path, stored, block_bytes)) as reader:
        reader.check_header()
        reader.expect(blocks)
        for shard, index, size in blocks:
            reader.read_block(shard, index, buffer[:size])
            on_read(size)
