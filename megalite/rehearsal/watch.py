"""Sees every kernel: where it would run on a GPU, what it reads and writes, and whether the host waits for it.

Copies between the places, as torch makes them (aten/src/ATen/native/cuda/Copy.cu):

    page-locked, non_blocking, dense, one dtype    a stream reads and writes both ends
    not page-locked                                the host reads its end at once, or waits until it is written
    strided, or of another dtype                   the host makes a copy of its end first, at once
    not non_blocking                               the host waits
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.rehearsal.order import Line, is_dense, tensors_in, where
from megalite.rehearsal.streams import Gpu

ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}
OVERWRITE = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"}
"""In-place kernels that read nothing of their target."""
HOST_WAITS = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive", 
    "unique_dim", "equal", "is_nonzero",
}  # fmt: skip
MADE_INSIDE = {"scalar_tensor", "zeros", "ones", "new_empty_strided", "new_zeros"}
"""Factories that torch calls by itself with the true device of a tensor of ours."""
INDEXED = {"index", "index_put", "index_put_", "index_put_impl_"}
"""Kernels that find out where a mask is true."""
SYNC_NAMES = {"_local_scalar_dense": "item()", "item": "item()"}
Ends = tuple[list[Tensor], list[Tensor]]
aten = torch.ops.aten
MAY_MIX = {"index", "index_put", "index_put_", "_index_put_impl_", "_fused_adamw_", "_foreach_add_"}
"""Kernels of the device that may be given tensors of the host that are not numbers."""


class Computed:
    """Computes in the memory of a CPU. puts_off: whether work of streams may be done later, which is told:

    follow      a kernel has run
    settle      somebody knows that all of a clock is over
    provide     tensors are needed now, by somebody who knows that all of a clock is over
    changes     memories were written at once, or have become others
    waited      a stream has waited for another
    allocates   new memory that nothing writes yet, of the pool of a line
    keep        the memory of a tensor stays until what a line was given is over
    """

    puts_off = False

    def __call__(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], *, there: bool) -> Any:
        """Products with sums in a wider dtype exist on CUDA alone."""
        if function not in (aten.mm.dtype_out, aten.addmm.dtype_out):
            return function(*args, **kwargs)
        a, b, dtype = args[-3:]
        product = torch.mm(a.to(dtype), b.to(dtype)) * kwargs.get("alpha", 1)
        return kwargs["out"].copy_(product + args[0] * kwargs.get("beta", 1) if len(args) == 4 else product)

    def nothing(self, *_: Any) -> None:
        """Everything is computed, and nothing waits."""

    follow = settle = provide = changes = waited = allocates = keep = nothing

    def arrival(self, line: Line, carried: Any, copies: Sequence[Tensor], reads: Any, writes: Any) -> Any:
        """A handle of gloo's, and what it delivers to what is written, as `Work` takes them."""
        return carried, copies


