"""A device without values: what its kernels return, and what the host finds where it reads.

Memory of the device is torch's `meta`: it has a shape and no values. Kernels run once for each shape; what they
returned is remembered. Small tensors whose values the host has put there, or that are computed from such, keep them
(`known`). What is read and was never known follows rules:

    a real number   1 (a norm is finite)        a count, an index   1       a truth   no
    bincount        the same for each bin (experts are balanced)    a mask that selects   everything
    a collective    as if every rank held what this one holds; a sum of real numbers is not 0
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megalite.rehearsal.fake_groups import FakeGroups
from megalite.rehearsal.order import tensors_in
from megalite.rehearsal.record import Call
from megalite.rehearsal.streams import Gpu
from megalite.rehearsal.watch import Computed, written_by

SMALL = 1 << 14
"""Bytes up to which values are computed where they are known."""
FEW = 64
"""Bytes of real numbers that are taken to be known where they are not: norms, sums, scales."""
LARGE = 1 << 20
"""Bytes from which the host computes nothing either, but indices: of where documents begin shapes are made."""
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property, whose type says bool
MISSING: Any = NotImplemented
"""In the place of a result that only the kernel itself can make."""


class Shapes(Computed):
    """Computes for a device whose memory is `meta`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._made: dict[Any, Any] = {}

    def __call__(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], *, there: bool) -> Any:
        """there: whether any argument is of the device."""
        if name in ("_local_scalar_dense", "item") and there:
            return self.read(args[0]).item()
        if name == "_to_copy" and there and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return self.read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if name == "copy_" and there and args[0].device.type == "cpu":
            return args[0].copy_(self.read(args[1])) if args[0].nbytes <= LARGE else args[0]
        if there:
            out = self._device(function, name, args, kwargs)
        else:
            given = tensors_in((args, kwargs))
            large = sum(x.nbytes for x in given) > LARGE and not any(x.is_meta or x.dtype == torch.int64 for x in given)
            out = written_first(function, args, kwargs) if large else MISSING
        return function(*args, **kwargs) if out is MISSING else out

    def _device(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name == "repeat_interleave" and len(args) == 1:
            with self._gpu.state(quiet=True):
                rows = kwargs.get("output_size") or int(self.read(args[0]).sum())
                return torch.empty(rows, dtype=torch.int64, device="meta")
        special = _SPECIAL.get(name)
        if special is not None and (out := special(*args, **kwargs)) is not MISSING:
            return out
        if function._schema.is_mutable:
            return written_first(function, args, kwargs)
        try:
            key: Any = (id(function), _plain(args), tuple((k, _plain(v)) for k, v in kwargs.items()))
            made = self._made.get(key)
        except TypeError:
            return MISSING
        if made is None:
            out = function(*args, **kwargs)
            if isinstance(out, Tensor) and out.is_meta:
                self._made[key] = _form(out)
            elif isinstance(out, (tuple, list)) and all(isinstance(x, Tensor) and x.is_meta for x in out):
                self._made[key] = [_form(x) for x in out]
            return out
        return _new(made) if isinstance(made, tuple) else tuple(map(_new, made))

    # ---- values ------------------------------------------------------------------------------------------------------

    def known(self, x: Tensor) -> Tensor | None:
        """Its values, where somebody knows them."""
        memory = self._gpu.ledger.of(x)
        if not memory.on_device:
            return None if x.is_meta else x
        if memory.known is None:
            return None
        return memory.known.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def read(self, x: Tensor) -> Tensor:
        """What the host finds in it."""
        with self._gpu.state(quiet=True):
            if (known := self.known(x)) is not None:
                return known.clone()
            return torch.full(x.shape, int(x.dtype != torch.bool), dtype=x.dtype)

    def know(self, x: Tensor, values: Tensor | None) -> None:
        """From now on its memory has these values; None: they are unknown."""
        memory = self._gpu.ledger.of(x)
        if values is None or (memory.known is None and x.nbytes != x.untyped_storage().nbytes()):
            memory.known = None
            return
        if memory.known is None:
            memory.known = torch.zeros(x.nbytes, dtype=torch.uint8)
        here = self.known(x)
        assert here is not None
        here.copy_(values)

    def follow(
        self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Tensor],
        outs: Sequence[Tensor], written: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Computes the values of a kernel of the device that has run, where they are few and known."""
        if name in ("_local_scalar_dense", "item"):
            return
        if name not in ("_to_copy", "bincount", "scatter_add_") and any(x.nbytes > SMALL for x in (*given, *outs)):
            for x in (*written, *outs):
                self._gpu.ledger.of(x).known = None
            if all(x.nbytes > FEW for x in outs):
                return
        with self._gpu.state(quiet=True, true_device=True):
            if name == "bincount":
                self.know(outs[0], torch.full(outs[0].shape, args[0].numel() // max(1, outs[0].numel())))
                return
            if name == "scatter_add_" and not args[0].is_floating_point() and args[0].nbytes <= SMALL:
                self.know(args[0], _balanced(args[0], args[3].numel()))
                return
            only_written = name in ("copy_", "zero_", "fill_")
            small = all(x.nbytes <= SMALL for x in (*given, *outs)) or (name == "_to_copy" and not given[0].is_meta)
            if small and only_written:
                for x in written:
                    if self.known(x) is None:
                        self.know(x, torch.zeros(x.shape, dtype=x.dtype))
            values: Any = {id(x): self.known(x) for x in given} if small else {}
            if not small or any(value is None for value in values.values()):
                for x in (*written, *outs):
                    if self._gpu.on_device(x):
                        few = x.is_floating_point() and x.nbytes == x.untyped_storage().nbytes() <= FEW
                        self.know(x, torch.ones(x.shape, dtype=x.dtype) if few else None)
                return
            try:
                there = {key: (torch.device("cpu") if key == "device" else value) for key, value in kwargs.items()}
                nested = tree_map_only(Tensor, lambda x: values[id(x)], (tuple(args), there))
                result = tensors_in(function(*nested[0], **nested[1]))  # what it writes, it writes on the host, too
            except (NotImplementedError, RuntimeError, IndexError):  # the host lacks the kernel, or a value is a rule's
                result = []
            if not written or not result:
                for x, value in zip_longest((*outs, *written), result):
                    if isinstance(x, Tensor) and self._gpu.on_device(x):
                        self.know(x, value if value is not None and x.shape == value.shape else None)


def deliver(gpu: Gpu, call: Call, target: Tensor, source: Tensor | None, fake: FakeGroups) -> None:
    """What arrives by a call whose other ranks hold what this one holds, or what they have given themselves."""
    shapes: Shapes = gpu.kernels
    size = len(call.communicator.ranks)
    with gpu.state(quiet=True, true_device=True):
        known = None if source is None else shapes.known(source)
        others = fake.gathered(call, known)
        if known is None or call.sent or call.kind in ("all_to_all", "recv") or "parts" in call.kind:
            shapes.know(target, None)
        elif call.kind == "all_gather":
            rows = known.reshape(-1).repeat(size).view(size, -1)
            for coordinate, row in others.items():
                if row.numel() == rows.shape[1] and row.dtype == rows.dtype:
                    rows[coordinate] = row
            shapes.know(target, rows.view(target.shape))
        elif call.kind == "reduce_scatter":
            shapes.know(target, known.reshape(size, -1)[0].view(target.shape) * size)
        elif call.kind == "all_reduce" and "sum" in (call.op or "sum"):
            total = known * size
            shapes.know(target, torch.where(total == 0, 1, total) if total.is_floating_point() else total)


def _balanced(counts: Tensor, things: int) -> Tensor:
    """Things dealt out evenly over the bins, in each row of the counts, but for one more in the first than in the last:
    of equal numbers nobody could tell what is sent from what is received. Of an odd number of bins the last is left
    empty (there go those that are dropped)."""
    bins = counts.shape[-1] - counts.shape[-1] % 2 or 1
    rows = max(1, counts.numel() // counts.shape[-1])
    share, more = divmod(things // rows, bins)
    row = [share + (n < more) if n < bins else 0 for n in range(counts.shape[-1])]
    if share > 1 and bins > 1:
        row[0], row[bins - 1] = row[0] + 1, row[bins - 1] - 1
    return torch.tensor(row, dtype=counts.dtype).expand(counts.shape)


def written_first(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a kernel that writes its arguments returns, without running it; MISSING where that is something new."""
    schema = function._schema
    if not schema.is_mutable or schema.name == "aten::set_":
        return MISSING
    if not schema.returns:
        return None
    written = written_by(function, args, kwargs)
    if len(schema.returns) != len(written):
        return MISSING
    return written[0] if len(written) == 1 else tuple(written)


def _plain(x: Any) -> Any:
    if isinstance(x, Tensor):
        return *_form(x), _IS_META(x)
    return tuple(map(_plain, x)) if isinstance(x, (list, tuple)) else x


def _form(x: Tensor) -> tuple[Any, ...]:
    return (x.shape, x.stride(), x.dtype)


def _new(form: tuple[Any, ...]) -> Tensor:
    return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """A mask selects everything."""
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.bool:
        return MISSING
    mask = indices[0]
    return torch.empty((mask.numel(), *x.shape[mask.dim() :]), dtype=x.dtype, device="meta")


_SPECIAL: dict[str, Any] = {
    "index": _index,
    "nonzero": lambda x: torch.empty((x.numel(), x.dim()), dtype=torch.int64, device="meta"),
    "bincount": lambda x, weights=None, minlength=0: torch.empty(
        minlength, dtype=torch.int64 if weights is None else weights.dtype, device="meta"
    ),
}
