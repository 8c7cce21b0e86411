"""Directories of torch.distributed.checkpoint, read rectangle by rectangle through another process.

.metadata        a pickle: every tensor's dtype, shape and chunks, each with its file, offset and length
__0_0.distcp     items one after the other, each a file of torch.save

DeepSpeed's universal checkpoints (`ds_to_universal.py`) have a folder a parameter:

global_step100_universal/zero/model.norm.weight/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
                         mp_rank_00_model_states.pt          global_steps, global_samples, skipped_steps

Each is a file of torch.save: a dictionary whose `param` is the tensor, or the tensor itself, flat (from ZeRO stage 3);
step.pt is a number, which stage 3 leaves to the counts of the run. Names and shapes of parameters are those of the
module, whatever the layout was.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import check_file_name, tiling_problem
from megalite.convert.megatron_process import DTYPES, Unpickler
from megalite.errors import CheckpointError
from megalite.inventory import Box, cover

METADATA = ".metadata"
FOLDER, PARAM = "zero", "param"
STATE = "optimizer.state."
KINDS = {"fp32": "{}", **{kind: f"{STATE}{{}}.{kind}" for kind in ("exp_avg", "exp_avg_sq", "step")}}
STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
Shape = tuple[int, ...]
StoredItem = tuple[Path, tuple[int, int]]
"""A part of a file: its (offset, length) in bytes."""


@dataclass(frozen=True)
class DcpTensor:
    """A tensor: its dtype's name in torch, its shape, and the boxes that make it up, each with its place."""

    dtype: str
    shape: Shape
    chunks: Sequence[tuple[Box, StoredItem]]


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor to be written: name, shape of the whole, offset, shape, and who reads its values."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class DcpFiles:
    """A checkpoint of torch.distributed.checkpoint. Every method raises CheckpointError where it is missing, damaged or
    hostile.

    flat: whether a tensor may lie there in one dimension. progress: as in `DeepSpeedFiles`."""

    flat = False
    progress: tuple[int, int, int] | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.unpickler = Unpickler()
        path = directory / METADATA
        if not path.is_file():
            raise CheckpointError(f"{directory}: holds no {METADATA}: not a whole checkpoint of torch.distributed")
        listed = self.unpickler.metadata(path)
        try:
            self.tensors: Mapping[str, DcpTensor] = {n: self._tensor(n, e) for n, e in listed["tensors"].items()}
            self.objects: Mapping[str, StoredItem] = {n: self._item(place) for n, place in listed["objects"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: not what torch.distributed.checkpoint writes") from None
        self.names: Collection[str] = self.tensors.keys()

    def _tensor(self, name: str, entry: Any) -> DcpTensor:
        dtype, shape, listed = entry
        chunks = [(Box(_extents(offset), _extents(sizes)), self._item(place)) for offset, sizes, *place in listed]
        shape = _extents(shape)
        if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box, _ in chunks):
            raise ValueError(name)
        whole = Box.whole(shape)
        outside = next((box for box, _ in chunks if box.numel and box.intersect(whole) != box), None)
        problem = f"{outside} is not inside" if outside else tiling_problem([box for box, _ in chunks], shape)
        if problem:
            raise CheckpointError(f"{self.directory}: {name[:80]}: {problem}")
        size = DTYPES[dtype].itemsize if dtype in DTYPES else 1
        for box, (path, (_, length)) in chunks:
            if box.numel * size > length:
                raise CheckpointError(f"{path}: {name[:80]} {box} claims to be larger than its {length} bytes")
        return DcpTensor(str(dtype), shape, chunks)

    def _item(self, place: Any) -> StoredItem:
        name, *at = place
        if not isinstance(name, str):
            raise ValueError(name)
        offset, length = _extents(at)
        return self.directory / check_file_name(name, str(self.directory / METADATA)), (offset, length)

    def shape(self, name: str) -> Shape:
        return self.tensors[name].shape

    def read(self, name: str, at: Sequence[int] = ()) -> Tensor:
        """The tensor, or its part at the leading indices `at`, which has their number of dimensions less."""
        stored = self.tensors[name]
        box = Box((*at, *(0 for _ in stored.shape[len(at) :])), (*(1 for _ in at), *stored.shape[len(at) :]))
        values = torch.empty(box.shape, dtype=DTYPES.get(stored.dtype))
        for index, common in cover(box, [chunk for chunk, _ in stored.chunks]):
            chunk, (path, extent) = stored.chunks[index]
            part = self.unpickler.item(path, name, extent, (stored.dtype, chunk.shape))
            if common == box == chunk:
                values = part
                break
            values[common.slices_in(box)] = part[common.slices_in(chunk)]
        return values.reshape(box.shape[len(at) :])

    def content(self, name: str) -> Any:
        """The plain values of an object."""
        return self.unpickler.content(*self.objects[name])


class DeepSpeedFiles:
    """Such a folder under the names that torchtitan's have in `DcpFiles`. Every method raises CheckpointError."""

    flat = True

    def __init__(self, directory: Path) -> None:
        self.directory, self._unpickler = directory, Unpickler()
        found = {kind: sorted((directory / FOLDER).glob(f"*/{kind}.pt")) for kind in KINDS}
        self._paths = {KINDS[kind].format(path.parent.name): path for kind in KINDS for path in found[kind]}
        self._states = next((path for name in STATES if (path := directory / name).is_file()), None)
        counted = found["exp_avg"] if self._states is not None and not found["step"] else []
        self._counted = {KINDS["step"].format(path.parent.name) for path in counted}
        self.names: Collection[str] = self._paths.keys() | self._counted

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1]

    def read(self, name: str) -> Tensor:
        if name in self._counted and self.progress is not None:
            done, _, skipped = self.progress
            return torch.tensor(float(done - skipped))
        path = self._paths[name]
        if name.endswith(".step"):
            return torch.tensor(_number(path, self._unpickler.content(path)))
        return self._unpickler.read(path, 0, PARAM, self._entry(name))

    def _entry(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._unpickler.open(self._paths[name]).models[0][PARAM]

    @cached_property
    def progress(self) -> tuple[int, int, int] | None:
        """Iterations done, samples consumed, iterations that made no step; None where no file says so."""
        if self._states is None:
            return None
        said = self._unpickler.content(self._states)
        found = {"skipped_steps": 0, **said} if isinstance(said, dict) else {}
        done, samples, skipped = (
            int(_number(self._states, found.get(key))) for key in ("global_steps", "global_samples", "skipped_steps")
        )
        return done, samples, skipped


def _number(path: Path, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**53 or value != int(value):
        raise CheckpointError(f"{path}: {str(value)[:40]!r} is not a number of steps or samples")
    return float(value)


def _extents(values: Any) -> Shape:
    if not isinstance(values, list | tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in values):
        raise ValueError(values)
    return tuple(values)