class Watch(TorchDispatchMode):
    """Tells the ledger of `gpu` of this thread's kernels."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a rehearsal, so nothing need be kept from being compiled, at a cost a kernel."""
        return False

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._gpu, self._ledger = gpu, gpu.ledger
        self._cost, self._kinds = (0.0, ""), dict[int, tuple[str, bool, bool]]()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, local = kwargs or {}, self._gpu.local
        if local.quiet:
            return function(*args, **kwargs)
        name, is_view, silent = self._kinds.get(id(function)) or self._kinds.setdefault(id(function), _kind(function))
        before, local.true_device = local.true_device, True
        try:
            if is_view:
                return function(*args, **kwargs)
            given = tensors_in((args, kwargs) if kwargs else args)
            known = {x.untyped_storage()._cdata for x in given}
            places = [self._ledger.on_device(key) for key in known]
            there = True in places
            goes_there, pinned = self._place(name, there, kwargs)
            real = kwargs
            if "device" in kwargs or "pin_memory" in kwargs:
                device = self._gpu.place if _says_cuda(kwargs.get("device")) else kwargs.get("device")
                own = {"device": device, "pin_memory": None}
                real = kwargs | {key: value for key, value in own.items() if key in kwargs}
            out = self._gpu.kernels(function, name, args, real, there=there)
            self._cost = (0.0, "") if (prices := self._ledger.prices) is None else prices.kernel(function, args, out)
        finally:
            local.true_device = before
        outs, at = tensors_in(out), where()
        fresh = [x for x in outs if x.untyped_storage()._cdata not in known]
        everywhere = goes_there and False not in places
        for x in fresh:
            storage = x.untyped_storage()
            if self._ledger.find(storage) is None:
                line = local.current.line if goes_there else None
                if silent:
                    self._gpu.kernels.allocates(storage, line)
                self._ledger.enter(storage, line, pinned, at)
            else:
                everywhere = False
        if silent:
            return out
        written = written_by(function, args, kwargs)
        if not (there or goes_there):
            self._ledger.work(self._ledger.host, name, *_ends(name, given, written, fresh), place=at)
            return out
        if name in ("copy_", "_to_copy"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], fresh[0] if fresh else args[0])
            free = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            self._copy(name, target, source, free=free)
        else:
            waits = waits_for_values(name, args, kwargs)
            self._kernel(name, _ends(name, given, written, fresh), at, waits=waits, everywhere=everywhere)
        self._gpu.kernels.follow(function, name, args, real, given, outs, written)
        return out

    def _place(self, name: str, there: bool, kwargs: dict[str, Any]) -> tuple[bool, bool]:
        """Whether new memory of the kernel is on the device, and if not, whether it is page-locked."""
        wanted, pinned = kwargs.get("device"), bool(kwargs.get("pin_memory"))
        if wanted is None or (name == "_to_copy" and not self._gpu.on_its_way):
            return there or _says_cuda(wanted), pinned  # of a copy that autograd makes, the device is the true one
        torchs = there and name.startswith("new_") and "pin_memory" not in kwargs  # which a program's own call has
        inside = name in MADE_INSIDE and (self._gpu.place.type == "meta" or torchs)
        own = inside and torch.device(wanted).type == self._gpu.place.type
        goes_there = _says_cuda(wanted) or own
        if name == "_to_copy" and there and not goes_there and kwargs.get("non_blocking"):
            pinned = True
        return goes_there, pinned

    def _kernel(self, name: str, ends: Ends, at: str, *, waits: bool, everywhere: bool) -> None:
        """Numbers that are on the host are read when it is launched. everywhere: whether all ends are on the device, if
        that is known."""
        there, (reads, writes) = self._gpu.on_device, ends
        at_launch = [] if everywhere else [x for x in reads if not there(x)]
        if any(x.dim() for x in at_launch) and name not in MAY_MIX:
            raise RuntimeError(f"{name}: some tensors are on the device and some on the host")
        if at_launch:
            self._ledger.work(self._ledger.host, f"{name}, as it is launched,", at_launch, [])
            reads = [x for x in reads if there(x)]
        self._launch(name, reads, writes, self._cost, at)
        if waits or not (everywhere or all(map(there, writes))):
            self._gpu.local.current.synchronize(SYNC_NAMES.get(name, name))

    def _launch(
        self, name: str, reads: list[Tensor], writes: list[Tensor], cost: tuple[float, str] = (0.0, ""), at: str = ""
    ) -> None:
        """Work of the current stream. What a graph gets is done when it is replayed."""
        if self._gpu.local.capturing is None:
            self._ledger.work(self._gpu.local.current.line, name, reads, writes, cost, at)

    def _copy(self, name: str, target: Tensor, source: Tensor, *, free: bool) -> None:
        ledger, stream = self._ledger, self._gpu.current
        to, of = ledger.of(target), ledger.of(source)
        if to.on_device and of.on_device:
            self._launch(name, [source], [target])
            return
        whole = source.dtype == target.dtype and is_dense(source) and is_dense(target)
        plain = whole and source.stride() == target.stride()
        if to.on_device:
            if plain and of.pinned:
                self._launch(name, [source], [target])
            else:
                ledger.work(ledger.host, f"{name}, packing for the device,", [source], [])
                self._launch(name, [], [target])
        elif plain:
            self._launch(name, [source], [target])
        else:
            self._launch(name, [source], [])
            stream.synchronize("a copy that the host unpacks")
            ledger.work(ledger.host, f"{name}, unpacking on the host,", [], [target])
        if not free or (not to.on_device and not to.pinned):
            stream.synchronize("a copy from the host" if to.on_device else "a copy to the host")


def _ends(name: str, given: list[Tensor], written: list[Tensor], fresh: list[Tensor]) -> Ends:
    """What a kernel reads, and what it writes."""
    ids = {id(x) for x in written}
    reads = [x for x in given if id(x) not in ids] if ids else given
    return reads if name in OVERWRITE else reads + written, written + fresh


def waits_for_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host waits for what a kernel finds."""
    masks = name.lstrip("_") in INDEXED and any(x.dtype == torch.bool for x in tensors_in(args[1]))
    if masks and len(args) > 2 and args[2].numel() == 1:  # a fill
        masks = False
    counts = name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) == 1
    return name in HOST_WAITS or masks or counts


def _says_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def written_by(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that a kernel writes."""
    found = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(function)]
    return tensors_in(found) if found else []


@cache
def _kind(function: Any) -> tuple[str, bool, bool]:
    """(Its name, whether it makes a view, whether it makes at most memory and no work). In inference mode kernels come
    that are made of others: of these `reshape` and its like may copy."""
    name = function._schema.name.removeprefix("aten::")
    views = function.is_view or name == "_unsafe_view"
    return name, views and not function._can_decompose(), views or name in ALLOCATE


@cache
def _written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """(Position, name) of them."""
    arguments = enumerate(function._schema.arguments)
    return tuple((at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write)
